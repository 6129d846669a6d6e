"""From logits to probabilities: of one class per image, or of each class by itself."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Activation = Literal["softmax", "sigmoid"]
"""softmax: an image has one of the classes; sigmoid: any number of them (multi-label)."""


def probabilities(logits: Tensor, activation: Activation) -> Tensor:
    """Probabilities of logits (…, classes)."""
    return logits.softmax(-1) if activation == "softmax" else logits.sigmoid()


def average(logits: Sequence[Tensor], activation: Activation) -> Tensor:
    """Logits of the mean probabilities of several views; those of a single view unchanged."""
    if len(logits) == 1:
        return logits[0].float()
    views = torch.stack([view.float() for view in logits])
    if activation == "softmax":
        return views.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    present, absent = (torch.nn.functional.logsigmoid(v).logsumexp(0) for v in (views, -views))
    return present - absent
