"""Every metric of one model, from its logits and the labels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vision.evaluation import bootstrap
from vision.evaluation.bootstrap import Difference, Floats
from vision.evaluation.calibration import Reliability, Scaled, reliability, scale
from vision.evaluation.metrics import (
    ClassMetrics,
    Tally,
    class_counts,
    class_metrics,
    confusion_counts,
    results,
    score_images,
)

MOST_CONFUSED = 100
"""Number of confused pairs that a report lists."""


@dataclass(frozen=True)
class Calibration:
    """Calibration of all images, and the effect of temperature scaling."""

    all: Reliability
    temperature: Scaled | None


@dataclass(frozen=True)
class ConfusedPair:
    """Images of one class that were assigned to another."""

    actual: str
    predicted: str
    images: int


@dataclass(frozen=True)
class ModelMetrics:
    """The metrics of a model on the images of an evaluation."""

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    """95 % confidence intervals of the resampled metrics; empty without resamples."""
    draws: dict[str, Floats]
    """The resampled metrics in every draw of the bootstrap."""
    calibration: Calibration
    classes: list[ClassMetrics]
    confused: list[ConfusedPair]
    """The most frequent mistakes, the most frequent first."""
    confusion: Tensor
    """(actual, predicted, images) of every pair of classes that occurs: int64 (pairs, 3)."""


def compute_metrics(
    logits: Tensor, labels: Tensor, names: Sequence[str], *, bins: int, resamples: int, seed: int
) -> ModelMetrics:
    """The metrics of logits (n, classes) for images with these labels (n,)."""
    scores = score_images(logits, labels)
    draws = bootstrap.resample(scores, labels.numpy(), resamples, seed) if resamples else {}
    confusion = confusion_counts(labels, logits.argmax(1), len(names))
    counts = class_counts(confusion, len(names))
    overall = [scores.loss, torch.ones_like(scores.loss), scores.top1, scores.top5]
    sums = torch.cat([torch.stack(overall).sum(1), counts.double().flatten()])
    curve = reliability(scores, bins)
    return ModelMetrics(
        metrics=results(Tally(sums, len(names)))
        | {"nll": curve.nll, "brier": curve.brier, "ece": curve.ece},
        intervals={name: bootstrap.interval(values) for name, values in draws.items()},
        draws=draws,
        calibration=Calibration(curve, scale(logits, labels, bins, seed)),
        classes=class_metrics(counts, names),
        confused=confused_pairs(confusion, names, MOST_CONFUSED),
        confusion=confusion,
    )


def confused_pairs(confusion: Tensor, names: Sequence[str], most: int) -> list[ConfusedPair]:
    """The most frequent mistakes, the most frequent first."""
    mistakes = confusion[confusion[:, 0] != confusion[:, 1]]
    order = mistakes[:, 2].argsort(descending=True, stable=True)[:most]
    return [ConfusedPair(names[a], names[p], images) for a, p, images in mistakes[order].tolist()]


def compare(model: ModelMetrics, baseline: ModelMetrics) -> dict[str, Difference]:
    """Each resampled metric of a model minus that of the baseline on the same images."""
    return {
        name: bootstrap.difference(
            name, (model.metrics[name], draws), (baseline.metrics[name], baseline.draws[name])
        )
        for name, draws in model.draws.items()
    }


@dataclass(frozen=True)
class Mistake:
    """An image that the model got wrong."""

    row: int
    """Its row in the logits."""
    label: int
    predicted: int
    confidence: float
    own: float
    """Probability of the label."""


def confident_mistakes(logits: Tensor, labels: Tensor, most: int) -> list[Mistake]:
    """The mistakes that the model was most confident of, the most confident first."""
    wrong = (logits.argmax(1) != labels).nonzero()[:, 0]
    probabilities = logits[wrong].double().softmax(1)
    confidence, predicted = probabilities.max(1)
    own = probabilities.gather(1, labels[wrong][:, None])[:, 0]
    order = confidence.argsort(descending=True, stable=True)[:most]
    columns = [v[order].tolist() for v in (wrong, labels[wrong], predicted, confidence, own)]
    return [Mistake(*row) for row in zip(*columns, strict=True)]
