"""The loss of a classifier."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vision.config import ConfigError
from vision.training.configs import LossConfig


def training_loss(logits: Tensor, targets: Tensor, config: LossConfig) -> Tensor:
    """The mean loss of logits (n, classes), computed in full precision.

    Targets are probabilities (n, classes), already mixed and smoothed (vision.data.images.mixing),
    or labels (n,). Cross-entropy is summed over classes; BCE is averaged over them, as in DeiT-III
    (Touvron et al., ECCV 2022), which makes it smaller by about the number of classes.
    """
    logits = logits.float()
    if config.kind == "cross_entropy":
        return F.cross_entropy(logits, targets)
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1]).to(logits.dtype)
    if config.bce_threshold is not None:
        targets = (targets > config.bce_threshold).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets)


def loss_and_sums(logits: Tensor, targets: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The mean loss, and the sums (loss, correct predictions, images) for targets (n, classes)."""
    loss = training_loss(logits, targets, config)
    correct = (logits.detach().argmax(1) == targets.argmax(1)).sum()
    count = loss.new_tensor(float(len(targets)))
    return loss, torch.stack([loss.detach() * count, correct.to(loss.dtype), count])


def check_loss(config: LossConfig, label_smoothing: float, classes: int) -> None:
    """Refuse a threshold above or below all values of a smoothed target.

    Smoothing gives each wrong class smoothing / classes: small, but above a threshold of 0.
    """
    if config.bce_threshold is None:
        return
    if config.kind != "bce":
        raise ConfigError(
            f"loss.bce_threshold = {config.bce_threshold}, but loss.kind = {config.kind} has no "
            "threshold; set it to null, or choose loss.kind=bce."
        )
    wrong = label_smoothing / classes
    right = 1 - label_smoothing + wrong
    if not wrong <= config.bce_threshold < right:
        counted = "all" if wrong > config.bce_threshold else "none"
        raise ConfigError(
            f"loss.bce_threshold = {config.bce_threshold}: with augment.label_smoothing = "
            f"{label_smoothing} and {classes} classes a target is {right:g} for the right class "
            f"and {wrong:g} for every other, so that {counted} would count as 1. Choose a "
            f"threshold from {wrong:g} to below {right:g}, or no smoothing."
        )
