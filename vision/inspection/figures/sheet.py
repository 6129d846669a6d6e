"""The overlay sheet: images, their top classes, and some methods for them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from PIL import Image

from vision.data.images.decode import Pixels
from vision.data.preprocess import input_pixels
from vision.files import read_file
from vision.inspection.explain import Explanation, Heatmap, Interpolation, Subject, explain
from vision.inspection.figures.drawing import (
    FAINT,
    SCREEN,
    Array,
    Caption,
    Drawing,
    Style,
    colour_limit,
    method_lines,
    new_figure,
)
from vision.inspection.figures.parts import (
    bare,
    class_bars,
    colour_bar,
    fitted,
    note,
    set_title,
    show_image,
    show_map,
)
from vision.inspection.methods.rollout import Query
from vision.inspection.methods.spec import MethodChoice, parse_methods
from vision.terminal import percent

TILE = 1.75
"""Inches."""


def show_attention(
    subject: Subject,
    image: str | Path | Image.Image | Pixels,
    *,
    methods: Sequence[str] | None = None,
    classes: int | Sequence[int] = 3,
    query: Query | None = None,
    interpolation: Interpolation = "bilinear",
    style: Style = SCREEN,
) -> Drawing:
    """Where a model looks in an image. A notebook shows the result; `save` writes it.

    subject: the result of `vision.load`. methods: such as ["rollout", "attention:layer:3"]; by
    default three that suit the model. classes: the number of most probable classes to explain, or
    numbers of classes.
    """
    named = isinstance(image, str | Path)
    name = str(image) if named else "the image"
    content = read_file(image) if isinstance(image, str | Path) else image
    explanations = explain(
        subject,
        [input_pixels(content, name, subject.preprocess)],
        None if methods is None else parse_methods(methods),
        classes=classes,
        query=query,
        interpolation=interpolation,
    )
    style = replace(style, interpolation=interpolation)
    return overlay_sheet(explanations, style=style, title=Path(name).name if named else "")


def overlay_sheet(
    explanations: Sequence[Explanation],
    *,
    style: Style = SCREEN,
    title: str = "",
    bars: bool = True,
) -> Drawing:
    """Models or images one below the other; each method has one scale for all of them.

    bars: show the top classes below each image, instead of the first as text.
    """
    bars = bars and not style.paper
    heatmaps = [heatmap for e in explanations for heatmap in e.heatmaps]
    choices = list({str(heatmap.choice): heatmap.choice for heatmap in heatmaps}.values())
    rows = [_rows(explanation, choices, bars) for explanation in explanations]
    ratio = explanations[0].pixels.shape[0] / explanations[0].pixels.shape[1]
    width = TILE * (len(choices) + 1) + 0.3
    factor = 1.0 if style.width is None else style.width / width
    tile = TILE * factor
    lines = 0.036 * style.size  # room for text between the tiles, which does not scale
    height = (TILE * ratio + lines / factor) * sum(rows) + (0.06 * style.size + 0.25) / factor
    limits = [
        colour_limit([h.values for e in explanations for h in e.heatmaps_of(c)], style.percentile)
        for c in choices
    ]
    several = len({e.model for e in explanations}) > 1
    named = next((c for c, choice in enumerate(choices) if choice.spec.for_class), -1)
    with new_figure(style, width, height) as figure:
        heights = [*[1.0] * sum(rows), 0.05]
        grid = figure.add_gridspec(sum(rows) + 1, len(choices) + 1, height_ratios=heights)
        top = 0
        for explanation, number in zip(explanations, rows, strict=True):
            _left(figure, grid, top, explanation, style, tile, several=several, bars=bars)
            for c, choice in enumerate(choices):
                found = explanation.heatmaps_of(choice)
                for r in range(number):
                    axes = figure.add_subplot(grid[top + r, c + 1])
                    if r >= len(found):
                        _empty(axes, choice, style, r)
                        continue
                    show_map(axes, explanation.pixels, found[r].pixels, limits[c][0])
                    _label(axes, found[r], style, tile, named=c == named)
                    if top + r == 0:
                        axes.set_title(fitted(choice.title, tile, style.size))
            top += number
        for c, (limit, beyond) in enumerate(limits):
            colour_bar(figure, limit, beyond, cax=figure.add_subplot(grid[-1, c + 1]))
        set_title(figure, title, style)
    ends = ", ".join(
        f"{c.title} {limit:.3g}" for c, (limit, _) in zip(choices, limits, strict=True)
    )
    caption = Caption(
        shows=f"Where the model looks: {'; '.join(_predicted(e) for e in explanations)}.",
        facts=(
            ("Models", "; ".join(dict.fromkeys(e.model for e in explanations))),
            (
                "Scale",
                "multiples of a uniform map, linear from 0; colours end at the "
                f"{style.percentile:g}th percentile of all maps of a method: {ends}. Below each "
                "map its largest value, and the share of other tokens (class, registers)",
            ),
            ("Between cells", style.interpolation),
        ),
        methods=method_lines(heatmaps),
    )
    return Drawing(figure, style, caption, _numbers(explanations))


def _rows(explanation: Explanation, choices: Sequence[MethodChoice], bars: bool) -> int:
    """Rows of an explanation: its classes, and one for the bars below the image."""
    return max(
        1 + (bars and bool(explanation.top)),
        *(len(explanation.heatmaps_of(choice)) for choice in choices),
    )


def _left(
    figure: Figure,
    grid: GridSpec,
    top: int,
    explanation: Explanation,
    style: Style,
    tile: float,
    *,
    several: bool,
    bars: bool,
) -> None:
    """The image and, below it, the top classes."""
    axes = figure.add_subplot(grid[top, 0])
    show_image(axes, explanation.pixels)
    height, width = explanation.pixels.shape[:2]
    if several or (top == 0 and not style.paper):
        axes.set_title(fitted(explanation.model, tile, style.size) if several else "Input")
    if not explanation.top or bars:
        note(axes, f"{width} × {height} pixels", style)
    else:
        best = explanation.top[0]
        note(
            axes,
            fitted(f"{best.name} {percent(best.probability, 0)}", tile, style.size * 0.75),
            style,
        )
    if explanation.top and bars:
        class_bars(figure.add_subplot(grid[top + 1, 0]), explanation.top, style, tile)


def _label(axes: Axes, heatmap: Heatmap, style: Style, tile: float, *, named: bool) -> None:
    words = f"max {heatmap.values.max():.3g} ×"
    if heatmap.elsewhere is not None and heatmap.elsewhere > 5e-4:
        words += f" · {percent(heatmap.elsewhere, 0)} on other tokens"
        words = fitted(words, tile * 1.05, style.size * 0.75)
    note(axes, words, style)
    if heatmap.explained is not None and named:
        words = f"{heatmap.explained.name} {percent(heatmap.explained.probability, 0)}"
        axes.set_ylabel(fitted(words, tile, style.size * 0.8), fontsize=style.size * 0.8)


def _empty(axes: Axes, choice: MethodChoice, style: Style, row: int) -> None:
    bare(axes)
    axes.patch.set_visible(False)
    if row == 1 and not choice.spec.for_class:
        axes.text(
            0.5, 0.9, "the same for\nevery class", ha="center", va="top",
            fontsize=style.size * 0.8, color=FAINT, transform=axes.transAxes,
        )  # fmt: skip


def _predicted(explanation: Explanation) -> str:
    if not explanation.top:
        return f"{explanation.model} has no classes"
    best = explanation.top[0]
    return f"{explanation.model} predicts {best.name} ({percent(best.probability, 1)})"


def _numbers(explanations: Sequence[Explanation]) -> dict[str, Array]:
    """Everything that is drawn, in cells, in multiples of a uniform map."""
    numbers: dict[str, Array] = {}
    for m, explanation in enumerate(explanations):
        start = f"model{m}_" if len(explanations) > 1 else ""
        numbers[f"{start}image"] = explanation.pixels
        for heatmap in explanation.heatmaps:
            name = f"{start}{str(heatmap.choice).replace(':', '_')}"
            end = "" if heatmap.explained is None else f"_class{heatmap.explained.number}"
            numbers[name + end] = heatmap.values
    return numbers
