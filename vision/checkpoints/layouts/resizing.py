"""How each project resizes its tables of positions."""

from collections.abc import Collection

from vision.checkpoints.fit.resize import PositionMethod
from vision.models.positions.relative import WindowMethod


def position_method(layout: str | None, names: Collection[str]) -> PositionMethod:
    """The method of the project whose layout a file has; `names` are those of its tensors."""
    match layout:
        case "torchvision ViT" | "torchvision Swin":
            return "bicubic_corners"
        case "DINO":
            # DINOv2 with registers turned the offset off and antialiasing on.
            registers = {"register_tokens", "reg_token"} & set(names)
            return "bicubic_antialias" if registers else "dino"
        case "Google npz":
            return "bilinear_corners"
        case "Hugging Face" | "DeiT" | "MAE" | "mmpretrain" | "official Swin" | "DINOv3":
            return "bicubic"
        case _:  # timm and OpenCLIP; the others have no way of their own
            return "bicubic_antialias"


def window_method(layout: str | None) -> WindowMethod:
    """How the project of a layout fits a table of relative positions to another window or grid."""
    match layout:
        case "official Swin":
            return "bicubic"
        case "Hugging Face":
            return "bilinear"
        case _:
            return "geometric"
