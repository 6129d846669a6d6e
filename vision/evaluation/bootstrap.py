"""Confidence intervals by the bootstrap (Efron, 1979).

As many images as there are, drawn with replacement, again and again; the middle 95 % of a metric's
values are its interval. The draws depend only on the seed and the number of images, so models are
compared draw by draw on the same images (paired): how difficult the images of a draw are cancels
out of the difference.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vision.evaluation.metrics import ImageScores

Floats = NDArray[np.float64]
LEVEL = 0.95
LOWER_IS_BETTER = frozenset({"loss", "brier"})
METRICS = ("top1", "top5", "balanced_accuracy", "loss", "brier")
"""What is resampled: means over images, and balanced accuracy."""


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


def resample(
    scores: ImageScores, labels: NDArray[np.int64], resamples: int, seed: int
) -> dict[str, Floats]:
    """Every metric in each draw: (resamples,)."""
    images = len(labels)
    present, position = np.unique(labels, return_inverse=True)
    draws = {name: np.empty(resamples) for name in METRICS}
    means = [name for name in METRICS if name != "balanced_accuracy"]
    matrix = np.stack([getattr(scores, name).numpy() for name in means])
    random = np.random.default_rng([seed, images])
    for draw in range(resamples):
        times = np.bincount(random.integers(images, size=images), minlength=images)
        times = times.astype(np.float64)
        for name, value in zip(means, matrix @ times / images, strict=True):
            draws[name][draw] = value
        shown = np.bincount(position, times, len(present))
        right = np.bincount(position, times * scores.top1.numpy(), len(present))
        draws["balanced_accuracy"][draw] = np.mean(right[shown > 0] / shown[shown > 0])
    return draws


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
