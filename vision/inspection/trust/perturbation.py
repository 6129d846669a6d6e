"""How hiding or showing the pixels of a map changes the prediction.

Pixels are ranked by the map at the size of the image; the order of equal values is random. The
share x of hidden pixels rises from 0 to 1 in equal steps. With c the class predicted for the whole
image:
- positive perturbation: the largest values are hidden first (made black, before normalisation); the
  area below the share of images that are still predicted as c, over x from 0 to 0.9, trapezoids, ×
  100, so that the best is near 5 and the worst 90. Lower is better.
- negative perturbation: the smallest values are hidden first. Higher is better. As Chefer et al.
  (CVPR 2021), who count hits of the true label instead of c.
- deletion: as positive, but the area below the probability of c, over x from 0 to 1. Lower is
  better. Petsiuk et al., BMVC 2018 (RISE).
- insertion: the largest values are shown first, over a blurred image (Gaussian, a tenth of the
  shorter side wide); the area below the probability of c. Higher is better.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur  # type: ignore[import-untyped]

from vision.models.layers import Activation, probabilities

Map = NDArray[np.floating[Any]]
Predict = Callable[[Tensor], Tensor]
"""From uint8 images (b channels height width) to logits (b classes)."""
LAST = 0.9
"""Where the curves of positive and negative perturbation end."""


class Curves(NamedTuple):
    """Of one image, by step: (steps + 1)."""

    positive: Map
    """Probability of the class while the largest values are hidden first."""
    positive_kept: Map
    """Whether that class is still predicted."""
    negative_kept: Map
    insertion: Map


def perturb(
    predict: Predict,
    image: Tensor,
    values: Map,
    target: int,
    *,
    steps: int,
    seed: list[int],
    activation: Activation = "softmax",
) -> Curves:
    """The curves of one map of one uint8 image (channels height width)."""
    order = ranked(values, seed)
    shares = np.linspace(0, 1, steps + 1)
    black = torch.zeros_like(image)
    blurred = blur(image)
    batches = [
        _mixed(image, black, order, shares),
        _mixed(image, black, order[::-1], shares),
        _mixed(blurred, image, order, shares),
    ]
    with torch.no_grad():
        chances = probabilities(predict(torch.cat(batches)).float(), activation).cpu()
    positive, negative, insertion = chances.split(steps + 1)
    return Curves(
        positive=positive[:, target].numpy(),
        positive_kept=(positive.argmax(1) == target).numpy().astype(np.float64),
        negative_kept=(negative.argmax(1) == target).numpy().astype(np.float64),
        insertion=insertion[:, target].numpy(),
    )


def ranked(values: Map, seed: list[int]) -> NDArray[np.int64]:
    """Pixels from the largest value to the smallest; equal ones in random order."""
    noise = np.random.default_rng(seed).random(values.size)
    return np.lexsort((noise, -values.ravel()))


def perturbation_area(kept: Map) -> float:
    """Trapezoids below a curve over 0 … 1, cut at `LAST`, in percent."""
    shares = np.linspace(0, 1, len(kept))
    inside = shares < LAST - 1e-9
    end = np.interp(LAST, shares, kept)
    heights, places = np.append(kept[inside], end), np.append(shares[inside], LAST)
    return 100 * float(torch.trapezoid(torch.from_numpy(heights), torch.from_numpy(places)))


def curve_area(chances: Map) -> float:
    """Trapezoids below a curve over 0 … 1."""
    return float(torch.trapezoid(torch.from_numpy(chances), dx=1 / (len(chances) - 1)))


def blur(image: Tensor) -> Tensor:
    """An image without small details."""
    sigma = min(image.shape[-2:]) / 10
    half = min(int(3 * sigma) + 1, min(image.shape[-2:]) - 1)
    blurred: Tensor = gaussian_blur(image, [2 * half + 1, 2 * half + 1], [sigma, sigma])
    return blurred


def _mixed(before: Tensor, after: Tensor, order: NDArray[np.int64], shares: Map) -> Tensor:
    """Images in which the first pixels of an order have changed: (steps channels y x)."""
    rank = torch.empty(len(order), dtype=torch.int64)
    rank[torch.from_numpy(order.copy())] = torch.arange(len(order))
    limits = torch.from_numpy(np.rint(shares * len(order)).astype(np.int64))
    changed = (rank[None] < limits[:, None]).view(len(shares), 1, *before.shape[1:])
    return torch.where(changed.to(before.device), after[None], before[None])
