"""Metrics of images with any number of classes, from the logits of all images.

Labels (n, classes) are 1, 0, or −1 where unknown; unknown entries count nowhere. Definitions, as in
scikit-learn:

- **Loss**: mean binary cross-entropy of the known entries.
- **Average precision** of a class: Σ (Rₖ − Rₖ₋₁) Pₖ over its distinct scores in falling order, so
  that images of equal scores count together. **mAP**: its mean over the classes that occur.
- **Micro-F1**: F1 of all entries together. **Macro-F1**: mean F1 of the classes that occur or were
  predicted. **Sample-F1**: mean F1 of the images; 1 for an image that has no class and no
  prediction.

A class is predicted where its probability is at least its threshold: 0.5, or one for each class
that maximises its F1 on other images (`best_thresholds`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vision.evaluation.model_metrics import Floats, Resampled, drawn_times, interval

THRESHOLD = 0.5
"""Threshold of a class that no other is known for."""
TUNED = "_tuned"
"""Suffix of the metrics at the thresholds of the model."""
RESAMPLED = ("map", "micro_f1", "macro_f1", "sample_f1", "loss")


@dataclass(frozen=True)
class LabelMetrics:
    """Metrics of one class; None where the denominator is 0."""

    name: str
    images: int
    """Number of images that have it."""
    known: int
    """Number of images for which that is known."""
    average_precision: float | None
    threshold: float
    predicted: int
    """Images in which it was predicted, correctly or not."""
    recall: float | None
    precision: float | None
    f1: float | None


@dataclass(frozen=True)
class MultiLabelMetrics(Resampled):
    """The metrics of images with any number of classes."""

    classes: list[LabelMetrics]


@dataclass(frozen=True)
class Scores:
    """Sorted scores of an evaluation, to weigh images by how often they were drawn."""

    truth: NDArray[np.bool_]
    known: NDArray[np.bool_]
    probabilities: Floats
    loss: Floats
    """Binary cross-entropy of every entry; 0 where unknown."""
    order: NDArray[np.int64]
    """Images by falling score, for each class: (n, classes)."""
    last: NDArray[np.bool_]
    """Whether a place in that order is the last of equal scores."""


def sort_scores(logits: Tensor, labels: Tensor) -> Scores:
    """Prepare logits (n, classes) with their labels (n, classes)."""
    logits, truth, known = logits.double(), labels == 1, labels >= 0
    loss = F.binary_cross_entropy_with_logits(logits, truth.double(), reduction="none")
    values = logits.numpy()
    order = np.argsort(-values, axis=0, kind="stable")
    ranked = np.take_along_axis(values, order, 0)
    last = np.ones_like(ranked, dtype=bool)
    last[:-1] = ranked[:-1] != ranked[1:]
    return Scores(
        truth.numpy(),
        known.numpy(),
        logits.sigmoid().numpy(),
        loss.where(known, 0.0).numpy(),
        order,
        last,
    )


def average_precisions(scores: Scores, times: Floats | None = None) -> Floats:
    """Average precision of every class: (classes,); NaN without any image that has it.

    `times`: how often each image counts; by default once.
    """
    weights = scores.known * (1.0 if times is None else times[:, None])
    seen = np.take_along_axis(weights, scores.order, 0)
    hits = np.cumsum(seen * np.take_along_axis(scores.truth, scores.order, 0), axis=0)
    total = np.cumsum(seen, axis=0)
    # Only the last of equal scores is a cut: the recall that it adds is that of all of them.
    reached = np.where(scores.last, hits, 0.0)
    before = np.zeros_like(reached)
    before[1:] = np.maximum.accumulate(reached, axis=0)[:-1]
    gained = np.where(scores.last, hits - before, 0.0)
    precision = hits / np.maximum(total, 1e-300)
    positives = hits[-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Floats = (gained * precision).sum(axis=0) / positives
    return found


def overall_metrics(
    scores: Scores, thresholds: Floats | float = THRESHOLD, times: Floats | None = None
) -> dict[str, float]:
    """The metrics, as fractions of 1; `samples` is the number of images."""
    times = np.ones(len(scores.truth)) if times is None else times
    predicted = (scores.probabilities >= thresholds) & scores.known
    actual = scores.truth & scores.known
    right = (predicted & actual).astype(np.float64)
    named = predicted.astype(np.float64) + actual
    by_class, of_class = times @ right, times @ named
    by_image, of_image = right.sum(axis=1), named.sum(axis=1)
    each = np.where(of_image > 0, 2 * by_image / np.maximum(of_image, 1), 1.0)
    counted = times * scores.known.any(axis=1)
    occurs = of_class > 0
    precisions = average_precisions(scores, times)
    entries = float((times @ scores.known).sum())
    return {
        "loss": float((times @ scores.loss).sum()) / entries if entries else 0.0,
        "map": _mean(precisions[~np.isnan(precisions)]),
        "micro_f1": 2 * float(by_class.sum()) / max(float(of_class.sum()), 1.0),
        "macro_f1": _mean(2 * by_class[occurs] / of_class[occurs]),
        "sample_f1": float((counted * each).sum() / max(counted.sum(), 1.0)),
        "samples": float(times.sum()),
    }


def best_thresholds(scores: Scores) -> Floats:
    """The threshold of every class that maximises its F1 on these images: (classes,).

    It lies halfway between the lowest score that is predicted and the next one. A class that no
    image has, or every one, keeps 0.5.
    """
    found = np.full(scores.truth.shape[1], THRESHOLD)
    for place in range(len(found)):
        known = scores.known[:, place]
        truth, values = scores.truth[known, place], scores.probabilities[known, place]
        if not truth.any() or truth.all():
            continue
        order = np.argsort(-values, kind="stable")
        ranked = values[order]
        hits = np.cumsum(truth[order])
        f1 = 2 * hits / (np.arange(1, len(hits) + 1) + hits[-1])
        f1[:-1][ranked[:-1] == ranked[1:]] = -1  # equal scores are on one side
        best = int(f1.argmax())
        below = ranked[best + 1] if best + 1 < len(ranked) else 0.0
        found[place] = (ranked[best] + below) / 2
    return found


def compute_label_metrics(
    logits: Tensor,
    labels: Tensor,
    names: Sequence[str],
    thresholds: Sequence[float],
    *,
    resamples: int,
    seed: int,
) -> MultiLabelMetrics:
    """The metrics of logits (n, classes) for images with these labels (n, classes)."""
    scores = sort_scores(logits, labels)
    tuned = overall_metrics(scores, np.asarray(thresholds))
    metrics = overall_metrics(scores)
    metrics |= {f"{name}{TUNED}": tuned[name] for name in tuned if name.endswith("_f1")}
    draws = _resample(scores, resamples, seed) if resamples else {}
    return MultiLabelMetrics(
        metrics,
        {name: interval(values) for name, values in draws.items()},
        draws,
        _class_rows(scores, names, np.asarray(thresholds)),
    )


def _resample(scores: Scores, resamples: int, seed: int) -> dict[str, Floats]:
    """Every metric in each draw of the bootstrap; see `vision.evaluation.model_metrics`."""
    rows = []
    for times in drawn_times(len(scores.truth), resamples, seed):
        found = overall_metrics(scores, times=times)
        rows.append([found[name] for name in RESAMPLED])
    return dict(zip(RESAMPLED, np.array(rows).T, strict=True))


def _class_rows(scores: Scores, names: Sequence[str], thresholds: Floats) -> list[LabelMetrics]:
    predicted = (scores.probabilities >= thresholds) & scores.known
    actual = scores.truth & scores.known
    counts = np.stack([predicted & actual, predicted, actual, scores.known]).sum(axis=1)
    precisions = average_precisions(scores)
    return [
        LabelMetrics(
            name=names[place],
            images=images,
            known=known,
            average_precision=float(precisions[place]) if images else None,
            threshold=float(thresholds[place]),
            predicted=said,
            recall=right / images if images else None,
            precision=right / said if said else None,
            f1=2 * right / (images + said) if images + said else None,
        )
        for place, (right, said, images, known) in enumerate(counts.T.tolist())
    ]


@dataclass(frozen=True)
class LabelMistake:
    """An image with the class that the model was most wrong about."""

    row: int
    """Its row in the logits."""
    wrong: int
    """The class, predicted but absent or present but not predicted."""
    labels: list[int]
    predicted: list[tuple[int, float]]
    """Classes at or above their thresholds with their probabilities."""
    confidence: float
    """Probability of the class; of its absence where it is present."""


def confident_label_mistakes(
    logits: Tensor, labels: Tensor, thresholds: Sequence[float], most: int
) -> list[LabelMistake]:
    """The images with the most confident mistakes, the most confident first."""
    chances = logits.double().sigmoid()
    present = chances >= torch.tensor(thresholds, dtype=torch.float64)
    wrong = (present != (labels == 1)) & (labels >= 0)
    sure = torch.where(present, chances, 1 - chances).where(wrong, -1.0)
    confidence, place = sure.max(1)
    order = confidence.argsort(descending=True, stable=True)[:most]
    return [
        LabelMistake(
            row,
            int(place[row]),
            (labels[row] == 1).nonzero()[:, 0].tolist(),
            [(i, float(chances[row, i])) for i in present[row].nonzero()[:, 0].tolist()],
            float(confidence[row]),
        )
        for row in order.tolist()
        if confidence[row] >= 0
    ]


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
