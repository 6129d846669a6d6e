"""The local relation layer against its formula, pixel by pixel, and LR-Net as a model."""

import math
from typing import Any

import pytest
import torch
from model_settings import model_config, random_images, redraw
from torch import Tensor

from vision.config import ConfigError
from vision.inspection.capture.capture import capture
from vision.inspection.capture.captured import CaptureError
from vision.models.build import build_model
from vision.models.cost.count import cost
from vision.models.lr_net import LocalRelation, LRNet

RELATIONS = {
    "squared_difference": lambda q, k: -((q - k) ** 2),
    "absolute_difference": lambda q, k: -abs(q - k),
    "product": lambda q, k: q * k,
}


def layer(stride: int = 1, **changes: Any) -> LocalRelation:
    """A layer of 6 channels in groups of 2, with weights that are not trivial."""
    config: Any = model_config("lr_net_mini", width=6, share=2, **changes)
    return redraw(LocalRelation(config, 6, stride)).double()


def composed(relation: LocalRelation, image: Tensor, y: int, x: int, channel: int) -> float:
    """Equation 2 for one pixel and one channel of an image (y x c), in plain numbers."""
    group, reach = channel // 2, relation.side // 2
    rows, columns = image.shape[:2]
    query = float(relation.query.weight[group] @ image[y, x] + relation.query.bias[group])
    scores, values = [], []
    for dy in range(-reach, reach + 1):
        for dx in range(-reach, reach + 1):
            if not (0 <= y + dy < rows and 0 <= x + dx < columns):
                continue
            other = image[y + dy, x + dx]
            key = float(relation.key.weight[group] @ other + relation.key.bias[group])
            score = RELATIONS[relation.relation](query, key)
            if relation.prior is not None:
                offset = torch.tensor([dy, dx], dtype=torch.float64) / reach
                hidden = relation.prior.hidden(offset).clamp(min=0)
                score += float(relation.prior.scores(hidden)[group])
            scores.append(score)
            values.append(float(other[channel]))
    weights = [math.exp(score) for score in scores]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(
    ("stride", "side", "prior"), [(1, 3, True), (2, 5, True), (1, 5, False), (2, 7, False)]
)
def test_layer_follows_the_formula(relation: str, stride: int, side: int, prior: bool) -> None:
    module = layer(stride, relation=relation, neighbourhood=side, geometric_prior=prior)
    images = random_images(2, 5, 4, 6).double()
    with torch.no_grad():
        found = module(images)
        assert found.shape == (2, math.ceil(5 / stride), math.ceil(4 / stride), 6)
        for b, y, x, c in ((0, 0, 0, 0), (0, 1, 1, 3), (1, found.shape[1] - 1, 1, 5)):
            expected = composed(module, images[b], y * stride, x * stride, c)
            assert float(found[b, y, x, c]) == pytest.approx(expected, abs=1e-9)


def test_weights_are_shared_by_the_channels_of_a_group_and_add_up_to_one() -> None:
    module, images = layer(neighbourhood=3), random_images(1, 4, 4, 6).double()
    with torch.no_grad():
        weights = module.weights(images)
        images[..., 1] = images[..., 0]
        found = module(images)
    assert weights.shape == (1, 4, 4, 3, 9)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 4, 4, 3, dtype=torch.float64))
    assert (weights[0, 0, 0, :, [0, 1, 2, 3, 6]] == 0).all()  # beyond the corner
    assert torch.equal(found[..., 0], found[..., 1])
    assert not torch.equal(found[..., 0], found[..., 2])


def test_without_appearance_and_prior_the_layer_is_the_mean_of_the_neighbourhood() -> None:
    module, images = layer(neighbourhood=3, geometric_prior=False), random_images(1, 6, 6, 6)
    torch.nn.init.zeros_(module.key.weight)
    found = module.float()(images)
    pooled = torch.nn.functional.avg_pool2d(
        images.movedim(-1, 1), 3, stride=1, padding=1, count_include_pad=False
    )
    assert torch.allclose(found, pooled.movedim(1, -1), atol=1e-6)


def test_a_pixel_sees_its_neighbourhood_only() -> None:
    module, images = layer(neighbourhood=7), random_images(1, 16, 16, 6).double()
    images.requires_grad_()
    module(images)[0, 8, 8].sum().backward()
    assert images.grad is not None
    seen = images.grad[0].abs().sum(-1) > 0
    assert seen[5:12, 5:12].all() and int(seen.sum()) == 49


def test_grids_halve_as_those_of_a_resnet() -> None:
    model = build_model(model_config("lr_net_mini"), (64, 48), classes=5).eval()
    assert isinstance(model, LRNet)
    assert model.forward_features(random_images(1, 3, 64, 48)).shape == (1, 4 * 3, 256)
    assert model(random_images(2, 3, 37, 29)).shape == (2, 5)  # any other size


def test_cost_counts_every_product() -> None:
    """Of one stage of one block, by hand: linear maps, one product per neighbour and channel, and
    the two layers of the prior for each of 49 offsets.
    """
    config: Any = model_config("lr_net_mini", width=8, depths=[1])
    stem = 32 * 32 * 3 * 8 + 16 * 16 * 8 + 32 * 32 * 8 + 16 * 16 * 49 * 8
    block = 8 * 8 * (8 * 8 + 8 + 8 + 49 * 8 + 8 * 16 + 8 * 16)
    prior = 49 * (2 * 32 + 32 * 1)
    assert cost(config, 32, 3, 10).macs == stem + block + 2 * prior + 16 * 10


def test_attention_methods_are_refused() -> None:
    model = build_model(model_config("lr_net_mini"), (32, 32), classes=5)
    with pytest.raises(CaptureError, match=r"neighbourhood.*model=vit_mini"):
        capture(model, random_images(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("changes", "words"), [({"neighbourhood": 6}, "odd"), ({"share": 5}, "divide")]
)
def test_impossible_setting_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_config("lr_net_mini", **changes)
