"""The overlay sheet: an image, what a model says of it, and some methods for the top classes."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec

from vision.inspection.explain import Look, Panel
from vision.inspection.figures.captions import Caption, method_lines
from vision.inspection.figures.drawing import Array, Drawing, Style, colour_limit, new_figure
from vision.inspection.figures.parts import (
    answer_bars,
    bare,
    fitted,
    note,
    scale_in,
    show_image,
    show_map,
)
from vision.inspection.methods.requests import Request

TILE = 1.75
"""Inches."""


def overlay_sheet(
    looks: Sequence[Look],
    *,
    style: Style | None = None,
    percentile: float = 99.5,
    interpolation: str = "bilinear",
    title: str = "",
) -> Drawing:
    """Models one below the other on the same image; each method has one scale for all of them."""
    style = style or Style()
    requests = _requests(looks)
    rows = [_rows(look, requests, style) for look in looks]
    ratio = looks[0].pixels.shape[0] / looks[0].pixels.shape[1]
    width = TILE * (len(requests) + 1) + 0.3
    factor = 1.0 if style.width is None else style.width / width
    tile = TILE * factor
    lines = 0.036 * style.size  # room for words between the tiles, which do not scale
    height = (TILE * ratio + lines / factor) * sum(rows) + (0.06 * style.size + 0.25) / factor
    limits = [_limit(looks, request, percentile) for request in requests]
    with new_figure(style, width, height) as figure:
        heights = [*[1.0] * sum(rows), 0.05]
        grid = figure.add_gridspec(sum(rows) + 1, len(requests) + 1, height_ratios=heights)
        top = 0
        for look, number in zip(looks, rows, strict=True):
            _left(figure, grid, top, look, style, tile, several=len(looks) > 1)
            for c, request in enumerate(requests):
                panels = look.panels_of(request)
                for r in range(number):
                    axes = figure.add_subplot(grid[top + r, c + 1])
                    if r >= len(panels):
                        _empty(axes, request, style, r)
                        continue
                    named = c == _first_for_class(requests)
                    _panel(axes, look, panels[r], limits[c][0], style, tile, named=named)
                    if top + r == 0:
                        axes.set_title(fitted(request.title, tile, style.size))
            top += number
        for c, (limit, beyond) in enumerate(limits):
            scale_in(figure.add_subplot(grid[-1, c + 1]), limit, beyond)
        if title and not style.paper:
            figure.suptitle(title, x=0.01, ha="left", fontsize=style.size * 1.15, weight="bold")
    panels = [panel for look in looks for panel in look.panels]
    ends = ", ".join(
        f"{r.title} {limit:.3g}" for r, (limit, _) in zip(requests, limits, strict=True)
    )
    caption = Caption(
        shows=_shows(looks),
        facts=(
            ("Models", "; ".join(look.model for look in looks)),
            (
                "Scale",
                "multiples of a uniform map, linear from 0; colours end at the "
                f"{percentile:g}th percentile of all maps of a method: {ends}. Below each map its "
                "largest value, and the share of tokens that are no cells (class, registers)",
            ),
            ("Between cells", interpolation),
        ),
        methods=method_lines(panels),
    )
    return Drawing(figure, style, caption, _numbers(looks))


def _rows(look: Look, requests: Sequence[Request], style: Style) -> int:
    """Rows that a model takes: its classes, and on a screen a place for bars below its input."""
    bars = bool(look.answers) and not style.paper
    return max(1 + bars, *(len(look.panels_of(request)) for request in requests))


def _requests(looks: Sequence[Look]) -> list[Request]:
    """The methods of all models, each once, in order."""
    return list({str(p.request): p.request for look in looks for p in look.panels}.values())


def _limit(looks: Sequence[Look], request: Request, percentile: float) -> tuple[float, bool]:
    values = [panel.values for look in looks for panel in look.panels_of(request)]
    return colour_limit(values, percentile)


def _left(
    figure: Figure,
    grid: GridSpec,
    top: int,
    look: Look,
    style: Style,
    tile: float,
    *,
    several: bool,
) -> None:
    """The image and, below it, what the model says."""
    axes = figure.add_subplot(grid[top, 0])
    show_image(axes, look.pixels)
    height, width = look.pixels.shape[:2]
    if several or not style.paper:
        axes.set_title(fitted(look.model, tile, style.size) if several else "Input")
    if not look.answers or not style.paper:
        note(axes, f"{width} × {height} pixels", style)
    else:
        best = look.answers[0]
        words = f"{best.name} {best.probability:.0%}"
        note(axes, fitted(words, tile, style.size * 0.75), style)
    if look.answers and not style.paper:
        answer_bars(figure.add_subplot(grid[top + 1, 0]), look.answers, style, tile)


def _first_for_class(requests: Sequence[Request]) -> int:
    """The column that names the classes of its row."""
    return next((c for c, request in enumerate(requests) if request.about.for_class), -1)


def _panel(
    axes: Axes, look: Look, panel: Panel, limit: float, style: Style, tile: float, *, named: bool
) -> None:
    show_map(axes, look.pixels, panel.pixels, limit)
    words = f"max {panel.values.max():.3g} ×"
    if panel.elsewhere is not None and panel.elsewhere > 5e-4:
        words += f" · {panel.elsewhere:.0%} on other tokens"
        words = fitted(words, tile * 1.05, style.size * 0.75)
    note(axes, words, style)
    if panel.answer is not None and named:
        words = f"{panel.answer.name} {panel.answer.probability:.0%}"
        axes.set_ylabel(fitted(words, tile, style.size * 0.8), fontsize=style.size * 0.8)


def _empty(axes: Axes, request: Request, style: Style, row: int) -> None:
    bare(axes)
    axes.patch.set_visible(False)
    if row == 1 and not request.about.for_class:
        axes.text(
            0.5, 0.9, "the same for\nevery class", ha="center", va="top",
            fontsize=style.size * 0.8, color="#6a737d", transform=axes.transAxes,
        )  # fmt: skip


def _shows(looks: Sequence[Look]) -> str:
    said = []
    for look in looks:
        if look.answers:
            best = look.answers[0]
            said.append(f"{look.model} says {best.name} ({best.probability:.1%})")
        else:
            said.append(f"{look.model} has no classes")
    return f"Where the model looks: {'; '.join(said)}."


def _numbers(looks: Sequence[Look]) -> dict[str, Array]:
    """Everything that is drawn, in cells, in multiples of a uniform map."""
    numbers: dict[str, Array] = {}
    for m, look in enumerate(looks):
        start = f"model{m}_" if len(looks) > 1 else ""
        numbers[f"{start}image"] = look.pixels
        for panel in look.panels:
            name = f"{start}{str(panel.request).replace(':', '_')}"
            numbers[name if panel.answer is None else f"{name}_class{panel.answer.number}"] = (
                panel.values
            )
    return numbers
