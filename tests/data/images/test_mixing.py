"""Mixup, CutMix and their targets against timm's for the same draw, and against closed forms."""

import numpy as np
import pytest
import torch
from augment_settings import augment
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data import Mixup
from timm.data import mixup as timm_source

from vision.data.images.mixing import Mix, cut_box, draw_mix, mix_batch, mix_images, soft_targets

CLASSES = 7


def batch(samples: int = 6, height: int = 20, width: int = 28) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, height, width, generator=source)
    return images, torch.randint(0, CLASSES, (samples,), generator=source)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.75])
def test_mixup_equals_timm_for_the_same_share(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, share: float
) -> None:
    images, labels = batch()
    theirs = Mixup(mixup_alpha=1.0, label_smoothing=smoothing, num_classes=CLASSES)
    monkeypatch.setattr(theirs, "_params_per_batch", lambda: (share, False))
    expected, targets = theirs(images.clone(), labels)
    assert torch.allclose(mix_images(images, Mix(share)), expected, atol=1e-6)
    ours = soft_targets(labels, CLASSES, Mix(share), smoothing)
    assert torch.allclose(ours, targets.to(ours), atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_cutmix_equals_timm_for_the_same_box(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    images, labels = batch()
    share = np.random.default_rng(seed).random()
    mix = cut_box(share, (20, 28), np.random.default_rng(seed))
    assert mix.box is not None
    # timm draws the same centre from what it takes for NumPy's global generator.
    source = np.random.default_rng(seed)
    monkeypatch.setattr(
        timm_source.np.random, "randint", lambda low, high, size=None: source.integers(low, high)
    )
    theirs = Mixup(mixup_alpha=0.0, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    monkeypatch.setattr(theirs, "_params_per_batch", lambda: (share, True))
    expected, targets = theirs(images.clone(), labels)
    assert torch.equal(mix_images(images, mix), expected)
    ours = soft_targets(labels, CLASSES, mix, 0.1)
    assert torch.allclose(ours, targets.to(ours), atol=1e-6)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1000),
    samples=st.integers(1, 7),
    mixup=st.sampled_from([0.0, 0.2, 1.0]),
    cutmix=st.sampled_from([0.0, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_targets_sum_to_one_and_tell_the_share_of_pixels(
    seed: int, samples: int, mixup: float, cutmix: float, smoothing: float
) -> None:
    config = augment("inception", mixup=mixup, cutmix=cutmix, label_smoothing=smoothing)
    labels = torch.arange(samples)
    # An image consists of its own label only, so that the mean of a channel counts pixels.
    images = torch.eye(samples)[:, :, None, None].expand(-1, -1, 9, 11).clone()
    mixed, targets = mix_batch(images, labels, samples, config, seed=seed, step=3)
    assert torch.allclose(targets.sum(1), torch.ones(samples), atol=1e-5)
    assert targets.min() >= 0
    pixels = mixed.mean(dim=(2, 3))
    assert torch.allclose(targets, pixels * (1 - smoothing) + smoothing / samples, atol=1e-5)


def test_decisions_have_the_configured_probabilities() -> None:
    config = augment("inception", mixup=0.8, cutmix=1.0, mix=0.6, cutmix_share=0.25)
    random = np.random.default_rng(0)
    drawn = [draw_mix(config, (32, 32), random) for _ in range(6000)]
    cut = sum(mix.box is not None for mix in drawn) / 6000
    plain = sum(mix == Mix() for mix in drawn) / 6000
    assert cut == pytest.approx(0.15, abs=0.02)
    assert plain == pytest.approx(0.4, abs=0.02)
    shares = np.array([mix.share for mix in drawn if mix.box is None and mix != Mix()])
    # Variance of Beta(α, α): 1 / (4 (2 α + 1)).
    assert shares.mean() == pytest.approx(0.5, abs=0.02)
    assert shares.var() == pytest.approx(1 / (4 * 2.6), abs=0.006)


def test_mixing_is_a_function_of_seed_step_rank_and_part() -> None:
    config = augment("deit")
    images, labels = batch()
    first = mix_batch(images, labels, CLASSES, config, seed=1, step=2, rank=0)
    again = mix_batch(images, labels, CLASSES, config, seed=1, step=2, rank=0)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    keys = [(2, 2, 0, 0), (1, 3, 0, 0), (1, 2, 1, 0), (1, 2, 0, 1)]
    for seed, step, rank, part in keys:
        other = mix_batch(
            images, labels, CLASSES, config, seed=seed, step=step, rank=rank, part=part
        )
        assert not torch.equal(other[0], first[0])


def test_without_mixing_images_are_untouched_and_targets_smoothed() -> None:
    images, labels = batch()
    config = augment("inception", label_smoothing=0.2)
    same, targets = mix_batch(images, labels, CLASSES, config, seed=0, step=0)
    assert same is images
    expected = torch.nn.functional.one_hot(labels, CLASSES) * 0.8 + 0.2 / CLASSES
    assert torch.allclose(targets, expected)
