"""Test-time augmentation: several views of an image, whose probabilities are averaged."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vision.config import ConfigError
from vision.data.preprocess import Preprocess
from vision.evaluation.configs import Augmentation


def preprocess_for_views(preprocess: Preprocess, augmentation: Augmentation) -> Preprocess:
    """The preprocessing of images to cut views from: for crops, without the central crop.

    The ten crops are then those of Krizhevsky et al. (NeurIPS 2012, section 4.1): 224 pixels from
    the corners and the centre of 256.
    """
    if augmentation in ("none", "flip"):
        return preprocess
    height, width = (math.floor(side / preprocess.crop_ratio) for side in preprocess.image_size)
    if (height, width) == preprocess.image_size:
        raise ConfigError(
            f"augmentation={augmentation}: crop_ratio = {preprocess.crop_ratio:g} leaves nothing "
            f"around the central {height} × {width} pixels to crop from; choose a smaller one, "
            "such as preprocess.crop_ratio=0.875, or augmentation=flip."
        )
    return replace(preprocess, image_size=(height, width), crop_ratio=1.0)


def views(images: Tensor, size: tuple[int, int], augmentation: Augmentation) -> list[Tensor]:
    """The views (b c h w) of images from `preprocess_for_views`; the usual one comes first."""
    found = _crops(images, size) if augmentation in ("five_crop", "ten_crop") else [images]
    mirrored = [view.flip(-1) for view in found] if augmentation in ("flip", "ten_crop") else []
    return [*found, *mirrored]


def _crops(images: Tensor, size: tuple[int, int]) -> list[Tensor]:
    """The centre, then the corners."""
    height, width = size
    below, right = images.shape[-2] - height, images.shape[-1] - width
    places = [(round(below / 2), round(right / 2)), (0, 0), (0, right), (below, 0), (below, right)]
    return [images[..., top : top + height, left : left + width] for top, left in places]


def average(logits: Sequence[Tensor]) -> Tensor:
    """Logits whose softmax is the mean softmax of the views; those of a single view unchanged."""
    if len(logits) == 1:
        return logits[0].float()
    logs = torch.stack([view.float().log_softmax(1) for view in logits])
    return logs.logsumexp(0) - math.log(len(logits))
