"""Configs for tests, from the project's own YAML files, and images of noise."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vision.config import parse
from vision.data.configs import AugmentConfig, LoaderConfig, PreprocessConfig
from vision.data.images.decode import OpenImage, open_image
from vision.data.preprocess import Preprocess, resolve_preprocess

CONFIGS = Path(__file__).parents[2] / "configs"


def read(group: str, name: str) -> dict[str, Any]:
    """A YAML file with the files that it is based on, as Hydra would compose it."""
    values = yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())
    composed: dict[str, Any] = {}
    for base in values.pop("defaults", ["_self_"]):
        composed.update(values if base == "_self_" else read(group, base))
    return composed


def augment(name: str = "none", **changes: Any) -> AugmentConfig:
    return parse(AugmentConfig, {**read("augment", name), **changes})


def loader_config(**changes: Any) -> LoaderConfig:
    return parse(LoaderConfig, {**read("loader", "default"), **changes})


def preprocess(size: int | tuple[int, int] = 32, channels: int = 3, **changes: Any) -> Preprocess:
    config = parse(PreprocessConfig, {**read("preprocess", "auto"), **changes})
    return resolve_preprocess(config, size, channels)


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (height, width, channels), dtype=np.uint8)


def opened(height: int, width: int, channels: int = 3, seed: int = 0) -> OpenImage:
    return open_image(noise(height, width, channels, seed), channels, "noise")
