"""Calibration: how well probabilities match frequencies, and temperature scaling.

Definitions:

- **Negative log-likelihood**: the mean of −log p(label).
- **Brier score**: the mean of Σ_c (p_c − [c = label])², between 0 and 2 (Brier, 1950).
- **Expected calibration error**: images are divided by their confidence max_c p_c into bins of
  equal width, (low, high]; the mean over images of |accuracy − mean confidence| of their bin
  (Guo et al., ICML 2017).
- **Temperature**: the T > 0 that minimises the negative log-likelihood of softmax(logits / T). It
  is fitted on one half of the images and evaluated on the other.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vision.evaluation.metrics import ImageScores, chunks, score_images

COLDEST, HOTTEST = 0.01, 100.0
"""Limits of the temperature: where every prediction is correct, the optimum would be 0."""


@dataclass(frozen=True)
class Bin:
    """The images whose confidence is in (low, high]."""

    low: float
    high: float
    count: int
    confidence: float | None
    """Mean confidence and accuracy; None for an empty bin."""
    accuracy: float | None


@dataclass(frozen=True)
class Reliability:
    """Calibration measures of some images."""

    images: int
    nll: float
    brier: float
    ece: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Scaled:
    """The effect of a temperature on the half of the images that it was not fitted on."""

    temperature: float
    fitted_on: int
    """Number of images in the other half."""
    at_limit: bool
    """Whether the optimum is outside the range that is searched."""
    before: Reliability
    after: Reliability


def reliability(scores: ImageScores, bins: int) -> Reliability:
    """Calibration measures of the probabilities that gave these scores."""
    table = confidence_bins(scores.confidence, scores.top1, bins)
    return Reliability(
        images=len(scores.loss),
        nll=float(scores.loss.mean()),
        brier=float(scores.brier.mean()),
        ece=calibration_error(table),
        bins=table,
    )


def confidence_bins(confidence: Tensor, right: Tensor, bins: int) -> tuple[Bin, ...]:
    """Bins of images by their confidence (n,), with the mean of `right` (n,) in each."""
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    place = torch.bucketize(confidence.double(), edges[1:-1])
    count = torch.bincount(place, minlength=bins)
    sums = [
        torch.bincount(place, weights=values.double(), minlength=bins).tolist()
        for values in (confidence, right)
    ]
    return tuple(
        Bin(low, high, n, confident / n if n else None, accurate / n if n else None)
        for low, high, n, confident, accurate in zip(
            edges[:-1].tolist(), edges[1:].tolist(), count.tolist(), *sums, strict=True
        )
    )


def calibration_error(bins: tuple[Bin, ...]) -> float:
    """The expected calibration error of images in bins."""
    gaps = (b.count * abs((b.accuracy or 0.0) - (b.confidence or 0.0)) for b in bins)
    return sum(gaps) / sum(b.count for b in bins)


def halves(images: int, seed: int) -> tuple[Tensor, Tensor]:
    """A random partition of range(images) into two halves, determined by the seed."""
    order = torch.from_numpy(np.random.default_rng([seed, images]).permutation(images))
    return order[: images // 2].sort().values, order[images // 2 :].sort().values


def scale(logits: Tensor, labels: Tensor, bins: int, seed: int) -> Scaled | None:
    """Fit a temperature on one half of the images, evaluate it on the other.

    None for fewer than two images, or if a logit is not finite.
    """
    if len(labels) < 2 or not bool(logits.isfinite().all()):
        return None
    fit, judge = halves(len(labels), seed)
    temperature = fit_temperature(logits[fit], labels[fit])
    return Scaled(
        temperature=temperature,
        fitted_on=len(fit),
        at_limit=temperature in (COLDEST, HOTTEST),
        before=reliability(score_images(logits[judge], labels[judge]), bins),
        after=reliability(score_images(logits[judge], labels[judge], temperature), bins),
    )


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature in [COLDEST, HOTTEST] that minimises the negative log-likelihood.

    The negative log-likelihood is convex in 1 / T. Newton's method finds the root of its slope;
    a step that would leave the interval known to contain the root bisects the interval instead.
    """
    low, high = 1 / HOTTEST, 1 / COLDEST
    if _slope(logits, labels, high)[0] <= 0:
        return COLDEST
    if _slope(logits, labels, low)[0] >= 0:
        return HOTTEST
    inverse = 1.0
    for _ in range(100):
        slope, curvature = _slope(logits, labels, inverse)
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        step = inverse - slope / curvature if curvature > 0 else low
        following = step if low < step < high else (low * high) ** 0.5
        if abs(following - inverse) <= 1e-10 * inverse:
            break
        inverse = following
    return 1 / inverse


def _slope(logits: Tensor, labels: Tensor, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean negative log-likelihood with respect to 1 / T."""
    slope = curvature = 0.0
    for part, own in chunks(logits, labels):
        centred = part - part.gather(1, own[:, None])
        chances = (centred * inverse).softmax(1)
        mean = (chances * centred).sum(1)
        slope += float(mean.sum())
        curvature += float(((chances * centred.square()).sum(1) - mean.square()).sum())
    return slope / len(labels), curvature / len(labels)
