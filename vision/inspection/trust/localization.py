"""How well maps show where an object is, from maps and masks alone.

Maps and masks are at the size of the image. Negative values of a map count as nothing. A map whose
values are all equal counts as a uniform one, so that no metric rewards an empty map.

Definitions
- pointing: whether the largest value lies on the object; of several largest ones, their share on it
  (Zhang et al., IJCV 2018, without their tolerance of 15 pixels).
- energy: the share of the map's sum that lies on the object (Wang et al., CVPR Workshops 2020).
- pixel accuracy, mIoU: the map is cut at its own mean; pixels, intersections and unions are pooled
  over all images, and mIoU is the mean over object and background.
- mAP: average precision of one image's pixels, those of the background joined to them with
  1 - map, of the map scaled to 0…1; mean over images. These three as Chefer et al., CVPR 2021.
- separation: of an image with two objects, whether the map of one class has more of its sum on
  that class's object than on the other's; a tie counts as one half.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Map = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]


def pointing(values: Map, mask: Mask) -> float:
    """Share of the largest values that lie on the object: 0 or 1 where one is largest."""
    _check(values, mask)
    return float(mask[values == values.max()].mean())


def energy(values: Map, mask: Mask) -> float:
    """Share of the map's sum that lies on the object."""
    _check(values, mask)
    positive = np.clip(values, 0, None).astype(np.float64)
    total = positive.sum()
    return float(positive[mask].sum() / total) if total > 0 else float(mask.mean())


class Overlap(NamedTuple):
    """Counts of pixels, which can be added up over images."""

    pixels: int
    intersections: NDArray[np.int64]
    """Of background and of object."""
    unions: NDArray[np.int64]

    @property
    def accuracy(self) -> float:
        """Share of the pixels that are on the right side."""
        return float(self.intersections.sum() / self.pixels)

    @property
    def mean_iou(self) -> float:
        """Intersection over union, mean over background and object."""
        pairs = zip(self.intersections, self.unions, strict=True)
        return float(np.mean([i / u if u else 1.0 for i, u in pairs]))


def overlap(values: Map, mask: Mask) -> Overlap:
    """A map cut at its own mean, against a mask."""
    _check(values, mask)
    found = values > values.mean(dtype=np.float64)
    sides = [(~found, ~mask), (found, mask)]
    intersections = np.array([(a & b).sum() for a, b in sides])
    unions = np.array([(a | b).sum() for a, b in sides])
    return Overlap(mask.size, intersections, unions)


def pooled(counts: Sequence[Overlap]) -> Overlap:
    """The counts of several images as one."""
    return Overlap(*(sum(values) for values in zip(*counts, strict=True)))


def average_precision(values: Map, mask: Mask) -> float:
    """Of both sides at once: scores (1 - map, map) for being (background, object)."""
    _check(values, mask)
    scaled = _scaled(values)
    scores = np.concatenate([1 - scaled.ravel(), scaled.ravel()])
    truth = np.concatenate([~mask.ravel(), mask.ravel()])
    return precision_area(scores, truth)


def precision_area(scores: Map, truth: Mask) -> float:
    """Σ (recall step) · precision, from the highest score down; equal scores are one step."""
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], np.cumsum(truth[order])
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    precision, recall = hits[last] / (last + 1), hits[last] / max(hits[-1], 1)
    return float(np.sum(np.diff(recall, prepend=0) * precision))


def separation(values: Map, asked: Mask, other: Mask) -> float:
    """1 where the asked object has more of the map than the other one, one half for a tie."""
    _check(values, asked)
    positive = np.clip(values, 0, None).astype(np.float64)
    here, there = positive[asked].sum(), positive[other].sum()
    return 0.5 if np.isclose(here, there, rtol=1e-9, atol=0) else float(here > there)


def random_map(grid: tuple[int, int], seed: Sequence[int]) -> Map:
    """Noise in every cell: the baseline of a map without information."""
    return np.random.default_rng(list(seed)).random(grid)


def centre_map(grid: tuple[int, int]) -> Map:
    """A Gaussian around the middle, a quarter of the image wide: where objects often are."""
    rows, columns = grid
    y = (np.arange(rows) + 0.5) / rows - 0.5
    x = (np.arange(columns) + 0.5) / columns - 0.5
    return np.exp(-(y[:, None] ** 2 + x[None] ** 2) / (2 * 0.25**2))


def _scaled(values: Map) -> Map:
    low, high = float(values.min()), float(values.max())
    if high == low:
        return np.full(values.shape, 0.5)
    scaled: Map = (values.astype(np.float64) - low) / (high - low)
    return scaled


def _check(values: Map, mask: Mask) -> None:
    if values.shape != mask.shape:
        raise ValueError(f"A map of {values.shape} and a mask of {mask.shape} do not fit.")
    if not mask.any():
        raise ValueError("The mask is empty: it marks no object.")
