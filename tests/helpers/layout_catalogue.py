"""Every layout that opens natively, as its library writes it: small models, all weights redrawn.

A case writes its weights to a folder and gives the place, what must be said about it, and the
library's own output for images of any size.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import transformers
from foreign_models import CLASSES, drawn
from timm.models import save_for_hf
from torch import Tensor, nn
from torchvision.models import swin_transformer as torchvision_swin
from torchvision.models import vision_transformer as torchvision_vit

Output = Callable[[Tensor], Tensor]


class Written(NamedTuple):
    """Weights on the disk, and what their library makes of images."""

    place: Path
    given: dict[str, Any]
    output: Output
    peer: nn.Module


class Case(NamedTuple):
    """One layout."""

    write: Callable[[Path], Written]
    size: int
    """Of the images in training."""
    other: int
    """Another size."""
    head: bool = True
    double: float = 1e-9
    """Largest difference in 64 bits, in units of the deviation."""


def _timm(name: str, size: int, other: int, head: bool = True, **arguments: Any) -> Case:
    """A model of timm in a folder as its hub has them: the architecture is known by name."""
    number = CLASSES if head else 0
    small = {"img_size": size, "depth": 2, "num_classes": number, **arguments}
    if "swin" in name:
        small.pop("depth")

    def write(folder: Path) -> Written:
        model = drawn(timm.create_model(name, **small))
        written = {key: value for key, value in small.items() if key != "num_classes"}
        save_for_hf(model, folder, model_args=written)

        def output(images: Tensor) -> Tensor:
            if images.shape[-1] == size:
                return model(images)
            resized = timm.create_model(name, **(small | {"img_size": images.shape[-1]}))
            fit = sys.modules[type(model).__module__].checkpoint_filter_fn
            resized.to(images.dtype).load_state_dict(fit(dict(model.state_dict()), resized))
            return resized.eval()(images)

        return Written(folder, {}, output, model)

    return Case(write, size, other, head)


def _transformers(kind: str, size: int, other: int, *, head: bool = True, **values: Any) -> Case:
    """A model of transformers, as save_pretrained writes it."""
    config_class, take = values.pop("config"), values.pop("take", "logits")

    def write(folder: Path) -> Written:
        config = getattr(transformers, config_class)(image_size=size, num_labels=CLASSES, **values)
        model = drawn(getattr(transformers, kind)(config))
        model.save_pretrained(folder)

        def output(images: Tensor) -> Tensor:
            options = {}
            if tuple(images.shape[-2:]) != (size, size) and "Swin" not in kind:
                options = {} if "DINOv3" in kind else {"interpolate_pos_encoding": True}
            found = model(images, **options)
            return found[take] if isinstance(take, str) else take(found)

        return Written(folder, {}, output, model)

    return Case(write, size, other, head)


def _torchvision_vit(size: int, other: int) -> Case:
    def build(at: int) -> Any:
        return torchvision_vit.VisionTransformer(
            image_size=at,
            patch_size=8,
            num_layers=2,
            num_heads=4,
            hidden_dim=64,
            mlp_dim=128,
            num_classes=CLASSES,
            representation_size=32,
        )

    def write(folder: Path) -> Written:
        model = drawn(build(size))
        torch.save(model.state_dict(), folder / "weights.pth")

        def output(images: Tensor) -> Tensor:
            at = images.shape[-1]
            state = torchvision_vit.interpolate_embeddings(at, 8, dict(model.state_dict()))
            resized = build(at).to(images.dtype).eval()
            resized.load_state_dict(state)
            return resized(images)

        return Written(folder / "weights.pth", {"heads": 4}, output, model)

    return Case(write, size, other)


def _torchvision_swin(size: int, other: int, second: bool) -> Case:
    def write(folder: Path) -> Written:
        parts: dict[str, Any] = {}
        if second:
            parts["block"] = torchvision_swin.SwinTransformerBlockV2
            parts["downsample_layer"] = torchvision_swin.PatchMergingV2
        model = drawn(
            torchvision_swin.SwinTransformer(
                patch_size=[2, 2],
                embed_dim=16,
                depths=[2, 2, 2],
                num_heads=[2, 2, 4],
                window_size=[4, 4],
                num_classes=CLASSES,
                **parts,
            )
        )
        torch.save(model.state_dict(), folder / "weights.pth")
        # At sizes that need no padding both are the same; padding=attend is torchvision's way.
        return Written(folder / "weights.pth", {"padding": "attend"}, model, model)

    return Case(write, size, other)


TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "patch_size": 8,
}
STAGES: dict[str, Any] = {
    "embed_dim": 16,
    "depths": [2, 2, 2],
    "num_heads": [2, 2, 4],
    "patch_size": 2,
    "window_size": 4,
}
VIT: dict[str, Any] = {"embed_dim": 64, "num_heads": 4, "patch_size": 8}

CASES: dict[str, Case] = {
    "timm ViT": _timm("vit_tiny_patch16_224", 32, 48, **VIT),
    "timm ViT, mean": _timm("vit_base_patch16_gap_224", 32, 48, **VIT),
    "timm DeiT, distilled": _timm("deit_tiny_distilled_patch16_224", 32, 48, **VIT),
    "timm DeiT-III": _timm("deit3_small_patch16_224", 32, 48, **VIT),
    "timm DINOv2": _timm("vit_small_patch14_reg4_dinov2", 32, 48, **VIT),
    "timm DINOv3": _timm("vit_small_patch16_dinov3", 32, 48, **VIT),
    "timm DINOv3, biases": _timm("vit_small_plus_patch16_dinov3_qkvb", 32, 48, **VIT),
    "timm rotary": _timm("vit_small_patch16_rope_224", 32, 48, **VIT),
    "timm rotary and table": _timm("vit_small_patch16_rope_ape_224", 32, 48, **VIT),
    # timm cannot run these frequencies in 64 bits.
    "timm rotary, mixed": _timm("vit_small_patch16_rope_mixed_224", 32, 48, **VIT)._replace(
        double=float("inf")
    ),
    "timm rotary and mean": _timm("vit_medium_patch16_rope_reg1_gap_256", 32, 48, **VIT),
    "timm CLIP": _timm("vit_base_patch16_clip_quickgelu_224", 32, 48, **VIT),
    "timm SigLIP": _timm("vit_base_patch16_siglip_224", 32, 48, **VIT),
    # At another size timm's geometric coordinates are rounded to 32 bits on the way.
    "timm BEiT": _timm("beit_base_patch16_224", 32, 48, **VIT)._replace(double=1e-8),
    "timm EVA": _timm("eva_giant_patch14_224", 32, 48, **VIT),
    "timm EVA-02": _timm("eva02_base_patch14_224", 32, 48, **VIT),
    "timm EVA-02-CLIP": _timm("eva02_base_patch16_clip_224", 32, 48, **VIT),
    "timm PE": _timm("vit_pe_core_base_patch16_224", 32, 48, **VIT),
    "timm FlexiViT": _timm("flexivit_small", 32, 48, **VIT),
    "timm Swin": _timm(
        "swin_tiny_patch4_window7_224",
        56,
        112,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    "timm Swin S3": _timm(
        "swin_s3_tiny_224",
        112,
        224,
        embed_dim=16,
        depths=(2, 2, 2),
        num_heads=(2, 4, 8),
        window_size=(7, 14, 7),
    ),
    "timm Swin V2": _timm(
        "swinv2_tiny_window8_256",
        64,
        128,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    "HF ViT": _transformers("ViTForImageClassification", 32, 48, config="ViTConfig", **TINY),
    # The token that its head does not read is stored here with its position, rounded to 32 bits.
    "HF DeiT": _transformers(
        "DeiTForImageClassification", 32, 48, config="DeiTConfig", **TINY
    )._replace(double=1e-7),
    "HF DINOv2": _transformers(
        "Dinov2ForImageClassification", 32, 48, config="Dinov2Config", **TINY
    ),
    "HF DINOv3": _transformers(
        "DINOv3ViTModel",
        32,
        48,
        head=False,
        config="DINOv3ViTConfig",
        take="pooler_output",
        num_register_tokens=4,
        use_gated_mlp=True,
        hidden_act="silu",
        **TINY,
    ),
    "HF CLIP": _transformers(
        "CLIPForImageClassification",
        32,
        48,
        config="CLIPConfig",
        vision_config=TINY | {"image_size": 32, "hidden_act": "quick_gelu"},
        text_config={"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2},
    ),
    "HF CLIP tower": _transformers(
        "CLIPVisionModelWithProjection",
        32,
        48,
        head=False,
        config="CLIPVisionConfig",
        take="image_embeds",
        projection_dim=24,
        **TINY,
    ),
    "HF SigLIP": _transformers(
        "SiglipVisionModel",
        32,
        48,
        head=False,
        config="SiglipVisionConfig",
        take="pooler_output",
        **TINY,
    ),
    "HF BEiT": _transformers(
        "BeitForImageClassification",
        32,
        32,
        config="BeitConfig",
        use_relative_position_bias=True,
        **TINY,
    ),
    "HF Swin": _transformers("SwinForImageClassification", 32, 64, config="SwinConfig", **STAGES),
    # At another size transformers keeps the shifts of the trained one in V2.
    "HF Swin V2": _transformers(
        "Swinv2ForImageClassification", 32, 32, config="Swinv2Config", **STAGES
    ),
    "torchvision ViT": _torchvision_vit(32, 48),
    "torchvision Swin": _torchvision_swin(32, 40, second=False),
    "torchvision Swin V2": _torchvision_swin(32, 40, second=True),
}
FAMILIES = (
    "timm ViT",
    "timm DINOv3, biases",
    "timm rotary and table",
    "timm CLIP",
    "timm SigLIP",
    "timm BEiT",
    "timm EVA-02",
    "timm PE",
    "timm Swin S3",
    "HF DINOv2",
    "HF CLIP",
    "torchvision ViT",
)
"""One of each family: what the default run looks at."""
