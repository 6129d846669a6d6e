"""The same architectures as this project, timm, torchvision and transformers build them: random
weights, 1000 classes, no dropout, no stochastic depth.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import timm
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchvision.models.swin_transformer import (
    PatchMerging,
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerBlockV2,
)
from torchvision.models.vision_transformer import VisionTransformer

from vision.config import parse
from vision.models.build import build_model
from vision.models.configs import ModelConfig

CONFIGS = Path(__file__).parents[1] / "configs"
OURS, REFERENCE = "vision", "timm"


class Case(NamedTuple):
    """An architecture at one image size."""

    title: str
    config: str
    """This project's YAML of it."""
    timm_name: str
    size: int
    window: int | None


CASES = {
    "vit_small": Case("ViT-S/16", "vit_small", "vit_small_patch16_224", 224, None),
    "swin_tiny": Case("Swin-T", "swin_tiny", "swin_tiny_patch4_window7_224", 224, 7),
    "swinv2_tiny": Case("SwinV2-T", "swinv2_tiny", "swinv2_tiny_window8_256", 256, 8),
    "swinv2_tiny_224": Case("SwinV2-T", "swinv2_tiny", "swinv2_tiny_window8_256", 224, 7),
}
"""Windows divide every grid, so that no model pads: not all of them pad in the same way."""


def contenders() -> dict[str, Callable[[Case], nn.Module]]:
    """Who takes part, by name: this project first, the reference second."""
    builders: dict[str, Callable[[Case], nn.Module]] = {
        OURS: our_model,
        REFERENCE: timm_model,
        "torchvision": torchvision_model,
    }
    if find_spec("transformers") is not None:
        builders["transformers"] = transformers_model
    return builders


def our_model(case: Case) -> nn.Module:
    """This project's."""
    with initialize_config_dir(str(CONFIGS), version_base=None):
        values: Any = OmegaConf.to_container(compose(f"model/{case.config}"))
    changes = {} if case.window is None else {"window": case.window}
    config: ModelConfig = parse(ModelConfig, values["model"] | changes)  # type: ignore[arg-type]
    return build_model(config, (case.size, case.size))


def timm_model(case: Case) -> nn.Module:
    """timm's, by the architecture's registered name."""
    changes = {} if case.window is None else {"window_size": case.window}
    return timm.create_model(case.timm_name, img_size=case.size, drop_path_rate=0.0, **changes)


def torchvision_model(case: Case) -> nn.Module:
    """torchvision's classes, with the arguments of the architecture."""
    if case.window is None:
        return VisionTransformer(
            image_size=case.size,
            patch_size=16,
            num_layers=12,
            num_heads=6,
            hidden_dim=384,
            mlp_dim=1536,
        )
    second = case.config == "swinv2_tiny"
    return SwinTransformer(
        patch_size=[4, 4],
        embed_dim=96,
        depths=[2, 2, 6, 2],
        num_heads=[3, 6, 12, 24],
        window_size=[case.window, case.window],
        stochastic_depth_prob=0.0,
        block=SwinTransformerBlockV2 if second else SwinTransformerBlock,
        downsample_layer=PatchMergingV2 if second else PatchMerging,
    )


class Logits(nn.Module):
    """A model of transformers that answers with its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Images (b channels height width) → logits (b classes)."""
        return self.model(pixel_values=images).logits


def transformers_model(case: Case) -> nn.Module:
    """Those of transformers, with the arguments of the architecture."""
    import transformers

    shared: dict[str, Any] = {"image_size": case.size, "num_labels": 1000}
    if case.window is None:
        vit = transformers.ViTConfig(
            **shared, hidden_size=384, num_attention_heads=6, intermediate_size=1536
        )
        return Logits(transformers.ViTForImageClassification(vit))
    shared |= {"window_size": case.window, "drop_path_rate": 0.0}
    if case.config == "swinv2_tiny":
        return Logits(
            transformers.Swinv2ForImageClassification(transformers.Swinv2Config(**shared))
        )
    return Logits(transformers.SwinForImageClassification(transformers.SwinConfig(**shared)))
