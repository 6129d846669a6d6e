"""From a checkpoint file of this project to a model that can be used: nothing else is needed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vision.checkpoints.folder import latest
from vision.checkpoints.native import Checkpoint, read_checkpoint
from vision.config import ConfigError, parse
from vision.data.configs import DataConfig, FolderConfig
from vision.data.preprocess import Preprocess
from vision.data.table import with_saved_split
from vision.models.build import build_model
from vision.models.configs import ModelConfig
from vision.models.layers import Classifier


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds of a trained model."""

    path: Path
    step: int
    weights: Literal["raw", "ema"]
    model: Classifier
    """In evaluation mode."""
    preprocess: Preprocess
    classes: tuple[str, ...]
    data: DataConfig
    """The data that it was trained on."""


def find_checkpoint(place: Path) -> Path:
    """The file itself, or of a run's folder the best checkpoint, or else the newest."""
    if place.is_file():
        return place
    folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    if not folder.is_dir():
        raise ConfigError(f"checkpoint: there is no file or folder {place}.")
    candidates = [folder / "best.safetensors", *latest(folder)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(f"checkpoint: {place} has no checkpoint yet.")


def load_stored(
    place: Path, weights: Literal["auto", "raw", "ema"], device: torch.device
) -> Stored:
    """The model of a checkpoint, ready to use."""
    path = find_checkpoint(place)
    checkpoint = read_checkpoint(path)
    record = checkpoint.record
    kind, tensors = _weights(checkpoint, weights, path)
    preprocess = _preprocess(record)
    config: ModelConfig = parse(ModelConfig, record["config"]["model"])  # type: ignore[arg-type]
    model = build_model(
        config,
        preprocess.image_size,
        channels=preprocess.channels,
        classes=len(record["classes"]),
        device="meta",
    )
    model.load_state_dict(tensors, assign=True)
    return Stored(
        path=path,
        step=record["step"],
        weights=kind,
        model=model.to(device).eval(),
        preprocess=preprocess,
        classes=tuple(record["classes"]),
        data=_data(record, path),
    )


def _data(record: dict[str, Any], path: Path) -> DataConfig:
    """The data of the run; a folder as it was split then, as stored with the run."""
    config: DataConfig = parse(DataConfig, record["config"]["data"])  # type: ignore[arg-type]
    split = path.resolve().parent.parent / "split.csv"
    if isinstance(config, FolderConfig) and split.is_file():
        return with_saved_split(config, split)
    return config


def _weights(
    checkpoint: Checkpoint, wanted: Literal["auto", "raw", "ema"], path: Path
) -> tuple[Literal["raw", "ema"], dict[str, torch.Tensor]]:
    parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "ema": {}}
    for name, tensor in checkpoint.tensors.items():
        part, _, rest = name.partition(".")
        if part in parts:
            parts[part][rest] = tensor
    if wanted == "ema" and not parts["ema"]:
        raise ConfigError(f"weights=ema: {path} was trained without an average; use weights=raw.")
    if wanted == "raw" or not parts["ema"]:
        return "raw", parts["model"]
    # Buffers that are not averaged (counters) come from the weights as trained.
    return "ema", parts["model"] | parts["ema"]


def _preprocess(record: dict[str, Any]) -> Preprocess:
    values = record["preprocess"]
    return Preprocess(
        image_size=(values["image_size"][0], values["image_size"][1]),
        channels=record["channels"],
        mean=tuple(values["mean"]),
        std=tuple(values["std"]),
        interpolation=values["interpolation"],
        crop_ratio=values["crop_ratio"],
        origin=dict.fromkeys(("mean", "std", "interpolation", "crop_ratio"), "the checkpoint"),
    )
