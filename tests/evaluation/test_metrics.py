"""Metrics against scikit-learn, over any division into batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics
from torch import Tensor

from vision.evaluation.metrics import (
    add_batch,
    class_counts,
    class_metrics,
    confusion_counts,
    empty_sums,
    results,
)
from vision.evaluation.model_metrics import confused_pairs

CPU = torch.device("cpu")


def tally_of(logits: Tensor, labels: Tensor, valid: Tensor | None = None) -> Tensor:
    rows = torch.ones(len(labels), dtype=torch.bool) if valid is None else valid
    return add_batch(empty_sums(logits.shape[1], CPU), logits, labels, rows)


def data(samples: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that are right more often than by chance, and labels of uneven frequency."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(classes, generator=generator) + 0.05
    labels = torch.multinomial(weights, samples, replacement=True, generator=generator)
    logits = torch.randn(samples, classes, generator=generator)
    logits[torch.arange(samples), labels] += 1.5
    return logits, labels


def expected(logits: Tensor, labels: Tensor) -> dict[str, float]:
    classes = range(logits.shape[1])
    answers, actual = logits.numpy().argmax(1), labels.numpy()
    probabilities = logits.double().softmax(1).numpy()
    k = min(5, len(classes))
    # scikit-learn wants k below the number of classes; with all of them everything is right.
    top5 = (
        sklearn_metrics.top_k_accuracy_score(actual, logits.numpy(), k=k, labels=classes)
        if k < len(classes)
        else 1.0
    )
    return {
        "loss": sklearn_metrics.log_loss(actual, probabilities, labels=classes),
        "top1": sklearn_metrics.accuracy_score(actual, answers),
        "top5": float(top5),
        "balanced_accuracy": float(
            np.mean([np.mean(answers[actual == c] == c) for c in set(actual)])
        ),
        "macro_f1": sklearn_metrics.f1_score(actual, answers, average="macro"),
        "samples": len(labels),
    }


@pytest.mark.parametrize(
    ("samples", "classes"), [(500, 10), (300, 100), (64, 1000), (200, 5), (40, 6)]
)
def test_results_on_random_predictions_equal_scikit_learns(samples: int, classes: int) -> None:
    logits, labels = data(samples, classes)
    assert results(tally_of(logits, labels)) == pytest.approx(expected(logits, labels), rel=1e-6)


def test_balanced_accuracy_where_all_classes_occur_equals_scikit_learns() -> None:
    logits, labels = data(400, 6)
    found = results(tally_of(logits, labels))["balanced_accuracy"]
    answers = logits.argmax(1).numpy()
    assert found == pytest.approx(
        sklearn_metrics.balanced_accuracy_score(labels.numpy(), answers), rel=1e-12
    )


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_classes_that_do_not_occur_are_left_out_as_by_scikit_learn() -> None:
    logits, labels = data(300, 8)
    labels[labels >= 4] -= 4  # classes 4 to 7 are only predicted
    logits[:, 7] = -50.0  # and class 7 not even that
    found, answers = results(tally_of(logits, labels)), logits.argmax(1).numpy()
    assert set(answers) == set(range(7)) and set(labels.tolist()) == set(range(4))
    actual = labels.numpy()
    assert found["balanced_accuracy"] == pytest.approx(
        sklearn_metrics.balanced_accuracy_score(actual, answers)
    )
    assert found["macro_f1"] == pytest.approx(
        sklearn_metrics.f1_score(actual, answers, average="macro")
    )


@pytest.mark.parametrize("classes", [2, 3, 4, 5])
def test_five_or_fewer_classes_are_always_among_the_first_five(classes: int) -> None:
    found = results(tally_of(*data(100, classes)))
    assert found["top5"] == 1.0
    assert 0.3 < found["top1"] < 1.0


def test_equal_logits_are_ranked_by_their_number_as_in_argmax() -> None:
    labels = torch.arange(10)
    found = results(tally_of(torch.zeros(10, 10), labels))
    assert found["top1"] == 0.1  # class 0 alone
    assert found["top5"] == 0.5  # classes 0 to 4
    assert found["balanced_accuracy"] == 0.1
    assert found["loss"] == pytest.approx(np.log(10))


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 40))
def test_few_distinct_logits_give_the_top_k_of_a_stable_sort(
    seed: int, classes: int, samples: int
) -> None:
    random = np.random.default_rng(seed)
    logits = random.integers(0, 3, (samples, classes)).astype(np.float32)
    labels = random.integers(0, classes, samples)
    order = np.argsort(-logits, axis=1, kind="stable")
    found = results(tally_of(torch.from_numpy(logits), torch.from_numpy(labels)))
    assert found["top1"] == pytest.approx(np.mean(order[:, 0] == labels))
    assert found["top5"] == pytest.approx(np.mean((order[:, :5] == labels[:, None]).any(1)))
    assert found["top1"] == pytest.approx(np.mean(logits.argmax(1) == labels))


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_batches_of_any_size_give_the_same_results(batch_size: int) -> None:
    logits, labels = data(200, 12)
    tally = empty_sums(12, CPU)
    for first in range(0, 200, batch_size):
        part = slice(first, first + batch_size)
        rows = torch.ones(len(labels[part]), dtype=torch.bool)
        tally = add_batch(tally, logits[part], labels[part], rows)
    whole = tally_of(logits, labels)
    assert torch.equal(tally[1:], whole[1:])
    assert results(tally) == pytest.approx(results(whole), rel=1e-12)


@pytest.mark.parametrize("filling", [0.0, 1e9, float("nan"), float("inf")])
@pytest.mark.parametrize("label", [0, 3, -1])
def test_filling_rows_change_nothing_whatever_is_in_them(filling: float, label: int) -> None:
    logits, labels = data(50, 6)
    filled = torch.cat([logits, torch.full((8, 6), filling)])
    tally = tally_of(filled, torch.cat([labels, torch.full((8,), label)]), torch.arange(58) < 50)
    assert torch.equal(tally[1:], tally_of(logits, labels)[1:])
    assert results(tally) == pytest.approx(results(tally_of(logits, labels)), rel=1e-12)


def test_logits_that_are_not_numbers_are_never_right() -> None:
    found = results(tally_of(torch.full((4, 10), float("nan")), torch.tensor([0, 1, 2, 3])))
    assert found["top1"] == found["top5"] == found["balanced_accuracy"] == found["macro_f1"] == 0
    assert np.isnan(found["loss"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_16_bit_logits_is_summed_in_full_precision(dtype: torch.dtype) -> None:
    logits, labels = data(5000, 10)
    narrow = logits.to(dtype)
    exact = torch.nn.functional.cross_entropy(narrow.double(), labels).item()
    assert results(tally_of(narrow, labels))["loss"] == pytest.approx(exact, rel=1e-6)


def test_tally_of_nothing_has_no_results() -> None:
    with pytest.raises(ValueError, match="no images to evaluate"):
        results(empty_sums(10, CPU))
    filling = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(ValueError, match="no images to evaluate"):
        results(tally_of(torch.zeros(3, 10), torch.zeros(3, dtype=torch.long), filling))


def test_another_number_of_classes_is_refused() -> None:
    tally = tally_of(*data(5, 10))
    with pytest.raises(ValueError, match=r"7 logits, but the data has 10 classes"):
        add_batch(tally, *data(5, 7), torch.ones(5, dtype=torch.bool))


# Classes and confusion --------------------------------------------------------------------------


def answers(samples: int = 400, classes: int = 7) -> tuple[Tensor, Tensor]:
    logits, labels = data(samples, classes)
    return labels, logits.argmax(1)


def test_confusion_counts_equal_scikit_learns() -> None:
    labels, predicted = answers()
    found = np.zeros((9, 9), dtype=int)  # two classes that never occur
    counts = confusion_counts(labels, predicted, 9).numpy()
    found[counts[:, 0], counts[:, 1]] = counts[:, 2]
    expected = sklearn_metrics.confusion_matrix(labels, predicted, labels=range(9))
    assert np.array_equal(found, expected)
    assert len(counts) == np.count_nonzero(expected)


def test_metrics_of_classes_equal_scikit_learns() -> None:
    labels, predicted = answers()
    found = class_metrics(class_counts(confusion_counts(labels, predicted, 7), 7), "abcdefg")
    precision, recall, f1, support = sklearn_metrics.precision_recall_fscore_support(
        labels, predicted, labels=range(7)
    )
    assert [row.images for row in found] == support.tolist()
    assert [row.recall for row in found] == pytest.approx(recall.tolist())
    assert [row.precision for row in found] == pytest.approx(precision.tolist())
    assert [row.f1 for row in found] == pytest.approx(f1.tolist())


def test_class_without_images_or_answers_has_no_such_share() -> None:
    confusion = confusion_counts(torch.tensor([0, 0, 1]), torch.tensor([0, 2, 2]), 4)
    right, never_named, only_named, neither = class_metrics(class_counts(confusion, 4), "abcd")
    assert (right.recall, right.precision) == (0.5, 1.0)
    assert (never_named.recall, never_named.precision, never_named.f1) == (0.0, None, 0.0)
    assert (only_named.recall, only_named.precision, only_named.f1) == (None, 0.0, 0.0)
    assert (neither.recall, neither.precision, neither.f1) == (None, None, None)


def test_confused_pairs_are_the_most_frequent_mistakes_in_order() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    predicted = torch.tensor([1, 1, 0, 2, 1, 0, 0, 0, 1])
    confusion = confusion_counts(labels, predicted, 3)
    found = [(p.actual, p.predicted, p.images) for p in confused_pairs(confusion, "abc", 3)]
    assert found == [("c", "a", 3), ("a", "b", 2), ("b", "c", 1)]
    assert confused_pairs(confusion_counts(labels, labels, 3), "abc", 5) == []
