"""k-NN against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from vision.evaluation.neighbours import nearest_classes


def features(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (samples,), generator=generator)
    centres = torch.randn(5, 12, generator=torch.Generator().manual_seed(9))
    return centres[labels] + torch.randn(samples, 12, generator=generator), labels


@pytest.mark.parametrize("k", [1, 5, 20])
def test_votes_decide_as_scikit_learns_weighted_neighbours(k: int) -> None:
    memory, memory_labels = features(300, seed=0)
    queries, _ = features(150, seed=1)
    peer = KNeighborsClassifier(
        k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07)
    )
    peer.fit(memory, memory_labels)
    votes = nearest_classes(memory, memory_labels, queries, 5, k)
    chances = votes / votes.sum(1, keepdim=True)
    assert np.abs(chances.numpy() - peer.predict_proba(queries)).max() < 1e-4
    assert np.array_equal(votes.argmax(1).numpy(), peer.predict(queries))


def test_memory_smaller_than_k_is_refused() -> None:
    memory, labels = features(10, seed=0)
    with pytest.raises(ValueError, match="k = 20, but the memory has 10 images"):
        nearest_classes(memory, labels, memory, 5, 20)
