"""Mixup and CutMix of whole batches and their targets, on the device.

One draw per batch chooses Mixup, CutMix or neither. The first image is mixed with the last, the
second with the last but one, and so on.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vision.data.configs import AugmentConfig
from vision.data.images.augment import Box
from vision.randomness import generator


@dataclass(frozen=True)
class Mix:
    """Mixing of a batch."""

    share: float = 1.0
    """Share of each image itself; the rest comes from its partner."""
    box: Box | None = None
    """Rectangle that comes from the partner (CutMix)."""


def mix_batch(
    images: Tensor,
    labels: Tensor,
    classes: int,
    augment: AugmentConfig,
    *,
    seed: int,
    step: int,
    rank: int = 0,
    part: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return normalised images (n, c, h, w) and their targets (n, classes), mixed and smoothed.

    `part` is the number of the batch within a step with gradient accumulation.
    """
    random = generator(seed, "mixing", epoch=step, index=rank, occurrence=part)
    mix = draw_mix(augment, (images.shape[-2], images.shape[-1]), random)
    return mix_images(images, mix), soft_targets(labels, classes, mix, augment.label_smoothing)


def draw_mix(augment: AugmentConfig, size: tuple[int, int], random: np.random.Generator) -> Mix:
    """Draw the mixing of a batch of images of this size."""
    if not (augment.mixup or augment.cutmix) or random.random() >= augment.mix:
        return Mix()
    cut = augment.cutmix > 0
    if augment.mixup and augment.cutmix:
        cut = random.random() < augment.cutmix_share
    alpha = augment.cutmix if cut else augment.mixup
    share = float(random.beta(alpha, alpha))
    return cut_box(share, size, random) if cut else Mix(share)


def cut_box(share: float, size: tuple[int, int], random: np.random.Generator) -> Mix:
    """Return a rectangle of the image's shape around a random point (Yun et al., ICCV 2019).

    It is clipped to the image; the share is computed from the pixels that remain.
    """
    height, width = size
    cut_height, cut_width = (int(side * math.sqrt(1 - share)) for side in size)
    y, x = int(random.integers(height)), int(random.integers(width))
    top, bottom = max(0, y - cut_height // 2), min(height, y + (cut_height + 1) // 2)
    left, right = max(0, x - cut_width // 2), min(width, x + (cut_width + 1) // 2)
    area = (bottom - top) * (right - left)
    return Mix(1 - area / (height * width), (top, left, bottom - top, right - left))


def mix_images(images: Tensor, mix: Mix) -> Tensor:
    """Return the mixed batch; the given one is not changed."""
    if mix.share == 1:
        return images
    if mix.box is None:
        return torch.lerp(images.flip(0), images, mix.share)
    top, left, height, width = mix.box
    mixed = images.clone()
    mixed[..., top : top + height, left : left + width] = images.flip(0)[
        ..., top : top + height, left : left + width
    ]
    return mixed


def soft_targets(labels: Tensor, classes: int, mix: Mix, smoothing: float) -> Tensor:
    """Return probabilities (n, classes): both images' labels by their shares, then smoothed.

    Smoothing moves a share of every target to the uniform distribution (Szegedy et al., CVPR 2016).
    Labels (n, classes) are a distribution over yes and no for each class; where one of them is
    unknown (−1), so is the target.
    """
    if labels.ndim == 2:
        return _soft_entries(labels, mix, smoothing)
    targets = F.one_hot(labels, classes).to(torch.float32)
    if mix.share < 1:
        targets = torch.lerp(targets.flip(0), targets, mix.share)
    return targets * (1 - smoothing) + smoothing / classes


def _soft_entries(labels: Tensor, mix: Mix, smoothing: float) -> Tensor:
    targets = labels.to(torch.float32)
    unknown = targets < 0
    if mix.share < 1:
        unknown = unknown | unknown.flip(0)
        targets = torch.lerp(targets.flip(0), targets, mix.share)
    return (targets * (1 - smoothing) + smoothing / 2).masked_fill(unknown, -1.0)
