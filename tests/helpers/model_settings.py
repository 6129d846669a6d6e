"""Models for tests: YAML composed with changes and parsed, made small, with weights of any size."""

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn

from vision.config import parse
from vision.models.build import build_model
from vision.models.configs import ModelConfig
from vision.models.layers import Grid

CONFIGS = Path(__file__).parents[2] / "configs"


def model_names() -> list[str]:
    """The name of every YAML in configs/model that describes a model itself."""
    return sorted(p.stem for p in (CONFIGS / "model").glob("*.yaml") if p.stem != "auto")


@cache
def _composed(name: str) -> Any:
    with initialize_config_dir(str(CONFIGS), version_base=None):
        values = OmegaConf.to_container(compose(f"model/{name}"))
    assert isinstance(values, dict)
    # Where to find weights is no part of a model: those that differ in it alone are the same.
    return {key: value for key, value in values["model"].items() if key != "pretrained"}


def model_values(name: str, /, **changes: Any) -> dict[str, Any]:
    """What configs/model/`name`.yaml says, with some settings changed."""
    return {**copy.deepcopy(_composed(name)), **changes}


def model_config(name: str, /, **changes: Any) -> ModelConfig:
    """The same, parsed."""
    return parse(ModelConfig, model_values(name, **changes))  # type: ignore[arg-type]


SMALL_VIT: dict[str, Any] = {"patch_size": 8, "width": 48, "depth": 3, "heads": 3}
SMALL_SWIN: dict[str, Any] = {
    "patch_size": 2,
    "width": 16,
    "depths": [2, 3, 2],
    "heads": [2, 2, 4],
    "window": 4,
}


def small_model(
    name: str, size: Grid, /, *, classes: int = 7, channels: int = 3, **changes: Any
) -> Any:
    """A small model of `name`'s family, with weights that are not trivial."""
    small = SMALL_VIT if name.startswith("vit") else SMALL_SWIN
    model = build_model(
        model_config(name, **(small | changes)), size, channels=channels, classes=classes
    )
    return redraw(model)


def shrink(values: dict[str, Any]) -> dict[str, Any]:
    """The same model with two blocks, or two stages of one plain and one shifted block and of one
    block; every setting that is not a size as it was.
    """
    small = dict(values)
    if values["kind"] == "lr_net":
        small |= {"width": 16, "depths": [2, 1]}
    elif "depths" in values:
        small |= {"width": 16, "depths": [2, 1], "heads": [2, 2]}
        if values.get("pretrained_window") is not None:
            small["pretrained_window"] = values["pretrained_window"][:2]
        if isinstance(values["window"], list) and isinstance(values["window"][0], list):
            small["window"] = values["window"][:2]
    elif "depth" in values:
        small |= {"width": 32, "depth": 2, "heads": 2}
    return small


def redraw(model: nn.Module, seed: int = 1, clamped: bool = False) -> Any:
    """Give every parameter of a model, ours or a peer's, values that show when it is left out.

    What a model starts with hides mistakes: norms of 1 and 0, biases of 0, tables near 0, V2's
    branches at 0. With `clamped` every second head of V2 gets a logit scale above the clamp.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=generator)
                scaling = isinstance(module, nn.LayerNorm) and name == "weight"
                parameter.copy_(1 + 0.3 * noise if scaling else _redrawn(name, noise, clamped))
    return model


def _redrawn(name: str, noise: Tensor, clamped: bool) -> Tensor:
    """Standard normal noise as fits the kind of parameter."""
    if name == "logit_scale":
        odd = (torch.arange(noise.numel()) % 2).view_as(noise)
        above = math.log(15) * odd if clamped else 0  # 150 against the clamp at 100
        return math.log(10) + above + 0.2 * noise
    if name.startswith("gamma"):
        return 0.5 + 0.2 * noise
    if noise.ndim == 1:
        return 0.3 * noise
    if any(word in name for word in ("token", "table", "pos_embed")):
        return noise
    return noise / math.sqrt(noise[0].numel())


def random_images(*shape: int, seed: int = 0) -> Tensor:
    """Random images, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
