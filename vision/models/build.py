"""Models from configs, on the device and in the precision of the settings."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from vision.config import ConfigError, pair
from vision.models.configs import (
    AnySwinConfig,
    LRNetConfig,
    ModelConfig,
    OwnModelConfig,
    SwinConfig,
    SwinV2Config,
    TimmConfig,
    ViTConfig,
)
from vision.models.layers import Classifier, Grid, ceil_div
from vision.models.lr_net import LRNet
from vision.models.swin import Swin
from vision.models.swin_v2 import SwinV2
from vision.models.vit import ViT
from vision.models.windows import stage_windows

Precision = Literal["fp32", "bf16", "fp16"]


def build_model(
    config: ModelConfig,
    image_size: Grid,
    *,
    channels: int = 3,
    classes: int = 1000,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Classifier:
    """Build the model of a config, with weights drawn from `seed`: the same on every device.

    On the `meta` device no weight is drawn and no memory is used. With `classes=0` the model has no
    head: its logits are the pooled features.
    """
    on_meta = torch.device(device).type == "meta"
    if isinstance(config, TimmConfig):
        from vision.models.timm import TimmModel, check_size  # timm is slow to load

        if not on_meta:
            check_size(config, image_size, channels, classes)
        with torch.random.fork_rng(devices=[]), torch.device("meta" if on_meta else "cpu"):
            torch.manual_seed(seed)
            return TimmModel(config, image_size, channels, classes).to(device)
    with torch.device("meta"):
        model: Classifier
        match config:
            case ViTConfig():
                model = ViT(config, image_size, channels, classes)
            case SwinConfig():
                model = Swin(config, image_size, channels, classes)
            case SwinV2Config():
                model = SwinV2(config, image_size, channels, classes)
            case LRNetConfig():
                model = LRNet(config, image_size, channels, classes)
    if on_meta:
        return model
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(torch.Generator().manual_seed(seed))
    return model.to(device)


def number_of_patches(config: ViTConfig | AnySwinConfig, size: Grid) -> int:
    """The number of patches of an image; an incomplete one counts."""
    return math.prod(map(ceil_div, size, pair(config.patch_size)))


def largest_table(config: OwnModelConfig, size: Grid) -> int:
    """The approximate size of the largest table that a model derives from the size of its images:
    the positions of every token, or a mask or bias for every pair of tokens of a window or image.
    """
    if isinstance(config, LRNetConfig):
        return config.neighbourhood**2
    patches = number_of_patches(config, size)
    if isinstance(config, ViTConfig):
        return patches * (config.width if config.relative_bias == "none" else patches)
    return patches * max(math.prod(window) for window in stage_windows(config, size))


def pick_device(
    setting: Literal["auto", "cpu", "cuda", "mps"], local_rank: int = 0
) -> torch.device:
    """The device of a setting, for one process of this machine."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if setting == "auto":
        setting = "cuda" if there["cuda"] else "mps" if there["mps"] else "cpu"
    if not there.get(setting, True):
        raise ConfigError(f"device: {setting} is not available on this machine; try device=auto.")
    if setting != "cuda":
        return torch.device(setting)
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"device: process {local_rank} of this machine has no GPU of its own: there are "
            f"{torch.cuda.device_count()}. Start as many processes as there are GPUs."
        )
    return torch.device("cuda", local_rank)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Run matrix products in the 16 bits of a precision; softmax, norms and losses stay in 32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)
