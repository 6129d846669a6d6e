"""Unequal classes in the loss: a weight and a shift of the logits for every class.

Both follow from the share of each class among the images as they are sampled: with
`data.sampling=balanced` all classes have the same.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vision.config import ConfigError
from vision.data.sources.source import Labels, class_sizes
from vision.training.tasks.configs import LossConfig

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ClassBalance:
    """What the loss does about unequal classes; None: nothing."""

    weights: Tensor | None = None
    """float32 (classes,): weight of each class, of mean 1 over the images as they are sampled. The
    loss is then a plain mean over images, whatever batch or process they are in."""
    shift: Tensor | None = None
    """float32 (classes,): τ · log(share), added to the logits in training."""


def class_balance(
    config: LossConfig,
    labels: Labels,
    classes: tuple[str, ...],
    sampling: Literal["uniform", "balanced"],
    device: torch.device,
) -> ClassBalance:
    """The balance of a run on training images with these labels; refused where it has none."""
    counts = class_sizes(labels, len(classes)).astype(np.float64)
    shares = counts if sampling == "uniform" else (counts > 0).astype(np.float64)
    shares = shares / max(shares.sum(), 1.0)
    weights = shift = None
    if config.class_weights != "none":
        weights = torch.tensor(class_weights(config, counts, shares), dtype=torch.float32)
    if config.logit_adjustment:
        if (counts == 0).any():
            raise ConfigError(
                f"loss.logit_adjustment = {config.logit_adjustment:g}: the class "
                f"'{classes[int(counts.argmin())]}' has no training images, so the logarithm of "
                "its share is not finite; use 0, or data without empty classes."
            )
        shift = torch.tensor(config.logit_adjustment * np.log(shares), dtype=torch.float32)
    return ClassBalance(
        None if weights is None else weights.to(device),
        None if shift is None else shift.to(device),
    )


def class_weights(config: LossConfig, counts: Floats, shares: Floats) -> Floats:
    """The weight of every class, of mean 1 over images in which classes have these shares. A class
    without images has none.
    """
    present = counts > 0
    match config.class_weights:
        case "none":
            raw = np.ones_like(counts)
        case "balanced":
            raw = 1 / np.maximum(counts, 1)
        case "effective":
            beta = config.effective_beta
            raw = (1 - beta) / (1 - beta ** np.maximum(counts, 1))
        case given:
            if len(given) != len(counts):
                raise ConfigError(
                    f"loss.class_weights has {len(given)} numbers, but the data has {len(counts)} "
                    "classes; give one for each, in their order (`vision data check=true`)."
                )
            raw = np.array(given)
    mean = float((raw * shares).sum())
    if not mean:
        raise ConfigError(
            "loss.class_weights: every class with training images has the weight 0; give one of "
            "them a larger one."
        )
    weights: Floats = np.where(present, raw, 0) / mean
    return weights
