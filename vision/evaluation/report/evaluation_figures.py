"""Figures of an evaluation as PNG: the confusion matrix, and the reliability diagram."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vision.evaluation.model_metrics import ModelMetrics
from vision.inspection.figures.drawing import (
    ACCENT,
    FAINT,
    MARK,
    SCREEN,
    TEXT,
    Array,
    Caption,
    Drawing,
    new_figure,
)
from vision.terminal import percent

READABLE = 48
"""Number of classes whose names still fit beside a matrix."""
NUMBERED = 24
"""Number of classes up to which squares have their numbers."""
LISTED = 25
"""Number of confused pairs that are drawn where a matrix cannot be read."""
LONGEST = 26
"""Characters of a class's name."""


def confusion(name: str, results: ModelMetrics) -> Drawing:
    """The confusion matrix of a model; of too many classes to read, its most confused pairs."""
    if len(results.classes) > READABLE:
        return _most_confused(name, results)
    classes = len(results.classes)
    counts = np.zeros((classes, classes), dtype=np.int64)
    actual, predicted, images = results.confusion.numpy().T
    counts[actual, predicted] = images
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    labels = [_short(row.name) for row in results.classes]
    longest = max(map(len, labels))
    square = 0.34 if classes <= NUMBERED else 0.2
    side = max(1.6, square * classes) + 0.075 * longest + 0.5
    with new_figure(SCREEN, max(side, 3.4), side + 0.2) as figure:
        axes = figure.subplots()
        # The root makes single mistakes visible beside a diagonal of nearly one.
        axes.imshow(np.sqrt(shares), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        size = SCREEN.size * (0.85 if classes <= NUMBERED else 0.6)
        axes.set_xticks(range(classes), labels, rotation=90, fontsize=size)
        axes.set_yticks(range(classes), labels, fontsize=size)
        axes.tick_params(length=0)
        axes.set(xlabel="predicted", ylabel="actual")
        _set_title(figure, f"{_short(name)}: {percent(results.metrics['top1'])} correct")
        axes.spines[:].set_visible(False)
        if classes <= NUMBERED:
            _write_counts(axes, counts, shares)
    caption = Caption(
        "Images of each class (row) by predicted class (column). Colour: root of the share of "
        "the row."
    )
    return Drawing(figure, SCREEN, caption, {"counts": counts})


def _write_counts(axes: Axes, counts: Array, shares: Array) -> None:
    largest = len(str(counts.max(initial=0)))
    size = SCREEN.size * (0.8 if largest <= 4 else 0.6)
    for (row, column), count in np.ndenumerate(counts):
        if count:
            color = "white" if shares[row, column] > 0.3 else TEXT
            number = str(count)
            axes.text(column, row, number, color=color, fontsize=size, ha="center", va="center")


def _most_confused(name: str, results: ModelMetrics) -> Drawing:
    """Bars: the most frequent mistakes, the most frequent on top."""
    pairs = results.confused[:LISTED]
    sizes = {row.name: row.images for row in results.classes}
    with new_figure(SCREEN, 7.0, 0.9 + 0.22 * max(len(pairs), 1)) as figure:
        axes = figure.subplots()
        labels = [f"{_short(pair.actual)} → {_short(pair.predicted)}" for pair in pairs]
        images = [pair.images for pair in pairs]
        bars = axes.barh(range(len(pairs)), images, color=ACCENT, height=0.7)
        shares = [f"{pair.images} of {sizes[pair.actual]}" for pair in pairs]
        axes.bar_label(bars, shares, padding=3, fontsize=SCREEN.size * 0.8, color=FAINT)
        axes.set_yticks(range(len(pairs)), labels, fontsize=SCREEN.size * 0.85)
        axes.invert_yaxis()
        axes.margins(x=0.15, y=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("images that were confused, of all of the actual class")
        correct = percent(results.metrics["top1"])
        _set_title(figure, f"{_short(name)}: {correct} correct; most confused (actual → predicted)")
    caption = Caption(
        f"The {len(pairs)} most frequent mistakes among {len(results.classes):,} classes."
    )
    return Drawing(figure, SCREEN, caption, {"images": np.array(images)})


def calibration(name: str, results: ModelMetrics) -> Drawing:
    """The reliability diagram: accuracy over confidence, with the number of images below."""
    curve = results.calibration.all
    bins = [b for b in curve.bins if b.count]
    confidence = np.array([b.confidence for b in bins], dtype=np.float64)
    accuracy = np.array([b.accuracy for b in bins], dtype=np.float64)
    with new_figure(SCREEN, 3.6, 4.2) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        above.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8, linestyle="--")
        above.vlines(confidence, confidence, accuracy, color=MARK, linewidth=1.2, alpha=0.6)
        above.plot(confidence, accuracy, color=ACCENT, marker="o", markersize=3.5, linewidth=1.2)
        above.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
        _set_title(figure, f"{_short(name)}: ECE {curve.ece:.4f}")
        width = 1 / len(curve.bins)
        middles = [(b.low + b.high) / 2 for b in curve.bins]
        below.bar(middles, [b.count for b in curve.bins], width=0.9 * width, color=ACCENT)
        below.set(ylabel="images", xlabel="confidence")
        below.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
        above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    caption = Caption(
        "Accuracy of the images of each bin of confidence; on the dashed line both are equal."
    )
    return Drawing(figure, SCREEN, caption, {"confidence": confidence, "accuracy": accuracy})


def _short(name: str) -> str:
    """A name that fits beside an axis; matplotlib would set text between dollars as a formula."""
    printable = "".join(c if c.isprintable() else "?" for c in name)
    cut = printable if len(printable) <= LONGEST else f"{printable[: LONGEST - 1]}…"
    return cut.replace("$", r"\$")


def _set_title(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.015, ha="left", fontsize=SCREEN.size)
