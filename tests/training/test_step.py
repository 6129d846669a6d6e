"""Gradient clipping against timm's."""

from typing import Any, Literal

import pytest
import torch
from timm.utils import dispatch_clip_grad
from torch import nn

from vision.training.step import clip_gradients

Clip = Literal["none", "norm", "value", "agc"]


def network() -> nn.Sequential:
    """Small, with gradients of very different sizes and a frozen layer."""
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 5))
    layers[2].weight.requires_grad_(False)
    loss = 30 * layers(torch.randn(8, 3, 4, 4)).square().sum()
    loss.backward()
    return layers


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(("clip", "at"), [("norm", 1.0), ("value", 0.5), ("agc", 0.01)])
def test_clipping_equals_timms(clip: Clip, at: float) -> None:
    ours, theirs = network(), network()
    before = gradients(ours)
    clip_gradients(ours.parameters(), clip, at)
    dispatch_clip_grad(theirs.parameters(), at, mode=clip)
    for own, other, old in zip(gradients(ours), gradients(theirs), before, strict=True):
        if old is not None:
            torch.testing.assert_close(own, other, rtol=1e-6, atol=0)
            assert not torch.equal(own, old)


@pytest.mark.parametrize(("clip", "at"), [("norm", 1e9), ("value", 1e9), ("agc", 1e9)])
def test_clipping_of_gradients_within_bounds_changes_nothing(clip: Clip, at: float) -> None:
    model = network()
    before = gradients(model)
    clip_gradients(model.parameters(), clip, at)
    for new, old in zip(gradients(model), before, strict=True):
        assert new is old is None or torch.equal(new, old)


def test_agc_leaves_the_head_alone() -> None:
    model = network()
    before = gradients(model)
    clip_gradients(model.parameters(), "agc", 0.01, head=model[3].parameters())
    after = gradients(model)
    assert torch.equal(after[-1], before[-1]) and torch.equal(after[-2], before[-2])
    assert not torch.equal(after[0], before[0])


def test_clipping_of_a_list_generated_once_reaches_every_gradient() -> None:
    model = network()
    clip_gradients((p for p in model.parameters()), "norm", 1.0)
    norm = torch.cat([g.flatten() for g in gradients(model) if g is not None]).norm()
    assert norm.item() == pytest.approx(1.0, rel=1e-4)
