"""Whether probabilities can be believed, and a temperature that makes them more believable.

Definitions:

- **Negative log-likelihood**: the mean of −log p(label).
- **Brier score**: the mean of Σ_c (p_c − [c = label])², between 0 and 2 (Brier, 1950).
- **Expected calibration error**: images are sorted by their confidence max_c p_c into bins of
  equal width, (low, high]; the mean over images of |accuracy − mean confidence| of their bin
  (Guo et al., ICML 2017).
- **Temperature**: the T > 0 for which softmax(logits / T) has the least negative log-likelihood. It
  is fitted on one half of the images and judged on the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK = 4096
"""Images whose probabilities are in memory at once, in double precision."""
COLDEST, HOTTEST = 0.01, 100.0
"""Limits of the temperature: with every image right, the best one would be 0."""


@dataclass(frozen=True)
class Bin:
    """The images of one range of confidence, (low, high]."""

    low: float
    high: float
    count: int
    confidence: float | None
    """Mean confidence and accuracy; None where there is no image."""
    accuracy: float | None


@dataclass(frozen=True)
class Reliability:
    """How probabilities compare with what happened."""

    images: int
    nll: float
    brier: float
    ece: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Scaled:
    """What a temperature, fitted on the other half, changes on this half of the images."""

    temperature: float
    fitted_on: int
    """Images of the half that the temperature was fitted on."""
    at_limit: bool
    """The best temperature lies outside of the range that is searched."""
    before: Reliability
    after: Reliability


def reliability(logits: Tensor, labels: Tensor, bins: int, temperature: float = 1.0) -> Reliability:
    """All measures of softmax(logits / temperature): logits (n, classes), labels (n,)."""
    if len(labels) == 0:
        raise ValueError("there is no image to judge probabilities by.")
    confidence, right, nll, brier = [], [], [], []
    for part, own in _chunks(logits, labels):
        logs = (part / temperature).log_softmax(1)
        chances = logs.exp()
        own_chance = chances.gather(1, own[:, None])[:, 0]
        confidence.append(chances.amax(1))
        right.append(part.argmax(1) == own)
        nll.append(-logs.gather(1, own[:, None])[:, 0])
        brier.append(chances.square().sum(1) - 2 * own_chance + 1)
    table = confidence_bins(torch.cat(confidence), torch.cat(right), bins)
    return Reliability(
        images=len(labels),
        nll=float(torch.cat(nll).mean()),
        brier=float(torch.cat(brier).mean()),
        ece=calibration_error(table),
        bins=table,
    )


def confidence_bins(confidence: Tensor, right: Tensor, bins: int) -> tuple[Bin, ...]:
    """Images by their confidence (n,), with the share of right answers (n,) in each bin."""
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
    gaps = [
        b.count * abs(b.accuracy - b.confidence)
        for b in bins
        if b.accuracy is not None and b.confidence is not None
    ]
    return sum(gaps) / sum(b.count for b in bins)


def halves(images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two halves of the numbers below `images`, by chance but always the same for a seed."""
    order = torch.from_numpy(np.random.default_rng([seed, images]).permutation(images))
    return order[: images // 2].sort().values, order[images // 2 :].sort().values


def scale(logits: Tensor, labels: Tensor, bins: int, seed: int) -> Scaled | None:
    """Fit a temperature on one half of the images, judge it on the other.

    None with fewer than two images, or where a logit is not a finite number.
    """
    if len(labels) < 2 or not bool(logits.isfinite().all()):
        return None
    fit, judge = halves(len(labels), seed)
    temperature = fit_temperature(logits[fit], labels[fit])
    return Scaled(
        temperature=temperature,
        fitted_on=len(fit),
        at_limit=temperature in (COLDEST, HOTTEST),
        before=reliability(logits[judge], labels[judge], bins),
        after=reliability(logits[judge], labels[judge], bins, temperature),
    )


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature with the least negative log-likelihood, within [COLDEST, HOTTEST].

    The likelihood is convex in 1 / T. Newton's method finds the root of its slope; where a step
    would leave the interval that the root is known to be in, the interval is halved instead.
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
    """First and second derivative of the mean negative log-likelihood by 1 / T."""
    slope = curvature = 0.0
    for part, own in _chunks(logits, labels):
        centred = part - part.gather(1, own[:, None])
        chances = (centred * inverse).softmax(1)
        mean = (chances * centred).sum(1)
        slope += float(mean.sum())
        curvature += float(((chances * centred.square()).sum(1) - mean.square()).sum())
    return slope / len(labels), curvature / len(labels)


def _chunks(logits: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(labels), CHUNK):
        yield logits[first : first + CHUNK].double(), labels[first : first + CHUNK]
