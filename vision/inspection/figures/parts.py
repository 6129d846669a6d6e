"""The parts of figures: images, maps over them, colour scales, titles."""

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from vision.data.images.decode import Pixels
from vision.inspection.capture.token_layout import Box
from vision.inspection.explain import ClassProbability
from vision.inspection.figures.drawing import FAINT, Array, Style
from vision.terminal import percent

COLOURS = matplotlib.colormaps["inferno"]
STRENGTH = 0.85
"""Opacity of the brightest colour of a map over its image."""


def evenly_spread(number: int, most: int) -> list[int]:
    """At most `most` of the numbers from 0 to number - 1, the first and the last among them."""
    return [int(n) for n in np.linspace(0, number - 1, min(number, most)).round()]


def bare(axes: Axes) -> None:
    """Remove ticks and frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def show_image(axes: Axes, pixels: Pixels, *, faded: float = 0.0) -> None:
    """An image as the model sees it, or faded towards its own grey."""
    shown = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels
    if faded:
        grey = shown.mean(axis=2, keepdims=True)
        shown = (shown * (1 - faded) + grey * faded).astype(np.uint8)
    height, width = shown.shape[:2]
    axes.imshow(shown, interpolation="nearest", extent=(0, width, height, 0))
    axes.set_anchor("N")
    bare(axes)


def tinted(values: Array, limit: float, gamma: float = 1.0) -> Array:
    """Colours and opacity of a map: the larger its values, the less of the image is visible."""
    share = np.clip(values / limit, 0, 1) ** gamma
    colours = COLOURS(share)
    colours[..., 3] = STRENGTH * share**0.6
    return colours


def show_map(
    axes: Axes, pixels: Pixels, values: Array, limit: float, *, gamma: float = 1.0
) -> None:
    """A map over its image. values: at any size; they are laid over the whole image."""
    show_image(axes, pixels, faded=0.6)
    height, width = pixels.shape[:2]
    axes.imshow(tinted(values, limit, gamma), interpolation="nearest", extent=(0, width, height, 0))


def mosaic(images: Array, columns: int, gap: int) -> Array:
    """Images (n height width channels) in rows; gaps are 1 in colours and NaN in single values."""
    number, height, width, channels = images.shape
    shape = (-(-number // columns) * (height + gap) - gap, columns * (width + gap) - gap, channels)
    canvas = np.full(shape, np.nan if channels == 1 else 1.0)
    for i, image in enumerate(images):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        canvas[top : top + height, left : left + width] = image
    return canvas


def tiles(figure: Figure, number: int, columns: int) -> list[Axes]:
    """Axes for a number of panels, in rows of at most `columns`."""
    columns = min(columns, number)
    grid = figure.subplots(-(-number // columns), columns, squeeze=False)
    for axes in grid.flat[number:]:
        axes.set_visible(False)
    return list(grid.flat[:number])


def set_title(figure: Figure, title: str, style: Style) -> None:
    """The title of a figure, which has none in a paper."""
    if title and not style.paper:
        size = style.size * 1.15
        figure.suptitle(title, x=0.01, ha="left", fontsize=size, weight="bold")


def outline(axes: Axes, box: Box, colour: str, width: float, **look: Any) -> None:
    """A frame around pixels (top, left, bottom, right)."""
    top, left, bottom, right = box
    look |= {"fill": False, "edgecolor": colour, "linewidth": width}
    axes.add_patch(Rectangle((left, top), right - left, bottom - top, **look))


def fitted(text: str, inches: float, size: float, lines: int = 2) -> str:
    """A text of this font size, wrapped to a width in inches and shortened to some lines."""
    columns = max(6, int(inches * 72 / (0.58 * size)))
    wrapped = textwrap.wrap(text, columns, break_long_words=False)
    if len(wrapped) > lines:
        wrapped = [*wrapped[: lines - 1], shortened(" ".join(wrapped[lines - 1 :]), columns)]
    return "\n".join(shortened(line, columns + 2) for line in wrapped)


def colour_bar(
    figure: Figure | SubFigure,
    limit: float,
    beyond: bool,
    *,
    label: str = "× uniform",
    gamma: float = 1.0,
    **place: Any,
) -> None:
    """A horizontal colour scale, in axes of its own (cax) or below those that share it (ax)."""
    norm = Normalize(0, limit) if gamma == 1 else PowerNorm(gamma, 0, limit)
    extend = "max" if beyond else "neither"
    if "ax" in place:
        place = {"location": "bottom", "shrink": 0.5, "aspect": 25, "pad": 0.02} | place
    else:
        place["orientation"] = "horizontal"
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), extend=extend, **place)
    bar.outline.set_linewidth(0.4)
    bar.locator = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])
    bar.update_ticks()
    bar.set_label(label)


def class_bars(
    axes: Axes, classes: Sequence[ClassProbability], style: Style, inches: float
) -> None:
    """The most probable classes as bars with their names in them."""
    places = range(len(classes))
    axes.barh(places, np.ones(len(classes)), color="#eef1f4", height=0.78)
    axes.barh(places, [c.probability for c in classes], color="#9ec5e5", height=0.78)
    size = style.size * 0.8
    room = int(inches * 72 / (0.62 * size)) - 6
    for place, one in zip(places, classes, strict=True):
        words = f"{shortened(one.name, max(room, 4))} {percent(one.probability, 0)}"
        axes.text(0.03, place, words, va="center", fontsize=size)
    axes.set_xlim(0, 1)
    axes.set_ylim(max(len(classes), 5) - 0.5, -0.6)
    bare(axes)


def note(axes: Axes, text: str, style: Style) -> None:
    """Small grey text below a panel."""
    axes.set_xlabel(text, fontsize=style.size * 0.75, color=FAINT, labelpad=2)


def shortened(text: str, length: int) -> str:
    """A text cut to this length."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
