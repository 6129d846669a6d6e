"""Metrics as sums and counts: one flat tensor on the device, merged by addition.

Batches, workers and processes may divide an evaluation in any way; the sums stay the same.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LOSS, COUNT, TOP1, TOP5 = range(4)
"""Places of the sums that are not by class; after them three numbers for every class."""


@dataclass(frozen=True)
class Tally:
    """What has been counted so far."""

    sums: Tensor
    """Loss, images, right at once, right among five; then for every class the right answers, the
    answers that named it, and the images that show it. To add up ranks, sum this tensor."""
    classes: int


def empty_tally(classes: int, device: torch.device) -> Tally:
    """Nothing counted yet. Sums are in double precision wherever the device knows it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return Tally(torch.zeros(4 + 3 * classes, dtype=dtype, device=device), classes)


@torch.no_grad()
def update(tally: Tally, logits: Tensor, labels: Tensor, valid: Tensor) -> Tally:
    """The tally with a batch added: logits (n, classes), labels (n,), and which rows count (n,).

    An image's rank is the number of classes that the model puts before the right one. Of equal
    logits the first one wins, as in argmax; a logit that is not a number is never right.
    """
    if logits.shape[1] != tally.classes:
        raise ValueError(
            f"the model gives {logits.shape[1]} logits, but the data has {tally.classes} classes."
        )
    logits = logits.float()
    labels = labels.where(valid, 0)
    number = torch.arange(tally.classes, device=logits.device)
    own = logits.gather(1, labels[:, None])
    behind = (logits < own) | ((logits == own) & (number > labels[:, None]))
    rank = tally.classes - 1 - behind.sum(1)
    right = valid & (rank == 0)
    actual = (labels[:, None] == number) & valid[:, None]
    predicted = (logits.argmax(1, keepdim=True) == number) & valid[:, None]
    loss = F.cross_entropy(logits, labels, reduction="none")

    def total(values: Tensor) -> Tensor:
        return values.sum(0, dtype=tally.sums.dtype)

    overall = torch.stack(
        [
            total(loss.where(valid, 0.0)),
            total(valid),
            total(right),
            total(valid & (rank < 5)),
        ]
    )
    by_class = [total(actual & right[:, None]), total(predicted), total(actual)]
    return Tally(tally.sums + torch.cat([overall, *by_class]), tally.classes)


def merge(first: Tally, second: Tally) -> Tally:
    """Both together."""
    if first.classes != second.classes:
        raise ValueError(
            f"tallies of {first.classes} and of {second.classes} classes cannot be merged."
        )
    return Tally(first.sums + second.sums, first.classes)


def results(tally: Tally) -> dict[str, float]:
    """The metrics, as shares of 1; the loss is the mean cross-entropy.

    Balanced accuracy is the mean recall of the classes that occur; macro-F1 the mean F1 of those
    that occur or were predicted. A class that is in neither says nothing about a model.
    """
    sums = tally.sums.cpu().double()
    overall, by_class = sums[:4].tolist(), sums[4:].view(3, tally.classes)
    count = overall[COUNT]
    if not count:
        raise ValueError("there is no image to evaluate: none was given, or none could be read.")
    right, predicted, actual = by_class
    occurs, named = actual > 0, predicted + actual > 0
    recall = right[occurs] / actual[occurs]
    f1 = 2 * right[named] / (predicted + actual)[named]
    return {
        "loss": overall[LOSS] / count,
        "top1": overall[TOP1] / count,
        "top5": overall[TOP5] / count,
        "balanced_accuracy": float(recall.mean()),
        "macro_f1": float(f1.mean()),
        "samples": count,
    }


def confusion_counts(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """(actual, predicted, images) of every pair of classes that occurs: int64 (pairs, 3).

    The whole matrix of 20,000 classes would take gigabytes; no more of it is filled than there are
    images.
    """
    pairs, counts = (labels * classes + predicted).unique(return_counts=True)
    return torch.stack([pairs // classes, pairs % classes, counts], dim=1)


class ClassMetrics(NamedTuple):
    """How well one class is recognised; None where there is nothing to divide by."""

    images: int
    predicted: int
    """Images that were taken for this class, rightly or not."""
    recall: float | None
    """Of its images, the share that was recognised: the accuracy within the class."""
    precision: float | None
    """Of the images taken for it, the share that shows it."""
    f1: float | None
    """Harmonic mean of both; 0 where one of them is 0 or does not exist."""


def class_metrics(confusion: Tensor, classes: int) -> list[ClassMetrics]:
    """The metrics of every class, from what `confusion_counts` gives."""
    actual, predicted, counts = confusion.unbind(1)

    def by_class(place: Tensor, images: Tensor) -> list[int]:
        return torch.zeros(classes, dtype=torch.int64).index_add_(0, place, images).tolist()

    right = by_class(actual, counts.where(actual == predicted, 0))
    rows = zip(right, by_class(actual, counts), by_class(predicted, counts), strict=True)
    return [
        ClassMetrics(
            images=shown,
            predicted=named,
            recall=hits / shown if shown else None,
            precision=hits / named if named else None,
            f1=2 * hits / (shown + named) if shown + named else None,
        )
        for hits, shown, named in rows
    ]


def confused_pairs(confusion: Tensor, most: int) -> list[tuple[int, int, int]]:
    """(actual, predicted, images) of the most frequent mistakes, the most frequent first."""
    mistakes = confusion[confusion[:, 0] != confusion[:, 1]]
    order = mistakes[:, 2].argsort(descending=True, stable=True)[:most]
    return [(row[0], row[1], row[2]) for row in mistakes[order].tolist()]
