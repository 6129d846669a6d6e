"""Configs for tests, from the project's own YAML files."""

from pathlib import Path
from typing import Any

import yaml

from vision.config import parse
from vision.data.configs import AugmentConfig, LoaderConfig, PreprocessConfig
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
