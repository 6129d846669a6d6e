"""The training loss against timm's and torch's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.loss
import torch
import torch.nn.functional as F
from small_runs import folder_of_images, words
from torchvision.ops import sigmoid_focal_loss

from vision.cli.composition import compose
from vision.config import ConfigError, parse
from vision.data.images.mixing import Mix, soft_targets
from vision.training.configs import TrainConfig
from vision.training.loop import train
from vision.training.tasks.classification import ClassBalance, check_loss, class_balance
from vision.training.tasks.classification import training_loss as balanced_loss
from vision.training.tasks.configs import LossConfig


def loss_config(**settings: Any) -> LossConfig:
    """Plain cross-entropy, with some settings changed."""
    plain = {
        "kind": "cross_entropy",
        "bce_threshold": None,
        "focal_gamma": 2.0,
        "class_weights": "none",
        "effective_beta": 0.999,
        "logit_adjustment": 0.0,
    }
    return parse(LossConfig, plain | settings)


def training_loss(
    logits: torch.Tensor, targets: torch.Tensor, config: LossConfig, counts: Any = None
) -> torch.Tensor:
    """The loss of a run whose classes have these numbers of training images."""
    balance = ClassBalance()
    if counts is not None:
        labels, names = np.repeat(np.arange(len(counts)), counts), tuple(map(str, counts))
        balance = class_balance(config, labels, names, "uniform", torch.device("cpu"))
    return balanced_loss(logits, targets, config, balance)


CROSS_ENTROPY = loss_config()
BCE = loss_config(kind="bce")
FOCAL = loss_config(kind="focal")
COUNTS = (50, 1, 2, 8, 20, 100, 3)


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
    config = loss_config(kind="bce", bce_threshold=threshold)
    loss = training_loss(logits, targets, config)
    reference: Any = timm.loss.BinaryCrossEntropy(smoothing=0, target_threshold=threshold)
    expected = reference(logits, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits))


def test_bce_of_mixed_labels_with_threshold_counts_both_fully() -> None:
    logits, labels = batch()
    targets = soft_targets(labels, 7, Mix(0.9), 0.0)
    loss = training_loss(logits, targets, loss_config(kind="bce", bce_threshold=0.0))
    both = F.one_hot(labels, 7) + F.one_hot(labels.flip(0), 7)
    expected = F.binary_cross_entropy(logits.sigmoid(), both.clamp(max=1).float())
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("config", [CROSS_ENTROPY, BCE, FOCAL], ids=lambda config: config.kind)
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
    deit3 = loss_config(kind="bce", bce_threshold=0.0)
    check_loss(deit3, 0.0, 1000)
    with pytest.raises(ConfigError, match="so that all would count as 1"):
        check_loss(deit3, 0.1, 1000)
    with pytest.raises(ConfigError, match="so that none would count as 1"):
        check_loss(loss_config(kind="bce", bce_threshold=0.95), 0.1, 1000)
    check_loss(loss_config(kind="bce", bce_threshold=0.2), 0.1, 1000)


def test_threshold_without_bce_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bce_threshold = 0.2, but loss.kind = cross_entropy"):
        check_loss(loss_config(kind="cross_entropy", bce_threshold=0.2), 0.0, 10)


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("kind", ["balanced", "effective", [3.0, 1, 0, 1, 2, 1, 0.5]])
def test_weighted_cross_entropy_equals_torchs(kind: Any, share: float) -> None:
    logits, labels = batch()
    targets = soft_targets(labels, 7, Mix(share), 0.1)
    config = loss_config(class_weights=kind)
    loss = training_loss(logits, targets, config, COUNTS)
    counts = np.array(COUNTS, dtype=np.float64)
    weights = {
        "balanced": counts.sum() / (7 * counts),  # scikit-learn's "balanced"
        "effective": 1 / np.array([sum(0.999**i for i in range(n)) for n in COUNTS]),
    }.get(str(kind), np.array(kind) if isinstance(kind, list) else None)
    weights = weights / (weights @ counts) * counts.sum()
    expected = F.cross_entropy(logits, targets, torch.tensor(weights, dtype=torch.float32))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits))


def test_balanced_weights_equal_scikit_learns() -> None:
    utils = pytest.importorskip("sklearn.utils.class_weight")
    labels = np.repeat(np.arange(7), COUNTS)
    expected = utils.compute_class_weight("balanced", classes=np.arange(7), y=labels)
    config = loss_config(class_weights="balanced")
    found = class_balance(config, labels, tuple("abcdefg"), "uniform", torch.device("cpu")).weights
    assert found is not None
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["cross_entropy", "bce", "focal"])
def test_weighted_loss_is_the_mean_of_its_parts(kind: str) -> None:
    logits, labels = batch()
    targets = soft_targets(labels, 7, Mix(0.6), 0.1)
    config = loss_config(kind=kind, class_weights="balanced")
    whole = training_loss(logits, targets, config, COUNTS)
    parts = [
        training_loss(part, wanted, config, COUNTS)
        for part, wanted in zip(logits.split(3), targets.split(3), strict=True)
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)


def test_weighted_bce_weighs_images_by_their_class() -> None:
    logits, labels = batch()
    targets = soft_targets(labels, 7, Mix(), 0.0)
    config = loss_config(kind="bce", class_weights=[1, 2, 3, 4, 5, 6, 7])
    counts = np.array(COUNTS)
    weights = torch.arange(1, 8) / float(np.arange(1, 8) @ counts / counts.sum())
    by_image = F.binary_cross_entropy(logits.sigmoid(), targets, reduction="none").mean(1)
    loss = training_loss(logits, targets, config, COUNTS)
    torch.testing.assert_close(loss, (by_image * weights[labels]).mean())


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_of_two_classes_equals_torchvisions(gamma: float) -> None:
    logits, labels = batch()
    logits, labels = logits[:, :2], labels % 2
    config = loss_config(kind="focal", focal_gamma=gamma)
    loss = training_loss(logits, labels, config)
    margin = logits[:, 1] - logits[:, 0]  # of a sigmoid that gives the softmax's probabilities
    expected = sigmoid_focal_loss(margin, labels.float(), alpha=-1, gamma=gamma, reduction="mean")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits))


def test_focal_loss_without_gamma_is_cross_entropy() -> None:
    logits, labels = batch()
    targets = soft_targets(labels, 7, Mix(0.3), 0.1)
    config = loss_config(kind="focal", focal_gamma=0.0, class_weights="effective")
    plain = loss_config(class_weights="effective")
    loss, expected = (training_loss(logits, targets, c, COUNTS) for c in (config, plain))
    torch.testing.assert_close(loss, expected)


def test_focal_loss_of_certain_images_has_a_finite_gradient() -> None:
    logits = torch.tensor([[300.0, -300.0], [-300.0, 300.0]], requires_grad=True)
    config = loss_config(kind="focal", focal_gamma=0.5)
    loss = training_loss(logits, torch.tensor([0, 0]), config)
    assert loss.isfinite()
    assert gradient(loss, logits).isfinite().all()


@pytest.mark.parametrize("kind", ["cross_entropy", "focal"])
def test_logit_adjustment_adds_the_logarithms_of_the_shares(kind: str) -> None:
    logits, labels = batch()
    adjusted = training_loss(logits, labels, loss_config(kind=kind, logit_adjustment=1.5), COUNTS)
    shares = torch.tensor(COUNTS) / sum(COUNTS)
    expected = training_loss(logits + 1.5 * shares.log(), labels, loss_config(kind=kind))
    torch.testing.assert_close(adjusted, expected)


def test_logit_adjustment_has_the_shares_of_the_sampler() -> None:
    labels, names, cpu = np.repeat(np.arange(7), COUNTS), tuple("abcdefg"), torch.device("cpu")
    config = loss_config(logit_adjustment=1.0)
    shift = class_balance(config, labels, names, "balanced", cpu).shift
    assert shift is not None
    torch.testing.assert_close(shift.exp(), torch.full((7,), 1 / 7))


def test_a_class_without_images_has_no_weight() -> None:
    labels, cpu = np.array([0, 0, 0, 2]), torch.device("cpu")
    for kind in ("balanced", "effective", [1, 1, 1]):
        config = loss_config(class_weights=kind)
        weights = class_balance(config, labels, ("a", "b", "c"), "uniform", cpu).weights
        assert weights is not None
        assert weights[1] == 0
        assert float(weights[torch.from_numpy(labels)].mean()) == pytest.approx(1)
    with pytest.raises(ConfigError, match=r"logit_adjustment = 1: the class 'b' has no training"):
        class_balance(loss_config(logit_adjustment=1), labels, ("a", "b", "c"), "uniform", cpu)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"class_weights": [1, 2]}, r"class_weights has 2 numbers, but the data has 3 classes"),
        ({"class_weights": [0, 1, 0]}, r"every class with training images has the weight 0"),
        ({"class_weights": [0, 0, 0]}, r"expected at least one weight above 0"),
        ({"class_weights": [1, -1, 1]}, r"class_weights"),
        ({"class_weights": "inverse"}, r"class_weights"),
        ({"effective_beta": 1.0}, r"effective_beta"),
        ({"focal_gamma": -1}, r"focal_gamma"),
        ({"logit_adjustment": -1}, r"logit_adjustment"),
        ({"logit_adjustment": 1, "kind": "bce"}, r"logit_adjustment = 1 shifts .* kind=cross"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    labels = np.array([0, 0, 2])
    with pytest.raises(ConfigError, match=message):
        class_balance(loss_config(**settings), labels, tuple("abc"), "uniform", torch.device("cpu"))


def test_single_class_is_refused_with_the_folder_that_is_meant(tmp_path: Path) -> None:
    images = folder_of_images(tmp_path / "photos" / "all", 4)
    data = ["data=folder", f"data.root={images.parent}", "data.val_fraction=0.5"]
    config = parse(TrainConfig, compose("train", words(tmp_path / "out", *data, shapes=False))[0])
    with pytest.raises(ConfigError, match=f"data.root={images}"):
        train(config)
    assert not (tmp_path / "out" / "run").exists()
