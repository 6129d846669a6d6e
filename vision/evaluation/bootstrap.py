"""Confidence intervals by the bootstrap (Efron, 1979): what other images would have shown.

Images are drawn with replacement, as many as there are, again and again; the middle 95 % of what
a metric comes to is its interval. The draws depend on the seed and the number of images only, so
that models are compared draw by draw on the same images (paired): how hard the images of a draw
are does not blur the difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
LEVEL = 0.95
LOWER_IS_BETTER = frozenset({"loss", "brier"})
METRICS = ("top1", "top5", "balanced_accuracy", "loss", "brier")
"""What is resampled: means over images, and balanced accuracy."""
CHUNK = 4096


@dataclass(frozen=True)
class Difference:
    """A metric of one model minus that of another, on the same images."""

    value: float
    low: float
    high: float
    better: float
    """Share of the draws in which the first is better than the other; ties count half."""

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def values_by_image(logits: Tensor, labels: Tensor) -> dict[str, Floats]:
    """What each image adds to every metric: logits (n, classes), labels (n,)."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ("top1", "top5", "loss", "brier")}
    number = torch.arange(logits.shape[1])
    for first in range(0, len(labels), CHUNK):
        part, own = logits[first : first + CHUNK].double(), labels[first : first + CHUNK]
        score = part.gather(1, own[:, None])
        # Of equal logits the first one wins; a logit that is not a number is never right.
        behind = (part < score) | ((part == score) & (number > own[:, None]))
        rank = logits.shape[1] - 1 - behind.sum(1)
        chances = part.softmax(1)
        parts["top1"].append((rank == 0).double())
        parts["top5"].append((rank < 5).double())
        parts["loss"].append(F.cross_entropy(part, own, reduction="none"))
        own_chance = chances.gather(1, own[:, None])[:, 0]
        parts["brier"].append(chances.square().sum(1) - 2 * own_chance + 1)
    return {name: torch.cat(found).numpy() for name, found in parts.items()}


def resample(
    values: Mapping[str, Floats], labels: NDArray[np.int64], resamples: int, seed: int
) -> dict[str, Floats]:
    """Every metric in each of the draws: (resamples,)."""
    images = len(labels)
    present, place = np.unique(labels, return_inverse=True)
    means = {name: np.empty(resamples) for name in METRICS}
    names = [name for name in METRICS if name in values]
    matrix = np.stack([values[name] for name in names])
    random = np.random.default_rng([seed, images])
    for draw in range(resamples):
        times = np.bincount(random.integers(images, size=images), minlength=images)
        times = times.astype(np.float64)
        for name, value in zip(names, matrix @ times / images, strict=True):
            means[name][draw] = value
        shown = np.bincount(place, times, len(present))
        right = np.bincount(place, times * values["top1"], len(present))
        means["balanced_accuracy"][draw] = np.mean(right[shown > 0] / shown[shown > 0])
    return means


def interval(draws: Floats) -> tuple[float, float]:
    """The middle 95 % of the draws."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def difference(name: str, first: tuple[float, Floats], second: tuple[float, Floats]) -> Difference:
    """First minus second; each is its value on all images, and its draws."""
    draws = first[1] - second[1]
    low, high = interval(draws)
    gain = -draws if name in LOWER_IS_BETTER else draws
    better = float(np.mean(gain > 0) + np.mean(gain == 0) / 2)
    return Difference(first[0] - second[0], low, high, better)
