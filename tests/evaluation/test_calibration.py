"""Calibration against scikit-learn, SciPy and a plain loop over bins."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn import metrics as sklearn_metrics
from torch import Tensor

from vision.evaluation.calibration import (
    COLDEST,
    HOTTEST,
    confidence_bins,
    fit_temperature,
    halves,
    reliability,
    scale,
)
from vision.evaluation.metrics import score_images


def data(samples: int = 400, classes: int = 6, sharpness: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits from which labels are drawn, multiplied by `sharpness`: at 1 they are calibrated."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(samples, classes, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return sharpness * logits, labels


def plain_ece(logits: Tensor, labels: Tensor, bins: int) -> float:
    """The definition, bin by bin."""
    chances = logits.double().softmax(1).numpy()
    confidence, right = chances.max(1), chances.argmax(1) == labels.numpy()
    total = 0.0
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if inside.any():
            total += inside.sum() * abs(right[inside].mean() - confidence[inside].mean())
    return total / len(labels)


@pytest.mark.parametrize("bins", [1, 10, 15])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_measures_equal_scikit_learns_and_the_definition(bins: int, sharpness: float) -> None:
    logits, labels = data(sharpness=sharpness)
    chances = logits.double().softmax(1).numpy()
    found = reliability(score_images(logits, labels), bins)
    assert found.nll == pytest.approx(sklearn_metrics.log_loss(labels, chances), rel=1e-9)
    expected = sklearn_metrics.brier_score_loss(labels, chances, scale_by_half=False)
    assert found.brier == pytest.approx(expected, rel=1e-9)
    assert found.ece == pytest.approx(plain_ece(logits, labels, bins), abs=1e-12)
    assert sum(b.count for b in found.bins) == len(labels)


def test_temperature_divides_the_logits() -> None:
    logits, labels = data()
    scaled = reliability(score_images(logits, labels, 2.0), 15)
    assert scaled == reliability(score_images(logits / 2, labels), 15)


def test_bin_includes_its_upper_edge_and_empty_bins_have_no_accuracy() -> None:
    confidence = torch.tensor([0.2, 0.4, 0.41, 1.0], dtype=torch.float64)
    bins = confidence_bins(confidence, torch.tensor([True, False, True, True]), 5)
    assert [b.count for b in bins] == [1, 1, 1, 0, 1]
    assert [b.accuracy for b in bins] == [1.0, 0.0, 1.0, None, 1.0]


def test_perfectly_sure_and_right_answers_have_no_calibration_error() -> None:
    logits = 1000 * torch.eye(4)
    found = reliability(score_images(logits, torch.arange(4)), 15)
    assert (found.ece, found.brier, found.nll) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 3.0, 12.0])
def test_fitted_temperature_is_the_minimum_that_scipy_finds(sharpness: float) -> None:
    logits, labels = data(sharpness=sharpness)

    def nll(log_temperature: float) -> float:
        scaled = logits.double() / np.exp(log_temperature)
        return float(torch.nn.functional.cross_entropy(scaled, labels))

    best = minimize_scalar(nll, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(np.exp(best.x), rel=1e-4)
    assert found == pytest.approx(sharpness, rel=0.2)  # what the labels were drawn with


def test_temperature_stops_at_its_limits_where_more_would_always_be_better() -> None:
    right = torch.eye(5) + 1
    assert fit_temperature(right, torch.arange(5)) == COLDEST
    assert fit_temperature(right, (torch.arange(5) + 1) % 5) == HOTTEST


def test_halves_are_disjoint_complete_and_the_same_for_a_seed() -> None:
    first, second = halves(101, seed=4)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(101))
    assert abs(len(first) - len(second)) <= 1
    again = halves(101, seed=4)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    assert not torch.equal(first, halves(101, seed=5)[0])


def test_scaling_is_fitted_on_one_half_and_reported_on_the_other() -> None:
    logits, labels = data(sharpness=4.0)
    fit, judge = halves(len(labels), seed=1)
    found = scale(logits, labels, 15, seed=1)
    assert found is not None
    assert found.temperature == fit_temperature(logits[fit], labels[fit])
    assert found.before == reliability(score_images(logits[judge], labels[judge]), 15)
    assert found.after.nll < found.before.nll and found.after.ece < found.before.ece
    # What the other half's labels are cannot change the temperature.
    changed = labels.clone()
    changed[judge] = (changed[judge] + 1) % 6
    other = scale(logits, changed, 15, seed=1)
    assert other is not None and other.temperature == found.temperature


def test_scaling_of_one_image_or_of_infinite_logits_is_left_out() -> None:
    logits, labels = data()
    assert scale(logits[:1], labels[:1], 15, seed=0) is None
    logits[3, 2] = float("inf")
    assert scale(logits, labels, 15, seed=0) is None
