"""The report of an evaluation: dataclasses in the shape of report.json."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vision.evaluation.bootstrap import Difference
from vision.evaluation.configs import HUBS
from vision.evaluation.model_metrics import ModelMetrics
from vision.evaluation.neighbours import NeighboursAccuracy
from vision.evaluation.predictions import Speed

FORMAT = 1
LONG = frozenset({"settings", "class_names", "classes", "confused", "confusion", "bins"})
"""Fields that the summary on the terminal leaves out."""

DEFINITIONS = {
    "loss": "mean cross-entropy, the same as nll",
    "top1": "fraction of the images whose label is the most probable class",
    "top5": "fraction of the images whose label is among the five most probable classes",
    "balanced_accuracy": "mean recall of the classes that occur",
    "macro_f1": "mean F1 of the classes that occur or were predicted",
    "nll": "negative log-likelihood: mean of -log p(label)",
    "brier": "mean of the sum over classes of (p - [class = label])², from 0 to 2",
    "ece": "expected calibration error: mean |accuracy - confidence| of an image's bin; bins of "
    "equal width of the largest probability, (low, high]",
    "temperature": "the T > 0 that minimises the nll of softmax(logits / T), fitted on one half of "
    "the images; before and after are measured on the other half",
    "intervals": "the middle 95 % of a bootstrap over images",
    "differences": "model minus baseline, paired bootstrap over the same images; better: fraction "
    "of the draws in which the model is better, ties count half",
    "neighbours": "accuracy of k-NN on the input of the head: cosine similarity, votes weighted by "
    "exp(similarity / 0.07), training images as memory",
    "accuracy of a class": "fraction of its images that were recognised, the same as its recall",
    "macs": "multiply-adds of the matrix products of one forward pass of one image",
    "speed": "images per second: in forward passes except the first; and from beginning to end",
}


@dataclass(frozen=True)
class Cost:
    """The size of a model."""

    parameters: int
    macs: int
    """Multiply-adds for one image."""


@dataclass(frozen=True)
class ModelReport:
    """The results of one model."""

    name: str
    """Short, and unique within a report."""
    checkpoint: Path
    step: int
    """0 for weights of other projects."""
    weights: str
    image_size: tuple[int, int]
    window: tuple[tuple[int, int], ...] | None
    """Of every stage of a Swin."""
    crop_ratio: float
    results: ModelMetrics
    """Its fields are those of the model itself in JSON."""
    neighbours: NeighboursAccuracy | None
    cost: Cost
    speed: Speed
    differences: Mapping[str, Difference] | None = None
    """From the first model of the report."""


@dataclass(frozen=True)
class Report:
    """The results of all models on the same images."""

    split: str
    data: str
    images: int
    """Number of images that could be read; all numbers are about these."""
    skipped: tuple[str, ...]
    """Images that could not be read."""
    augmentation: str
    settings: Mapping[str, Any]
    class_names: tuple[str, ...]
    models: tuple[ModelReport, ...]
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    def as_dict(self, summary: bool = False) -> dict[str, Any]:
        """Plain mappings and lists for JSON; a summary leaves out all that grows with the number of
        classes.
        """
        values = _plain(self, LONG | {"draws"} if summary else {"draws"})
        for model in values["models"]:
            model.update(model.pop("results"))
        definitions = {} if summary else {"definitions": DEFINITIONS}
        return {"format": FORMAT, **definitions, **values}


def short_names(paths: Sequence[Path], steps: Sequence[int]) -> list[str]:
    """A short name for every checkpoint: that of its run, with the step if runs are the same."""
    names = [short_name(path) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{name} step {step}" for name, step in zip(names, steps, strict=True)]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def short_name(path: Path) -> str:
    """The name of a run, a file without its suffix, or a name on a hub."""
    if str(path).startswith(HUBS):
        return str(path)
    place = path.resolve()
    if place.parent.name == "checkpoints":
        return place.parent.parent.name
    return place.name if place.is_dir() else place.stem


def _plain(value: Any, left_out: Set[str]) -> Any:
    """A value as JSON has it, without some fields; null for numbers that are not finite."""
    if is_dataclass(value):
        kept = [field.name for field in fields(value) if field.name not in left_out]
        return {name: _plain(getattr(value, name), left_out) for name in kept}
    if isinstance(value, Mapping):
        return {key: _plain(inner, left_out) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, left_out) for inner in value]
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
