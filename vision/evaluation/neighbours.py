"""k-NN on a model's features: how well they separate classes without a head.

As in Wu et al. (CVPR 2018) and DINO (Caron et al., ICCV 2021): the k training images of the
largest cosine similarity vote with the weight exp(similarity / 0.07).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TEMPERATURE = 0.07
CHUNK = 1024
"""Number of images that are compared with the memory at once."""


@dataclass(frozen=True)
class NeighboursAccuracy:
    """Accuracy of k-NN on the features."""

    k: int
    top1: float


def vote_logits(votes: Tensor) -> Tensor:
    """Logits whose softmax is the share of the votes (n, classes)."""
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
        # Relative to the nearest neighbour, because exp(1 / 0.07) is a large number.
        weight = ((similarity - similarity[:, :1]) / TEMPERATURE).exp()
        votes[first : first + CHUNK].scatter_add_(1, memory_labels[place], weight)
    return votes
