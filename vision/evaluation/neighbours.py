"""k-NN on a model's features: how well they separate classes without any head.

As in Wu et al. (CVPR 2018) and DINO (Caron et al., ICCV 2021): the k training images of the
largest cosine similarity vote with the weight exp(similarity / 0.07).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision.config import ConfigError
from vision.models.layers import Classifier
from vision.models.timm import TimmModel

TEMPERATURE = 0.07
CHUNK = 1024
"""Images that are compared with the whole memory at once."""


@contextmanager
def recorded_features(model: Classifier) -> Iterator[list[Tensor]]:
    """A list that gets the pooled features (b c) of every forward pass: what the head is given."""
    found: list[Tensor] = []

    def record(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.append(inputs[0].flatten(1))

    handle = _head(model).register_forward_pre_hook(record)
    try:
        yield found
    finally:
        handle.remove()


def _head(model: Classifier) -> nn.Module:
    head: Any = model.head if not isinstance(model, TimmModel) else model.model.get_classifier()
    head = head[0] if isinstance(head, tuple | nn.ModuleList) else head  # a distilled model has two
    if not isinstance(head, nn.Module):
        raise ConfigError(
            "neighbours: this model has no head whose input could be taken for its features; use "
            "neighbours=0."
        )
    return head


def as_logits(votes: Tensor) -> Tensor:
    """Votes (n, classes) as logits whose softmax are the shares of the votes."""
    shares = votes / votes.sum(dim=1, keepdim=True)
    return shares.clamp_min(torch.finfo(shares.dtype).tiny).log()


def nearest_classes(
    memory: Tensor, memory_labels: Tensor, features: Tensor, classes: int, k: int
) -> Tensor:
    """Votes (n, classes) of the k nearest of the memory (m, c) for each of the features (n, c)."""
    if not 1 <= k <= len(memory):
        raise ValueError(f"k = {k}, but the memory has {len(memory)} images.")
    memory = F.normalize(memory.float(), dim=1)
    votes = torch.zeros(len(features), classes)
    for first in range(0, len(features), CHUNK):
        part = F.normalize(features[first : first + CHUNK].float(), dim=1)
        similarity, place = (part @ memory.T).topk(k, dim=1)
        # Relative to the nearest one, which changes no order: exp(1 / 0.07) is a large number.
        weight = ((similarity - similarity[:, :1]) / TEMPERATURE).exp()
        votes[first : first + CHUNK].scatter_add_(1, memory_labels[place], weight)
    return votes
