"""From logits and labels to everything that a report says of a model."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vision.evaluation import bootstrap
from vision.evaluation.bootstrap import Difference, Floats
from vision.evaluation.calibration import Reliability, Scaled, reliability, scale
from vision.evaluation.metrics import (
    ClassMetrics,
    class_metrics,
    confused_pairs,
    confusion_counts,
    empty_tally,
    results,
    update,
)

CHUNK = 4096
PAIRS = 100
"""So many of the most confused pairs are kept."""


@dataclass(frozen=True)
class Measured:
    """How good a model is."""

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    """95 % confidence intervals of some of the metrics; none without resamples."""
    draws: dict[str, Floats]
    """What the intervals are from: each metric in every draw of the bootstrap."""
    confusion: Tensor
    """(actual, predicted, images) of every pair of classes that occurs: int64 (pairs, 3)."""
    classes: list[ClassMetrics]
    pairs: list[tuple[int, int, int]]
    reliability: Reliability
    scaled: Scaled | None


def measure(logits: Tensor, labels: Tensor, *, bins: int, resamples: int, seed: int) -> Measured:
    """Everything about logits (n, classes) for images with these labels (n,)."""
    number = logits.shape[1]
    tally = empty_tally(number, torch.device("cpu"))
    for first in range(0, len(labels), CHUNK):
        part, own = logits[first : first + CHUNK], labels[first : first + CHUNK]
        tally = update(tally, part, own, torch.ones_like(own, dtype=torch.bool))
    curve = reliability(logits, labels, bins)
    metrics = results(tally) | {"nll": curve.nll, "brier": curve.brier, "ece": curve.ece}
    draws: dict[str, Floats] = {}
    if resamples:
        values = bootstrap.values_by_image(logits, labels)
        draws = bootstrap.resample(values, labels.numpy(), resamples, seed)
    confusion = confusion_counts(labels, logits.argmax(1), number)
    return Measured(
        metrics=metrics,
        intervals={name: bootstrap.interval(found) for name, found in draws.items()},
        draws=draws,
        confusion=confusion,
        classes=class_metrics(confusion, number),
        pairs=confused_pairs(confusion, PAIRS),
        reliability=curve,
        scaled=scale(logits, labels, bins, seed),
    )


def compare(model: Measured, baseline: Measured) -> dict[str, Difference]:
    """Each resampled metric of a model minus that of the baseline, on the same images."""
    return {
        name: bootstrap.difference(
            name, (model.metrics[name], draws), (baseline.metrics[name], baseline.draws[name])
        )
        for name, draws in model.draws.items()
    }


@dataclass(frozen=True)
class Mistake:
    """An image that the model got wrong."""

    place: int
    """Among the predictions."""
    label: int
    predicted: int
    confidence: float
    own: float
    """Probability of the label."""


def confident_mistakes(logits: Tensor, labels: Tensor, most: int) -> list[Mistake]:
    """The mistakes that the model was surest of, the surest first."""
    wrong = (logits.argmax(1) != labels).nonzero()[:, 0]
    chances = logits[wrong].double().softmax(1)
    sure, answer = chances.max(1)
    own = chances.gather(1, labels[wrong][:, None])[:, 0]
    order = sure.argsort(descending=True, stable=True)[:most].tolist()
    return [
        Mistake(int(wrong[i]), int(labels[wrong[i]]), int(answer[i]), float(sure[i]), float(own[i]))
        for i in order
    ]


def accuracy(votes: Tensor, labels: Tensor) -> float:
    """Share of the images whose label has the most votes."""
    return float((votes.argmax(1) == labels).double().mean())


def as_labels(mapping: NDArray[np.int64], labels: NDArray[np.int64], ids: Tensor) -> Tensor:
    """The labels of some images, as numbers of the model's classes."""
    return torch.from_numpy(mapping[labels])[ids]
