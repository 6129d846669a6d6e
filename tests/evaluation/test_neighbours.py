"""k-NN against scikit-learn, and the features that it works on."""

import numpy as np
import pytest
import torch
from model_settings import small_model
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from vision.config import parse
from vision.evaluation.neighbours import nearest_classes, recorded_features
from vision.models.build import build_model
from vision.models.configs import TimmConfig


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


@pytest.mark.parametrize("family", ["vit_tiny", "swin_tiny", "swinv2_tiny"])
def test_recorded_features_are_what_the_head_turns_into_logits(family: str) -> None:
    model = small_model(family, (32, 32)).eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad(), recorded_features(model) as found:
        logits = model(images)
    assert len(found) == 1
    assert torch.equal(model.head(found[0]), logits)
    with torch.no_grad():
        model(images)
    assert len(found) == 1  # nothing is recorded any more


def test_recorded_features_of_a_timm_model_are_its_pooled_ones() -> None:
    values = {"kind": "timm", "name": "resnet18", "drop_path": None}
    config = parse(TimmConfig, values | {"checkpoint_activations": False})
    model = build_model(config, (32, 32), classes=4).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), recorded_features(model) as found:
        model(images)
        expected = model.model.forward_head(model.model.forward_features(images), pre_logits=True)  # type: ignore[operator, union-attr]
    assert torch.equal(found[0], expected)
