"""From a checkpoint file of this project to a model that can be used: nothing else is needed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vision.checkpoints.folder import latest
from vision.checkpoints.native import Checkpoint, read_checkpoint
from vision.config import ConfigError, Size, pair, parse
from vision.data.configs import DataConfig, FolderConfig
from vision.data.preprocess import Preprocess
from vision.data.table import with_saved_split
from vision.models.build import build_model
from vision.models.configs import ModelConfig
from vision.models.layers import Classifier
from vision.models.lora import merge_tensors


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
    place: Path,
    weights: Literal["auto", "raw", "ema"],
    device: torch.device,
    image_size: Size | None = None,
) -> Stored:
    """The model of a checkpoint, ready to use. LoRA's additions are merged into its weights.

    `image_size`: for pictures of another size than it was trained with; what depends on the size,
    such as a table of positions, is resized.
    """
    path = find_checkpoint(place)
    checkpoint = read_checkpoint(path)
    record = checkpoint.record
    kind, tensors = stored_weights(checkpoint, weights, path)
    preprocess = _preprocess(record)
    size = preprocess.image_size if image_size is None else pair(image_size)
    same = size == preprocess.image_size
    model = build_model(
        stored_model(record),
        size,
        channels=preprocess.channels,
        classes=len(record["classes"]),
        device="meta" if same else "cpu",
    )
    if same:
        model.load_state_dict(tensors, assign=True)
    else:
        from vision.checkpoints.load import load_weights

        load_weights(model, tensors)
    return Stored(
        path=path,
        step=record["step"],
        weights=kind,
        model=model.to(device).eval(),
        preprocess=replace(preprocess, image_size=size),
        classes=tuple(record["classes"]),
        data=_data(record, path),
    )


def stored_model(record: dict[str, Any]) -> ModelConfig:
    """The model of a checkpoint. It was told by a file, perhaps, where the config says auto."""
    values = record.get("model", record["config"]["model"])
    config: ModelConfig = parse(ModelConfig, values)  # type: ignore[arg-type]
    return config


def _data(record: dict[str, Any], path: Path) -> DataConfig:
    """The data of the run; a folder as it was split then, as stored with the run."""
    config: DataConfig = parse(DataConfig, record["config"]["data"])  # type: ignore[arg-type]
    split = path.resolve().parent.parent / "split.csv"
    if isinstance(config, FolderConfig) and split.is_file():
        return with_saved_split(config, split)
    return config


def stored_weights(
    checkpoint: Checkpoint, wanted: Literal["auto", "raw", "ema"], path: Path
) -> tuple[Literal["raw", "ema"], dict[str, torch.Tensor]]:
    """The kind of weights that is wanted, under the names of a plain model."""
    parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "ema": {}}
    for name, tensor in checkpoint.tensors.items():
        part, _, rest = name.partition(".")
        if part in parts:
            parts[part][rest] = tensor
    if wanted == "ema" and not parts["ema"]:
        raise ConfigError(f"weights=ema: {path} was trained without an average; use weights=raw.")
    kind: Literal["raw", "ema"] = "raw" if wanted == "raw" or not parts["ema"] else "ema"
    # Buffers that are not averaged (counters) come from the weights as trained.
    tensors = parts["model"] if kind == "raw" else parts["model"] | parts["ema"]
    tune = checkpoint.record["config"].get("tune", {"kind": "all"})
    if tune["kind"] == "lora":
        tensors = merge_tensors(tensors, tune["alpha"], tune["targets"])
    return kind, tensors


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
