"""The layouts of other projects, recognised by the names of tensors alone, and the way to ours."""

import re
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Literal, NamedTuple

from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts.rules import Converted
from vision.models.positions.relative import WindowMethod

PositionMethod = Literal[
    "bicubic_antialias", "bicubic", "bicubic_corners", "dino", "bilinear_corners"
]
"""timm · Hugging Face, DeiT, mmpretrain · torchvision · DINO and DINOv2 · Google, big_vision."""
Layout = str
"""One of the names in `LAYOUTS`."""


class Known(NamedTuple):
    """What is known of a layout and its project."""

    converter: str
    """The function that converts its names; the module is imported when a file has the layout."""
    head: str | None = None
    """Name of the classifier, where the network gives what it takes: pooled, normed features."""
    positions: PositionMethod = "bicubic_antialias"
    """How the project resizes a table of positions; timm's way where it has none of its own."""
    windows: WindowMethod = "geometric"
    """How it fits a table of relative positions to another window or grid."""


LAYOUTS: dict[Layout, Known] = {
    "vision": Known("", "head"),
    "timm ViT": Known("timm.timm_names.vit_to_ours", "head"),
    "timm Swin": Known("timm.timm_names.swin_to_ours", "head.fc"),
    "official Swin": Known("timm.timm_names.official_to_ours", "head", "bicubic", "bicubic"),
    "DeiT": Known("meta.deit_to_ours", "head", "bicubic"),
    "DINO": Known("meta.dino_to_ours", "head", "dino"),
    "DINOv3": Known("meta.dinov3_to_ours", positions="bicubic"),
    "MAE": Known("meta.mae_to_ours", "head", "bicubic"),
    "torchvision ViT": Known("torchvision.vit_to_ours", positions="bicubic_corners"),
    "torchvision Swin": Known("torchvision.swin_to_ours", positions="bicubic_corners"),
    "Hugging Face": Known("huggingface.huggingface_names.to_ours", None, "bicubic", "bilinear"),
    "Google npz": Known("google.to_ours", positions="bilinear_corners"),
    "mmpretrain": Known("mmpretrain.to_ours", positions="bicubic"),
    "BEiT": Known("meta.beit_to_ours"),
    "CLIP": Known("openclip.to_ours"),
    "CLIP with timm's tower": Known("openclip.timm_tower_to_ours"),
    "vit-pytorch": Known("vit_pytorch.to_ours"),
    "PyTorch ViT": Known("students.to_ours"),
}
TYPES = "(vit|deit|dinov2|dinov2_with_registers|swin|swinv2|beit|data2vec_vision|vision_model)"
"""What stands in front of the names of a model of Hugging Face that has a head."""
_REFUSED = (
    # Before CLIP: a ResNet has a conv1.weight too.
    (
        r"visual\.(trunk\.)?layer1\.0\.conv1\.weight",
        "a CLIP whose image tower is a ResNet. Open one with a ViT, such as ViT-B-32",
    ),
    (r"encoder\.block\.0\..*|conv_stem\..*|layer1\.0\.conv1\.weight", "a convolutional network"),
    (
        r"stages\.0\.blocks\.0\.attn\.meta_mlp\..*",
        "timm's swinv2_cr, another network than Swin V2 in spite of its name, such as "
        "model=timm model.name=swinv2_cr_tiny_224",
    ),
    (r"conv_root/.*|patch_embed\.backbone\..*", "a hybrid of a convolutional network and a ViT"),
    (r"blocks\.0\.(in_proj|attns\.0)\..*", "a ViT with parallel branches"),
    (
        r"blocks\.0\.attn\.(gate|rel_pos_h|rel_pos)(\..*)?|shared_rel_pos\..*",
        "a ViT with another kind of attention",
    ),
    (r"embeds\.pos_embed_[xy]", "a NaFlexVit whose rows and columns have tables of their own"),
)
"""Networks that are recognised in order to say what they are."""
_REMEDY = "A model that timm has runs as a baseline: model=timm model.name=… (timm's name for it)."


_VIT, _SWIN = r"blocks\.0\.attn\.(qkv|q_proj)\.weight", r"layers\.0\.blocks\.0\.attn\.qkv\.weight"
_SCALED = r"blocks\.0\.gamma_1", r"blocks\.0\.attn\.qkv\.bias", "pos_embed"
_SHOWN: tuple[tuple[Layout, *tuple[str, ...]], ...] = (
    ("BEiT", r"blocks\.0\.attn\.q_bias", r"mask_token|lm_head\.weight"),
    ("Google npz", r"(.*/)?embedding/kernel"),
    ("torchvision Swin", r"features\.1\.0\.attn\.qkv\.weight"),
    ("torchvision ViT", r"encoder\.layers\.encoder_layer_0\..*"),
    ("Hugging Face", rf"({TYPES}\.)?embeddings\.patch_embedding(s|s\.projection)?\.weight"),
    (
        "CLIP",
        r"(visual\.)?transformer\.resblocks\.0\.attn\.in_proj_weight",
        r"(visual\.)?class_embedding",
    ),
    ("CLIP with timm's tower", r"visual\.trunk\.patch_embed\.proj\.weight"),
    ("vit-pytorch", r"transformer\.layers\.0\.0\.(fn\.){0,2}to_qkv\.weight"),
    (
        "mmpretrain",
        r"(backbone\.)?(layers\.0\.ln1\.weight|stages\.0\.blocks\.0\.attn\.w_msa\..*)",
    ),
    ("vision", _SWIN, r"patch_norm\..*"),
    ("official Swin", _SWIN, r"layers\.0\.downsample\..*"),
    # Not by the head alone: a file without one, or of timm 0.9 with buffers, would be wrong.
    ("timm Swin", _SWIN, r"layers\.1\..*|head\.fc\.weight"),
    ("official Swin", _SWIN),
    ("vision", _VIT, r"positions\..*"),
    ("DINOv3", _VIT, r"storage_tokens|rope_embed\.periods"),
    (
        "timm ViT",
        _VIT,
        *_SCALED,
        r"reg_token|norm_pre\.weight|rope\.freqs|blocks\.0\.mlp\.norm\.weight",
    ),
    ("DeiT", _VIT, *_SCALED),
    ("MAE", _VIT, r"decoder_.*"),
    (
        "DINO",
        _VIT,
        r"mask_token|register_tokens|linear_head\.weight|blocks\.0\.mlp\.w12\.weight"
        r"|head\.(mlp|last_layer)\..*",
    ),
    ("timm ViT", _VIT),
    ("PyTorch ViT", r"(?:\w+\.)*?(\d+)\.(?:\w+\.)*in_proj_weight"),
)
"""Layouts with patterns of names, all of which a file has; the first row that fits holds."""


def recognise(names: Collection[str]) -> Layout:
    """The layout of a file with these tensors, or an error that says what the file is."""
    lines = "\n".join(names)  # one search is quicker than one for every name

    def found(pattern: str) -> re.Match[str] | None:
        return re.search(f"^(?:{pattern})$", lines, re.MULTILINE)

    for pattern, what in _REFUSED:
        if name := found(pattern):
            raise CheckpointError(
                f"The weights are those of {what} (tensor '{name[0]}'). {_REMEDY}"
            )
    for layout, *patterns in _SHOWN:
        if all(map(found, patterns)):
            return layout
    some = ", ".join(f"'{name}'" for name in sorted(names)[:5])
    raise CheckpointError(
        f"The weights are not those of a known ViT or Swin: none of the {len(names)} tensors has a "
        f"name that shows the layout (the first ones: {some}). {_REMEDY}"
    )


def convert_names(layout: Layout, tensors: Mapping[str, Tensor]) -> Converted:
    """Tensors of a layout under this project's names."""
    if layout == "vision":
        return Converted(dict(tensors))
    module, _, function = LAYOUTS[layout].converter.rpartition(".")
    convert = getattr(import_module(f"vision.checkpoints.layouts.{module}"), function)
    converted: Converted = convert(tensors)
    return converted


def resizing(project: str | None, names: Collection[str]) -> tuple[PositionMethod, WindowMethod]:
    """How a project fits tables of positions, and of relative ones, to another grid: that of a
    layout, or timm. `names` are those of the file's tensors.
    """
    known = LAYOUTS.get(project or "", LAYOUTS["timm ViT"])
    if project == "DINO" and {"register_tokens", "reg_token"} & set(names):
        # DINOv2 with registers turned the offset off and antialiasing on.
        return "bicubic_antialias", known.windows
    return known.positions, known.windows
