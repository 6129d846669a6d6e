"""Multi-label metrics against scikit-learn, with equal scores and unknown labels."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, log_loss
from torch import Tensor

from vision.evaluation.multi_label_metrics import (
    average_precisions,
    best_thresholds,
    compute_label_metrics,
    confident_label_mistakes,
    overall_metrics,
    sort_scores,
)


def answers(unknown: float, images: int = 150, classes: int = 6) -> tuple[Tensor, Tensor]:
    """Logits with many ties, and labels; no image has the last class."""
    random = np.random.default_rng(3)
    logits = torch.tensor(np.round(2 * random.normal(size=(images, classes))) / 2)
    shares = [0.3 * (1 - unknown), 0.7 * (1 - unknown), unknown]
    labels = torch.tensor(random.choice([1, 0, -1], p=shares, size=(images, classes)))
    labels[:, -1] = labels[:, -1].clamp(max=0)
    return logits, labels.to(torch.int8)


@pytest.mark.parametrize("unknown", [0.0, 0.25])
def test_average_precision_of_each_class_and_loss_equal_scikit_learns(unknown: float) -> None:
    logits, labels = answers(unknown)
    scores = sort_scores(logits, labels)
    expected = []
    for place in range(labels.shape[1] - 1):
        known = labels[:, place] >= 0
        expected.append(average_precision_score(labels[known, place] == 1, logits[known, place]))
    found = average_precisions(scores)
    np.testing.assert_allclose(found[:-1], expected, rtol=0, atol=1e-12)
    assert np.isnan(found[-1])
    metrics = overall_metrics(scores)
    assert metrics["map"] == pytest.approx(np.mean(expected), abs=1e-12)
    known = labels >= 0
    loss = log_loss((labels == 1)[known], logits.sigmoid()[known])
    assert metrics["loss"] == pytest.approx(loss, abs=1e-9)


def test_f1_of_all_three_kinds_equals_scikit_learns() -> None:
    logits, labels = answers(unknown=0.0)
    logits[:, -1] = -1  # neither present nor predicted: not a class of macro-F1
    labels[0] = 0
    logits[0] = -1  # an image with no class and no prediction is right
    truth, said = (labels == 1).numpy(), (logits >= 0).numpy()
    found = overall_metrics(sort_scores(logits, labels))
    with warnings.catch_warnings(action="ignore"):
        expected = {
            "micro_f1": f1_score(truth, said, average="micro"),
            "macro_f1": f1_score(truth[:, :-1], said[:, :-1], average="macro"),
            "sample_f1": f1_score(truth, said, average="samples", zero_division=1.0),
        }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-12), name


def test_f1_leaves_unknown_labels_out() -> None:
    logits, labels = answers(unknown=0.3)
    labels[4] = -1  # an image of which nothing is known
    known, found = labels >= 0, overall_metrics(sort_scores(logits, labels))
    truth, said = (labels == 1).numpy(), (logits >= 0).numpy()
    flat = f1_score(truth[known], said[known])
    rows = [
        f1_score(truth[i][known[i]], said[i][known[i]], zero_division=1.0)
        for i in range(len(labels))
        if known[i].any()
    ]
    assert found["micro_f1"] == pytest.approx(flat, abs=1e-12)
    assert found["sample_f1"] == pytest.approx(np.mean(rows), abs=1e-12)


def test_drawing_images_twice_equals_repeating_them() -> None:
    logits, labels = answers(unknown=0.2)
    times = np.random.default_rng(0).integers(0, 3, len(labels))
    repeated = np.repeat(np.arange(len(labels)), times)
    drawn = overall_metrics(sort_scores(logits, labels), times=times.astype(np.float64))
    expected = overall_metrics(sort_scores(logits[repeated], labels[repeated]))
    assert drawn == pytest.approx(expected, abs=1e-12)


def test_thresholds_maximise_the_f1_of_each_class() -> None:
    logits, labels = answers(unknown=0.2)
    found = best_thresholds(sort_scores(logits, labels))
    assert found[-1] == 0.5
    for place in range(labels.shape[1] - 1):
        known = labels[:, place] >= 0
        truth, chances = labels[known, place] == 1, logits.sigmoid()[known, place]
        best = max(f1_score(truth, chances >= cut) for cut in chances.unique())
        assert f1_score(truth, chances >= found[place]) == pytest.approx(best, abs=1e-12)
        assert (chances - found[place]).abs().min() > 1e-3  # between two scores


def test_report_has_intervals_and_the_threshold_of_each_class() -> None:
    logits, labels = answers(unknown=0.2)
    names = [f"c{i}" for i in range(6)]
    limits = [0.4] * 6
    found = compute_label_metrics(logits, labels, names, limits, resamples=20, seed=0)
    for name, (low, high) in found.intervals.items():
        assert low <= found.metrics[name] <= high, name
    row = found.classes[0]
    known = labels[:, 0] >= 0
    truth, said = labels[known, 0] == 1, logits.sigmoid()[known, 0] >= 0.4
    assert row.f1 == pytest.approx(f1_score(truth, said), abs=1e-12)
    assert (row.images, row.known, row.threshold) == (int(truth.sum()), int(known.sum()), 0.4)


def test_mistakes_name_the_class_that_the_model_was_most_wrong_about() -> None:
    logits = torch.tensor([[4.0, -1.0], [0.1, -5.0], [3.0, 3.0]])
    labels = torch.tensor([[1, 0], [0, 1], [1, -1]], dtype=torch.int8)
    (mistake,) = confident_label_mistakes(logits, labels, [0.5, 0.5], 5)
    assert (mistake.row, mistake.wrong, mistake.labels) == (1, 1, [1])
    assert [number for number, _ in mistake.predicted] == [0]
