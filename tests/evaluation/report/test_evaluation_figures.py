"""The figures of an evaluation show the counts that scikit-learn counts."""

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from sklearn import metrics as sklearn_metrics

from vision.evaluation.model_metrics import ModelMetrics, compute_metrics
from vision.evaluation.report.evaluation_figures import LISTED, READABLE, calibration, confusion


def made_up(classes: int) -> tuple[ModelMetrics, list[int], list[int]]:
    """Metrics of made-up logits, the labels and the predictions; one name is not plain text."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(6 * classes) % classes
    logits = torch.randn(len(labels), classes, generator=generator)
    logits[torch.arange(len(labels)), labels] += 2
    names = ("$x_1$ and \x1b[31m red, much longer than there is space", *map(str, range(1, 999)))
    found = compute_metrics(logits, labels, names[:classes], bins=10, resamples=0, seed=0)
    return found, labels.tolist(), logits.argmax(1).tolist()


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("classes", [2, 7])
def test_matrix_of_few_classes_has_every_count(classes: int) -> None:
    results, labels, predicted = made_up(classes)
    drawing = confusion("a run", results)
    expected = sklearn_metrics.confusion_matrix(labels, predicted)
    assert np.array_equal(drawing.numbers["counts"], expected)
    axes = drawing.figure.axes[0]
    assert texts(axes) == [str(count) for count in expected.ravel() if count]
    assert [label.get_text() for label in axes.get_yticklabels()][1:] == list(
        map(str, range(1, classes))
    )
    assert drawing.encoded("png").startswith(b"\x89PNG")


def test_of_too_many_classes_the_most_confused_are_listed() -> None:
    results, labels, predicted = made_up(READABLE + 1)
    drawing = confusion("a run", results)
    counts = sklearn_metrics.confusion_matrix(labels, predicted)
    np.fill_diagonal(counts, 0)
    largest = np.sort(counts.ravel())[::-1][:LISTED]
    assert drawing.numbers["images"].tolist() == largest.tolist()
    assert texts(drawing.figure.axes[0]) == [f"{count} of 6" for count in largest]
    assert drawing.encoded("png").startswith(b"\x89PNG")


def test_model_without_mistakes_is_drawn() -> None:
    labels = torch.arange(2 * READABLE)
    logits = 9 * torch.eye(2 * READABLE)
    names = [str(label) for label in labels.tolist()]
    results = compute_metrics(logits, labels, names, bins=10, resamples=0, seed=0)
    assert confusion("a run", results).encoded("png").startswith(b"\x89PNG")


def test_reliability_diagram_has_the_mean_of_every_bin() -> None:
    results, _, _ = made_up(7)
    drawing = calibration("a run", results)
    bins = [b for b in results.calibration.all.bins if b.count]
    (_, line) = drawing.figure.axes[0].lines
    assert line.get_xdata().tolist() == [b.confidence for b in bins]
    assert line.get_ydata().tolist() == [b.accuracy for b in bins]
    bars = [int(bar.get_height()) for bar in drawing.figure.axes[1].patches]
    assert bars == [b.count for b in results.calibration.all.bins]
