"""Metrics as sums and counts, merged by addition, and the scores of single images.

However an evaluation is divided among batches, workers and processes, the sums are the same, to
the bit if the logits are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")

LOSS_UNIT = 2.0**-28
"""Losses of single images are rounded to multiples of it (4e-9). Their sums are then exact in
double precision, up to 2²⁵ (three million images at a loss of 10), whatever the order."""

CHUNK = 4096
"""Images whose probabilities are in memory at once, in double precision."""


def empty_sums(classes: int, device: torch.device) -> Tensor:
    """The sums over no images, in double precision where the device supports it.

    Loss, number of images, top-1 hits, top-5 hits; then for every class its correct predictions,
    its predictions and its images: (4 + 3 classes,). Those of several processes are added.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros(4 + 3 * classes, dtype=dtype, device=device)


def summable(losses: Tensor, dtype: torch.dtype) -> Tensor:
    """Losses of single images whose sum does not depend on its order; see LOSS_UNIT."""
    return (losses.to(dtype) / LOSS_UNIT).round() * LOSS_UNIT


@torch.no_grad()
def add_batch(sums: Tensor, logits: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """Add a batch: logits (n, classes), labels (n,) and a mask of the rows that count (n,)."""
    classes = (len(sums) - 4) // 3
    if logits.shape[1] != classes:
        raise ValueError(
            f"the model gives {logits.shape[1]} logits, but the data has {classes} classes."
        )
    logits = logits.float()
    labels = labels.where(valid, 0)
    number = torch.arange(classes, device=logits.device)
    rank = label_rank(logits, labels)
    right = valid & (rank == 0)
    actual = (labels[:, None] == number) & valid[:, None]
    predicted = (logits.argmax(1, keepdim=True) == number) & valid[:, None]
    loss = summable(F.cross_entropy(logits, labels, reduction="none"), sums.dtype)

    def total(values: Tensor) -> Tensor:
        return values.sum(0, dtype=sums.dtype)

    overall = [loss.where(valid, 0.0), valid, right, valid & (rank < 5)]
    by_class = [total(actual & right[:, None]), total(predicted), total(actual)]
    batch = torch.cat([torch.stack([total(values) for values in overall]), *by_class])
    return sums + batch


def results(sums: Tensor) -> dict[str, float]:
    """The metrics, as fractions of 1; the loss is the mean cross-entropy.

    Balanced accuracy is the mean recall of the classes that occur; macro-F1 the mean F1 of those
    that occur or were predicted.
    """
    sums = sums.cpu().double()
    loss, count, top1, top5 = sums[:4].tolist()
    if not count:
        raise ValueError("no images to evaluate: none were given, or none could be read.")
    right, predicted, actual = sums[4:].view(3, -1)
    occurs, named = actual > 0, predicted + actual > 0
    recall = right[occurs] / actual[occurs]
    f1 = 2 * right[named] / (predicted + actual)[named]
    return {
        "loss": loss / count,
        "top1": top1 / count,
        "top5": top5 / count,
        "balanced_accuracy": float(recall.mean()),
        "macro_f1": float(f1.mean()),
        "samples": count,
    }


def with_flips(usual: Mapping[str, T], flipped: Mapping[str, T]) -> dict[str, T]:
    """The usual values and beside them, as `<name>_flipped`, those of `flip_test`."""
    return {
        **usual,
        **{f"{name}_flipped": value for name, value in flipped.items() if name != "samples"},
    }


def label_rank(logits: Tensor, labels: Tensor) -> Tensor:
    """Number of classes that the logits (n, classes) rank before the labels (n,).

    Among equal logits the first class comes first, as in argmax; NaN is always ranked last.
    """
    own = logits.gather(1, labels[:, None])
    number = torch.arange(logits.shape[1], device=logits.device)
    behind = (logits < own) | ((logits == own) & (number > labels[:, None]))
    return logits.shape[1] - 1 - behind.sum(1)


@dataclass(frozen=True)
class ImageScores:
    """Scores of every image, in double precision (n,)."""

    top1: Tensor
    """1 where the label is the most probable class, else 0."""
    top5: Tensor
    loss: Tensor
    brier: Tensor
    confidence: Tensor
    """The largest probability."""


def score_images(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> ImageScores:
    """Score softmax(logits / temperature) of every image: logits (n, classes), labels (n,)."""
    parts = []
    for chunk, own in chunks(logits, labels):
        rank = label_rank(chunk, own)
        logs = (chunk / temperature).log_softmax(1)
        probabilities = logs.exp()
        own_log = logs.gather(1, own[:, None])[:, 0]
        brier = probabilities.square().sum(1) - 2 * own_log.exp() + 1
        scores = [(rank == 0).double(), (rank < 5).double(), -own_log, brier]
        parts.append(torch.stack([*scores, probabilities.amax(1)]))
    return ImageScores(*torch.cat(parts, dim=1))


def chunks(logits: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some thousand rows at a time, the logits in double precision."""
    for first in range(0, len(labels), CHUNK):
        yield logits[first : first + CHUNK].double(), labels[first : first + CHUNK]


def confusion_counts(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """(actual, predicted, images) of every pair of classes that occurs: int64 (pairs, 3).

    Sparse, because the whole matrix of 20,000 classes would take gigabytes.
    """
    pairs, counts = (labels * classes + predicted).unique(return_counts=True)
    return torch.stack([pairs // classes, pairs % classes, counts], dim=1)


def class_counts(confusion: Tensor, classes: int) -> Tensor:
    """Correct predictions, predictions and images of every class: int64 (3, classes)."""
    actual, predicted, images = confusion.unbind(1)
    counts = torch.zeros(3, classes, dtype=torch.int64)
    counts[0].index_add_(0, actual, images.where(actual == predicted, 0))
    counts[1].index_add_(0, predicted, images)
    counts[2].index_add_(0, actual, images)
    return counts


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of one class; None where the denominator is 0."""

    name: str
    accuracy: float | None
    """The same as the recall."""
    images: int
    predicted: int
    """Images that were assigned to this class, correctly or not."""
    recall: float | None
    """Fraction of its images that were recognised."""
    precision: float | None
    """Fraction of its predictions that are correct."""
    f1: float | None
    """Harmonic mean of recall and precision; 0 where only one of them exists."""


def class_metrics(counts: Tensor, names: Sequence[str]) -> list[ClassMetrics]:
    """The metrics of every class from `class_counts`."""
    rows = []
    for name, (right, predicted, images) in zip(names, counts.T.tolist(), strict=True):
        recall = right / images if images else None
        precision = right / predicted if predicted else None
        f1 = 2 * right / (images + predicted) if images + predicted else None
        rows.append(ClassMetrics(name, recall, images, predicted, recall, precision, f1))
    return rows
