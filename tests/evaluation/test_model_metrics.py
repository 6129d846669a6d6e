"""The bootstrap against closed forms, SciPy and scikit-learn."""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sklearn_metrics
from torch import Tensor

from vision.evaluation.metrics import score_images
from vision.evaluation.model_metrics import (
    ModelMetrics,
    compare,
    compute_metrics,
    difference,
    interval,
    resample,
)


def data(samples: int, classes: int, gain: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)  # the same labels for every model
    labels = torch.randint(0, classes, (samples,), generator=generator)
    logits = torch.randn(samples, classes, generator=torch.Generator().manual_seed(seed + 1))
    logits[torch.arange(samples), labels] += gain
    return logits, labels


def measure(logits: Tensor, labels: Tensor, resamples: int) -> ModelMetrics:
    names = [str(number) for number in range(logits.shape[1])]
    return compute_metrics(logits, labels, names, bins=15, resamples=resamples, seed=0)


def test_means_of_what_images_add_equal_scikit_learns() -> None:
    logits, labels = data(300, 9, 1.0)
    scores = score_images(logits, labels)
    values = {name: getattr(scores, name).mean() for name in ("top1", "top5", "loss", "brier")}
    chances = logits.double().softmax(1).numpy()
    assert values["top1"] == sklearn_metrics.accuracy_score(labels, chances.argmax(1))
    assert values["top5"] == pytest.approx(
        sklearn_metrics.top_k_accuracy_score(labels, chances, k=5)
    )
    assert values["loss"] == pytest.approx(sklearn_metrics.log_loss(labels, chances))
    assert values["brier"] == pytest.approx(
        sklearn_metrics.brier_score_loss(labels, chances, scale_by_half=False)
    )


def test_interval_of_an_accuracy_is_that_of_the_binomial_distribution() -> None:
    logits, labels = data(500, 10, 1.5)
    values = score_images(logits, labels)
    low, high = interval(resample(values, labels.numpy(), 4000, seed=0)["top1"])
    share = values.top1.mean()
    exact = stats.binom(500, share).ppf([0.025, 0.975]) / 500
    assert (low, high) == pytest.approx(exact, abs=0.006)


def test_interval_of_a_loss_is_the_one_that_scipy_finds() -> None:
    logits, labels = data(300, 10, 1.5)
    values = score_images(logits, labels)
    found = interval(resample(values, labels.numpy(), 4000, seed=0)["loss"])
    expected = stats.bootstrap(
        (values.loss,), np.mean, n_resamples=4000, method="percentile", rng=1
    ).confidence_interval
    width = expected.high - expected.low
    assert found == pytest.approx((expected.low, expected.high), abs=0.06 * width)


def test_balanced_accuracy_of_a_draw_is_that_of_the_drawn_images() -> None:
    logits, labels = data(60, 4, 1.0)
    values = score_images(logits, labels)
    found = resample(values, labels.numpy(), 5, seed=7)["balanced_accuracy"]
    random = np.random.default_rng([7, 60])
    for value in found:
        drawn = random.integers(60, size=60)
        own, answers = labels.numpy()[drawn], logits.argmax(1).numpy()[drawn]
        assert value == pytest.approx(sklearn_metrics.balanced_accuracy_score(own, answers))


def test_model_compared_with_itself_is_undecided_and_equal() -> None:
    logits, labels = data(200, 10, 1.0)
    measured = measure(logits, labels, 200)
    for found in compare(measured, measured).values():
        assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)
        assert found.better == 0.5 and not found.decided


def test_model_that_is_better_on_the_same_images_is_found_better() -> None:
    labels = data(400, 10, 1.0)[1]
    weak = measure(data(400, 10, 1.0)[0], labels, 500)
    strong = measure(data(400, 10, 2.5, seed=1)[0], labels, 500)
    found = compare(strong, weak)
    assert found["top1"].low > 0 and found["loss"].high < 0
    assert all(found[name].decided and found[name].better == 1.0 for name in ("top1", "loss"))
    back = compare(weak, strong)
    assert back["top1"].value == -found["top1"].value and back["top1"].better == 0.0


def test_paired_interval_is_narrower_than_that_of_independent_draws() -> None:
    logits, labels = data(400, 10, 1.5)
    near = logits.clone()
    near[:10, 0] += 3  # only a few images can change
    first = resample(score_images(logits, labels), labels.numpy(), 1000, seed=0)["loss"]
    second = resample(score_images(near, labels), labels.numpy(), 1000, seed=0)["loss"]
    other = resample(score_images(near, labels), labels.numpy(), 1000, seed=1)["loss"]
    paired = difference("loss", (0.0, second), (0.0, first))
    apart = difference("loss", (0.0, other), (0.0, first))
    assert paired.high - paired.low < 0.3 * (apart.high - apart.low)


def test_draws_depend_on_the_seed_alone() -> None:
    logits, labels = data(100, 5, 1.0)
    values = score_images(logits, labels)
    first = resample(values, labels.numpy(), 20, seed=3)
    again = resample(values, labels.numpy(), 20, seed=3)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["loss"], resample(values, labels.numpy(), 20, seed=4)["loss"])
