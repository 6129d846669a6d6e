"""Every metric of one model with its confidence interval, from its logits and the labels.

Intervals are those of the bootstrap (Efron, 1979): as many images as there are, drawn with
replacement, again and again; the middle 95 % of a metric's values are its interval. The draws
depend only on the seed and the number of images, so models are compared draw by draw on the same
images (paired): how difficult the images of a draw are cancels out of the difference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vision.evaluation.calibration import Reliability, Scaled, reliability, scale
from vision.evaluation.configs import LOWER_IS_BETTER
from vision.evaluation.metrics import (
    ClassMetrics,
    ImageScores,
    class_counts,
    class_metrics,
    confusion_counts,
    results,
    score_images,
)

Floats = NDArray[np.float64]
LEVEL = 0.95
METRICS = ("top1", "top5", "balanced_accuracy", "loss", "brier")
"""What is resampled: means over images, and balanced accuracy."""
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
class Resampled:
    """Metrics of a model on the images of an evaluation, and their draws of the bootstrap."""

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    """95 % confidence intervals of the resampled metrics; empty without resamples."""
    draws: dict[str, Floats]
    """The resampled metrics in every draw."""


@dataclass(frozen=True)
class ModelMetrics(Resampled):
    """The metrics of images with one class each."""

    calibration: Calibration
    classes: list[ClassMetrics]
    confused: list[ConfusedPair]
    """The most frequent mistakes, the most frequent first."""
    confusion: Tensor
    """(actual, predicted, images) of every pair of classes that occurs: int64 (pairs, 3)."""


@dataclass(frozen=True)
class Difference:
    """A metric of one model minus that of another on the same images."""

    value: float
    low: float
    high: float
    better: float
    """Fraction of the draws in which the first model is better; ties count half."""
    decided: bool
    """Whether the interval excludes 0."""


def compute_metrics(
    logits: Tensor, labels: Tensor, names: Sequence[str], *, bins: int, resamples: int, seed: int
) -> ModelMetrics:
    """The metrics of logits (n, classes) for images with these labels (n,)."""
    scores = score_images(logits, labels)
    draws = resample(scores, labels.numpy(), resamples, seed) if resamples else {}
    confusion = confusion_counts(labels, logits.argmax(1), len(names))
    counts = class_counts(confusion, len(names))
    overall = [scores.loss, torch.ones_like(scores.loss), scores.top1, scores.top5]
    sums = torch.cat([torch.stack(overall).sum(1), counts.double().flatten()])
    curve = reliability(scores, bins)
    return ModelMetrics(
        metrics=results(sums) | {"nll": curve.nll, "brier": curve.brier, "ece": curve.ece},
        intervals={name: interval(values) for name, values in draws.items()},
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


def resample(
    scores: ImageScores, labels: NDArray[np.int64], resamples: int, seed: int
) -> dict[str, Floats]:
    """Every metric in each draw: (resamples,)."""
    images = len(labels)
    present, position = np.unique(labels, return_inverse=True)
    draws = {name: np.empty(resamples) for name in METRICS}
    means = [name for name in METRICS if name != "balanced_accuracy"]
    matrix = np.stack([getattr(scores, name).numpy() for name in means])
    for draw, times in enumerate(drawn_times(images, resamples, seed)):
        for name, value in zip(means, matrix @ times / images, strict=True):
            draws[name][draw] = value
        shown = np.bincount(position, times, len(present))
        right = np.bincount(position, times * scores.top1.numpy(), len(present))
        draws["balanced_accuracy"][draw] = np.mean(right[shown > 0] / shown[shown > 0])
    return draws


def drawn_times(images: int, resamples: int, seed: int) -> Iterator[Floats]:
    """How often each image is in a draw, for every draw of the bootstrap: (images,)."""
    random = np.random.default_rng([seed, images])
    for _ in range(resamples):
        drawn = np.bincount(random.integers(images, size=images), minlength=images)
        yield drawn.astype(np.float64)


def interval(draws: Floats) -> tuple[float, float]:
    """The middle 95 % of the draws."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def difference(name: str, first: tuple[float, Floats], second: tuple[float, Floats]) -> Difference:
    """First minus second, each given as its value on all images and its draws."""
    draws = first[1] - second[1]
    low, high = interval(draws)
    gain = -draws if name in LOWER_IS_BETTER else draws
    better = float(np.mean(gain > 0) + np.mean(gain == 0) / 2)
    return Difference(first[0] - second[0], low, high, better, decided=low > 0 or high < 0)


def compare(model: Resampled, baseline: Resampled) -> dict[str, Difference]:
    """Each resampled metric of a model minus that of the baseline on the same images."""
    return {
        name: difference(
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
