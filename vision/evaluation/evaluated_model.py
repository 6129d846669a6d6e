"""A model with the images that it is evaluated on, and its predictions for them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vision.checkpoints.open import OpenedModel, open_model
from vision.config import ConfigError
from vision.data.configs import DataConfig, FolderConfig
from vision.data.preprocess import Preprocess, resolve_preprocess
from vision.data.sources.build_source import build_source
from vision.data.sources.source import Source
from vision.data.sources.table import with_saved_split
from vision.evaluation.classes import class_names, match_classes
from vision.evaluation.configs import HUBS, EvalConfig
from vision.evaluation.neighbours import NeighboursAccuracy
from vision.evaluation.predictions import Predictions


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with the images that it is evaluated on."""

    checkpoint: Path
    """The file, or the name on a hub."""
    opened: OpenedModel
    preprocess: Preprocess
    classes: tuple[str, ...]
    """Names in the order of the logits; those of the data for a model without a head."""
    data: DataConfig
    source: Source
    labels: Tensor
    """Label of every image of the source as an index of `classes`: int64 (len(source),)."""
    notes: tuple[str, ...]
    """Assumptions about the model, its classes and its preprocessing."""

    @property
    def step(self) -> int:
        """Number of training steps; 0 for weights of other projects."""
        return 0 if self.opened.record is None else self.opened.record.step


@dataclass(frozen=True)
class Answers:
    """The predictions of one model for the images that could be read."""

    model: EvaluatedModel
    predictions: Predictions
    labels: Tensor
    """Labels of the predictions as indices of the model's classes: int64 (n,)."""
    neighbours: NeighboursAccuracy | None


def open_evaluated_model(place: str, config: EvalConfig, device: torch.device) -> EvaluatedModel:
    """Open a checkpoint together with its own data or that of the config."""
    opened = open_model(
        place,
        model=config.model,
        weights=config.weights,
        rename=config.rename,
        image_size=config.image_size,
        device=device,
    )
    data = config.data or own_data(opened)
    if opened.classes == 0 and not config.neighbours:
        raise ConfigError(
            f"checkpoint: {opened.path} has no head and cannot predict classes. Evaluate its "
            "features by their nearest neighbours with neighbours=20, or train a head: python "
            f"train.py recipe=probe model=auto init={opened.path} data=…"
        )
    preprocess = resolve_preprocess(
        config.preprocess, opened.image_size, opened.channels, opened.known
    )
    notes = opened.notes()
    if config.preprocess.mean != "auto":
        notes = [line for line in notes if "mean and std of ImageNet" not in line]
    if opened.record is None:
        notes.append(_describe_preprocess(preprocess))
    classes, assumed = class_names(opened, config.class_names, data)
    source = build_source(data, config.split)
    labels, matched = match_classes(classes, source, place)
    return EvaluatedModel(
        checkpoint=Path(place) if place.startswith(HUBS) else opened.path,
        opened=opened,
        preprocess=preprocess,
        classes=classes,
        data=data,
        source=source,
        labels=labels,
        notes=tuple(note for note in (*notes, assumed, matched) if note),
    )


def own_data(opened: OpenedModel) -> DataConfig:
    """The data of the run; for a folder, with the split that is stored with the run."""
    data = None if opened.record is None else opened.record.data
    if data is None:
        raise ConfigError(
            f"checkpoint: {opened.path} is not of a run of this project and does not specify its "
            "images: give data=…"
        )
    split = opened.path.resolve().parent.parent / "split.csv"
    if isinstance(data, FolderConfig) and split.is_file():
        return with_saved_split(data, split)
    return data


def _describe_preprocess(preprocess: Preprocess) -> str:
    """The values of the preprocessing, grouped by their origin."""
    by_origin: dict[str, list[str]] = {}
    for name, origin in preprocess.origin.items():
        value = getattr(preprocess, name)
        if isinstance(value, tuple):
            value = f"[{', '.join(f'{number:g}' for number in value)}]"
        by_origin.setdefault(origin, []).append(f"{name} {value}")
    parts = [f"{', '.join(values)} ({origin})" for origin, values in by_origin.items()]
    return f"images are preprocessed with {'; '.join(parts)}; preprocess.…=… overrides"
