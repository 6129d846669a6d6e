"""The result of an evaluation, and the same as plain mappings for JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vision.evaluation.all_metrics import Measured
from vision.evaluation.bootstrap import Difference
from vision.evaluation.calibration import Reliability, Scaled
from vision.evaluation.configs import HUBS
from vision.evaluation.evaluated import Cost
from vision.evaluation.predictions import Speed

FORMAT = 1

DEFINITIONS = {
    "loss": "mean cross-entropy, the same as nll",
    "top1": "share of the images whose label is the most probable class",
    "top5": "share of the images whose label is among the five most probable classes",
    "balanced_accuracy": "mean recall of the classes that occur",
    "macro_f1": "mean F1 of the classes that occur or were predicted",
    "nll": "negative log-likelihood: mean of -log p(label)",
    "brier": "mean of the sum over classes of (p - [class = label])², from 0 to 2",
    "ece": "expected calibration error: mean |accuracy - confidence| of an image's bin; bins of "
    "equal width of the largest probability, (low, high]",
    "temperature": "T > 0 with the least nll of softmax(logits / T), fitted on one half of the "
    "images; before and after are of the other half",
    "intervals": "the middle 95 % of a bootstrap over images",
    "differences": "model minus baseline, paired bootstrap over the same images; better: share "
    "of the draws in which the model is better, ties count half",
    "neighbours": "accuracy of k-NN on the head's input: cosine similarity, votes weighted by "
    "exp(similarity / 0.07), training images as memory",
    "accuracy of a class": "share of its images that were recognised, the same as its recall",
    "macs": "multiply-adds of the matrix products of one forward pass of one image",
    "speed": "images per second: in forward passes but the first; and from beginning to end",
}


@dataclass(frozen=True)
class ModelReport:
    """What is said of one model."""

    name: str
    """Short, and another one for every model of a report."""
    checkpoint: Path
    step: int
    weights: str
    image_size: tuple[int, int]
    window: tuple[tuple[int, int], ...] | None
    """Of every stage of a Swin."""
    crop_ratio: float
    measured: Measured
    neighbours: float | None
    """Accuracy of k-NN, if asked for."""
    cost: Cost
    speed: Speed
    differences: Mapping[str, Difference] | None = None
    """From the first model of the report."""


@dataclass(frozen=True)
class Report:
    """What is said of all models, on the same images."""

    split: str
    data: str
    images: int
    """That could be read; all numbers are of these."""
    skipped: tuple[str, ...]
    """Images that could not be read."""
    classes: tuple[str, ...]
    """Of the models."""
    augmentation: str
    k: int
    settings: Mapping[str, Any]
    models: tuple[ModelReport, ...]
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = field(default=())

    def as_dict(self, matrices: bool = True) -> dict[str, Any]:
        """For JSON; `matrices`: with the tables that have a row per class or more."""
        report = {
            "format": FORMAT,
            "split": self.split,
            "data": self.data,
            "images": self.images,
            "skipped": list(self.skipped),
            "augmentation": self.augmentation,
            "notes": list(self.notes),
            "settings": dict(self.settings),
            "definitions": DEFINITIONS,
            "class_names": list(self.classes),
            "models": [_model(model, self.classes, self.k, matrices) for model in self.models],
            "files": [str(file) for file in self.files],
        }
        if not matrices:
            del report["class_names"], report["definitions"], report["settings"]
        finite: dict[str, Any] = _finite(report)
        return finite


def short_names(paths: Sequence[Path], steps: Sequence[int]) -> list[str]:
    """A short name for every checkpoint: its run's, with its step if another has the same."""
    names = [_short_name(path) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{name} step {step}" for name, step in zip(names, steps, strict=True)]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def _short_name(path: Path) -> str:
    if str(path).startswith(HUBS):
        return str(path)
    place = path.resolve()
    if place.parent.name == "checkpoints":
        return place.parent.parent.name
    return place.name if place.is_dir() else place.stem


def _model(model: ModelReport, names: Sequence[str], k: int, matrices: bool) -> dict[str, Any]:
    measured = model.measured
    report: dict[str, Any] = {
        "name": model.name,
        "checkpoint": str(model.checkpoint),
        "step": model.step,
        "weights": model.weights,
        "image_size": list(model.image_size),
        "window": model.window,
        "crop_ratio": model.crop_ratio,
        "metrics": measured.metrics,
        "intervals": measured.intervals,
        "neighbours": None if model.neighbours is None else {"k": k, "top1": model.neighbours},
        "cost": asdict(model.cost),
        "speed": asdict(model.speed),
        "differences": None
        if model.differences is None
        else {name: asdict(d) | {"decided": d.decided} for name, d in model.differences.items()},
        "calibration": {
            "all": _reliability(measured.reliability, matrices),
            "temperature": _scaled(measured.scaled, matrices),
        },
    }
    if matrices:
        report["classes"] = [
            {"name": name, "accuracy": row.recall} | row._asdict()
            for name, row in zip(names, measured.classes, strict=True)
        ]
        report["confused"] = [
            {"actual": names[a], "predicted": names[p], "images": n} for a, p, n in measured.pairs
        ]
        report["confusion"] = measured.confusion.tolist()
    return report


def _reliability(curve: Reliability, bins: bool) -> dict[str, Any]:
    values = asdict(curve)
    if not bins:
        del values["bins"]
    return values


def _scaled(scaled: Scaled | None, bins: bool) -> dict[str, Any] | None:
    if scaled is None:
        return None
    return {
        "temperature": scaled.temperature,
        "fitted_on": scaled.fitted_on,
        "at_limit": scaled.at_limit,
        "before": _reliability(scaled.before, bins),
        "after": _reliability(scaled.after, bins),
    }


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
