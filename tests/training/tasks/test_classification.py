"""The training loss against timm's and torch's own."""

from pathlib import Path
from typing import Any

import pytest
import timm.loss
import torch
import torch.nn.functional as F
from small_runs import folder_of_images, words

from vision.cli.composition import compose
from vision.config import ConfigError, parse
from vision.data.images.mixing import Mix, soft_targets
from vision.training.configs import TrainConfig
from vision.training.loop import train
from vision.training.tasks.classification import check_loss, training_loss
from vision.training.tasks.configs import LossConfig

CROSS_ENTROPY = LossConfig(kind="cross_entropy", bce_threshold=None)
BCE = LossConfig(kind="bce", bce_threshold=None)


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(12, 7, generator=generator)
    return logits.to(dtype).requires_grad_(), torch.randint(7, (12,), generator=generator)


def gradient(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_cross_entropy_of_soft_targets_equals_timms(share: float, smoothing: float) -> None:
    logits, labels = batch()
    targets = soft_targets(labels, 7, Mix(share), smoothing)
    loss = training_loss(logits, targets, CROSS_ENTROPY)
    expected = timm.loss.SoftTargetCrossEntropy()(logits, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits))


def test_cross_entropy_of_smoothed_labels_equals_torchs() -> None:
    logits, labels = batch()
    loss = training_loss(logits, soft_targets(labels, 7, Mix(), 0.1), CROSS_ENTROPY)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, label_smoothing=0.1))


@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
def test_bce_of_soft_targets_equals_timms(threshold: float | None) -> None:
    logits, labels = batch()
    targets = soft_targets(labels, 7, Mix(0.7), 0.0)
    config = LossConfig(kind="bce", bce_threshold=threshold)
    loss = training_loss(logits, targets, config)
    reference: Any = timm.loss.BinaryCrossEntropy(smoothing=0, target_threshold=threshold)
    expected = reference(logits, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits))


def test_bce_of_mixed_labels_with_threshold_counts_both_fully() -> None:
    logits, labels = batch()
    targets = soft_targets(labels, 7, Mix(0.9), 0.0)
    loss = training_loss(logits, targets, LossConfig(kind="bce", bce_threshold=0.0))
    both = F.one_hot(labels, 7) + F.one_hot(labels.flip(0), 7)
    expected = F.binary_cross_entropy(logits.sigmoid(), both.clamp(max=1).float())
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("config", [CROSS_ENTROPY, BCE], ids=["cross_entropy", "bce"])
def test_loss_of_labels_equals_that_of_their_probabilities(config: LossConfig) -> None:
    logits, labels = batch()
    targets = soft_targets(labels, 7, Mix(), 0.0)
    torch.testing.assert_close(
        training_loss(logits, labels, config), training_loss(logits, targets, config)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [CROSS_ENTROPY, BCE], ids=["cross_entropy", "bce"])
@pytest.mark.parametrize("autocast", [True, False])
def test_loss_of_16_bit_logits_is_computed_in_full_precision(
    config: LossConfig, dtype: torch.dtype, autocast: bool
) -> None:
    logits, labels = batch(dtype)
    targets = soft_targets(labels, 7, Mix(0.4), 0.1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = training_loss(logits, targets, config)
    assert loss.dtype == torch.float32
    exact, wanted = logits.detach().double(), targets.double()
    expected = (
        -(wanted * exact.log_softmax(1)).sum(1).mean()
        if config.kind == "cross_entropy"
        else F.binary_cross_entropy(exact.sigmoid(), wanted)
    )
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-6, atol=0)


def test_threshold_that_makes_every_class_right_is_refused() -> None:
    deit3 = LossConfig(kind="bce", bce_threshold=0.0)
    check_loss(deit3, 0.0, 1000)
    with pytest.raises(ConfigError, match="so that all would count as 1"):
        check_loss(deit3, 0.1, 1000)
    with pytest.raises(ConfigError, match="so that none would count as 1"):
        check_loss(LossConfig(kind="bce", bce_threshold=0.95), 0.1, 1000)
    check_loss(LossConfig(kind="bce", bce_threshold=0.2), 0.1, 1000)


def test_threshold_without_bce_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bce_threshold = 0.2, but loss.kind = cross_entropy"):
        check_loss(LossConfig(kind="cross_entropy", bce_threshold=0.2), 0.0, 10)


def test_single_class_is_refused_with_the_folder_that_is_meant(tmp_path: Path) -> None:
    images = folder_of_images(tmp_path / "photos" / "all", 4)
    data = ["data=folder", f"data.root={images.parent}", "data.val_fraction=0.5"]
    config = parse(TrainConfig, compose("train", words(tmp_path / "out", *data, shapes=False))[0])
    with pytest.raises(ConfigError, match=f"data.root={images}"):
        train(config, "x")
    assert not (tmp_path / "out" / "run").exists()
