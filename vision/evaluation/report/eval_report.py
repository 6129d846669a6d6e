"""The report of an evaluation: dataclasses in the shape of report.json, and their tables."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from vision.checkpoints.native.checkpoint_folder import run_of
from vision.evaluation.configs import HUBS, LOWER_IS_BETTER, SHARES
from vision.evaluation.evaluate import Speed
from vision.evaluation.model_metrics import Difference, ModelMetrics
from vision.evaluation.multi_label_metrics import TUNED, MultiLabelMetrics
from vision.evaluation.neighbours import NeighboursAccuracy
from vision.models.cost.count import format_macs
from vision.terminal import percent, plain

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
    "…_flipped": "the same for the mean probabilities of each image and its mirror image",
    "intervals": "the middle 95 % of a bootstrap over images",
    "differences": "model minus baseline, paired bootstrap over the same images; better: fraction "
    "of the draws in which the model is better, ties count half",
    "neighbours": "accuracy of k-NN on the input of the head: cosine similarity, votes weighted by "
    "exp(similarity / 0.07), training images as memory",
    "accuracy of a class": "fraction of its images that were recognised, the same as its recall",
    "macs": "multiply-adds of the matrix products of one forward pass of one image",
    "speed": "images per second: in forward passes except the first; and from beginning to end",
}


LABEL_DEFINITIONS = {
    "loss": "mean binary cross-entropy of the known labels",
    "map": "mean average precision of the classes that occur",
    "micro_f1": "F1 of all labels together, at a probability of 0.5",
    "macro_f1": "mean F1 of the classes that occur or were predicted, at 0.5",
    "sample_f1": "mean F1 of the images, at 0.5; 1 for an image without classes and predictions",
    "…_tuned": "the same at the thresholds of the model: those that maximise the F1 of each class "
    "on its validation images",
    "average precision": "of a class: sum over its distinct scores in falling order of precision × "
    "gain of recall, as in scikit-learn",
    "unknown labels": "count nowhere",
    **{
        name: DEFINITIONS[name]
        for name in ("…_flipped", "intervals", "differences", "macs", "speed")
    },
}
"""Of several labels per image."""

SHOWN = 5
"""Number of worst classes and of most confused pairs."""

ROWS = {
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro-F1",
    "loss": "loss (= NLL)",
    "brier": "Brier score",
    "ece": "calibration error (ECE)",
}
"""Metrics in the order of the tables, with their labels."""
LABEL_ROWS = {
    "map": "mean average precision (mAP)",
    "micro_f1": "micro-F1",
    "macro_f1": "macro-F1",
    "sample_f1": "sample-F1",
    "loss": "loss (binary cross-entropy)",
}
"""The same for several labels per image."""
FLIPS = {
    "": "",
    TUNED: ", tuned thresholds",
    "_flipped": ", with flips",
    f"{TUNED}_flipped": ", tuned thresholds, with flips",
}
"""Suffixes of the metrics at tuned thresholds and with flips at test time, and of their labels."""
WORDS = ("model", "metric", "class", "actual", "predicted", "")
"""Columns that hold words, not numbers."""


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
    results: ModelMetrics | MultiLabelMetrics
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
    task: Literal["classify", "multi_label"] = "classify"

    def as_dict(self, summary: bool = False) -> dict[str, Any]:
        """Plain mappings and lists for JSON; a summary leaves out all that grows with the number of
        classes.
        """
        values = _plain(self, LONG | {"draws"} if summary else {"draws"})
        for model in values["models"]:
            model.update(model.pop("results"))
        known = DEFINITIONS if self.task == "classify" else LABEL_DEFINITIONS
        definitions = {} if summary else {"definitions": known}
        return {"format": FORMAT, **definitions, **values}

    def table(self) -> Group:
        """The metrics of all models, their differences, the worst classes of each, and notes."""
        several = len(self.models) > 1
        parts: list[Text | Table] = [] if several else [plain(_about(self.models[0]), "italic")]
        parts.append(_summary(self))
        if several and self.models[1].differences:
            parts.append(_comparison(self))
        parts += [table for model in self.models for table in _details(model)]
        notes = [*self.notes, *(f"written: {_from_here(file)}" for file in self.files)]
        return Group(*parts, *map(plain, notes))


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
    if (run := run_of(place)) is not None:
        return run.name
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


def _about(model: ModelReport) -> str:
    step = f"step {model.step:,}, " if model.step else ""  # unknown for weights of other projects
    return f"{model.checkpoint} ({step}{model.weights} weights)"


def _from_here(file: Path) -> str:
    """The path of a file, relative to the current folder if it is below that."""
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _summary(report: Report) -> Table:
    models = report.models
    table = Table()
    table.add_column(plain(f"{report.data}, {report.split}: {report.images:,} images"))
    for model in models:
        table.add_column(plain(model.name) if len(models) > 1 else "value", justify="right")
    for suffix, words in FLIPS.items():
        for key, label in _rows(report).items():
            if key == "top5" and len(models[0].results.classes) <= 5:
                continue  # always 100 %
            if key + suffix in models[0].results.metrics:
                shown = (_with_interval(model.results, key + suffix) for model in models)
                table.add_row(label + words, *shown)
    neighbours = [model.neighbours for model in models if model.neighbours]
    if neighbours:
        cells = [percent(found.top1) for found in neighbours]
        table.add_row(f"{neighbours[0].k}-NN accuracy", *cells)
    scaled = [
        model.results.calibration.temperature
        for model in models
        if isinstance(model.results, ModelMetrics)
    ]
    if scaled and all(scaled):
        cells = [
            f"T = {s.temperature:.3f}: {s.before.ece:.4f} → {s.after.ece:.4f}"
            + ("" if s.after.ece < s.before.ece else ", which did not help")
            for s in scaled
            if s
        ]
        table.add_row("ECE after temperature scaling", *cells)
    table.add_section()
    table.add_row("parameters", *(f"{model.cost.parameters:,}" for model in models))
    table.add_row("MACs", *(format_macs(model.cost.macs) for model in models))
    table.add_row("images/s, model alone", *(_number(m.speed.model, ",.0f") for m in models))
    table.add_row("images/s, with loading", *(_number(m.speed.total, ",.0f") for m in models))
    captions = []
    if models[0].results.intervals:
        captions.append("[ ]: 95 % confidence interval, bootstrap over images")
    if report.skipped:
        captions.append(f"{len(report.skipped)} images could not be read and are not counted.")
    table.caption = plain("\n".join(captions), "table.caption") if captions else None
    return table


def _rows(report: Report) -> dict[str, str]:
    return ROWS if report.task == "classify" else LABEL_ROWS


def _with_interval(results: ModelMetrics | MultiLabelMetrics, key: str) -> Text:
    share = key.removesuffix("_flipped").removesuffix(TUNED) in SHARES
    value = percent(results.metrics[key]) if share else f"{results.metrics[key]:.4f}"
    if key not in results.intervals:
        return plain(value)
    low, high = (
        f"{100 * limit:.2f}" if share else f"{limit:.4f}" for limit in results.intervals[key]
    )
    return plain(f"{value} [{low}, {high}]")


def _comparison(report: Report) -> Table:
    baseline, *others = report.models
    numbers = ("difference", "95 % confidence", "better in")
    table = _titled(f"Difference from {baseline.name}", "model", "metric", *numbers, "")
    for model in others:
        for key, found in (model.differences or {}).items():
            better = (found.value < 0) == (key in LOWER_IS_BETTER)
            verdict = ("better" if better else "worse") if found.decided else "undecided"
            table.add_row(
                plain(model.name),
                _rows(report)[key],
                f"{found.value:+.4f}",
                f"{found.low:+.4f} to {found.high:+.4f}",
                f"{percent(found.better, 1)} of draws",
                verdict,
            )
        table.add_section()
    return table


def _details(model: ModelReport) -> list[Table]:
    """The classes with the lowest recall, and the most confused pairs; of several labels, those of
    the lowest average precision.
    """
    columns = {"recall": "recall", "precision": "precision", "F1": "f1"}
    if isinstance(model.results, MultiLabelMetrics):
        columns = {"AP": "average_precision", "threshold": "threshold", **columns}
    by = next(iter(columns.values()))
    worst = _titled(f"{model.name}: worst classes", "class", "images", *columns)
    known = [row for row in model.results.classes if getattr(row, by) is not None]
    for row in sorted(known, key=attrgetter(by))[:SHOWN]:
        fractions = (_number(getattr(row, field), ".3f") for field in columns.values())
        worst.add_row(plain(row.name), f"{row.images:,}", *fractions)
    if isinstance(model.results, MultiLabelMetrics):
        return [worst]
    pairs = _titled(f"{model.name}: most confused", "actual", "predicted", "images")
    for pair in model.results.confused[:SHOWN]:
        pairs.add_row(plain(pair.actual), plain(pair.predicted), f"{pair.images:,}")
    return [worst, pairs] if model.results.confused else [worst]


def _titled(title: str, *columns: str) -> Table:
    """A table with a title; columns of words are aligned to the left."""
    table = Table(title=plain(title, "table.title"), title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in WORDS else "right")
    return table


def _number(value: float | None, style: str) -> str:
    return "–" if value is None else format(value, style)
