"""The window microscope: one patch of a Swin, through all its blocks."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from vision.config import ConfigError
from vision.data.images.decode import Pixels
from vision.inspection.capture.captured import Captured, Cell, LayerAttention
from vision.inspection.figures.captions import Caption, method_line
from vision.inspection.figures.drawing import (
    SCREEN,
    Array,
    Drawing,
    Style,
    colour_limit,
    new_figure,
)
from vision.inspection.figures.heads import GAMMA, attention_row
from vision.inspection.figures.parts import colour_bar, note, outline, set_title, show_map, tiles

COLUMNS = 6
LINES, QUERY, MASKED = "#ffffff", "#4cc9f0", "#ffffff"


def microscope(
    captured: Captured, pixels: Pixels, place: tuple[int, int], *, style: Style = SCREEN
) -> Drawing:
    """The stitched attention of the patch at a pixel (row, column) in every block.

    White lines are windows as they lie in the image; cells that share the query's window but are
    masked from it, because a shift brought them together from opposite edges, are hatched.
    """
    if not captured.windowed:
        raise ConfigError(
            f"figures: microscope needs windows, and {captured.model} has none; use queries."
        )
    maps = [attention_row(layer, layer.layout.cell_at(place)) for layer in captured.layers]
    limit, beyond = colour_limit(maps, 100)
    columns = min(COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    ratio = pixels.shape[0] / pixels.shape[1]
    tile = 1.8
    width = tile * columns + 0.1
    # A row has words above and below its maps; the figure a title, and a scale with its label.
    # Words do not shrink with a figure that is made narrower.
    size = style.size * (1.0 if style.width is None else width / style.width)
    height = (tile * ratio + 0.052 * size) * rows + (0.062 if style.paper else 0.085) * size
    with new_figure(style, width, height, apart=0.05) as figure:
        panels = tiles(figure, len(maps), COLUMNS)
        for axes, layer, values in zip(panels, captured.layers, maps, strict=True):
            _block(axes, layer, values, limit, pixels, place, style)
        label = "× uniform in the window"
        colour_bar(figure, limit, beyond, label=label, gamma=GAMMA, ax=panels, aspect=40)
        set_title(figure, f"One patch through the windows of {captured.model}", style)
    caption = Caption(
        shows="The attention of one patch in every block, mean over heads, put back into the "
        "image: windows are outlined in white, with their shift undone; cells that share a window "
        "with the query but are masked from it are hatched; the query is framed in blue.",
        facts=(
            ("Query", f"the patch at pixel {place} (row, column)"),
            ("Layers", ", ".join(_described_layer(layer) for layer in captured.layers)),
            (
                "Scale",
                "multiples of uniform attention over the keys of the query; colours follow the "
                f"square root of the value and end at {limit:.3g}; cells are not interpolated",
            ),
        ),
        methods=(
            method_line("attention", layer="all"),
            "Windows, their shift, and the bias added to q kᵀ / √d: Liu et al., ICCV 2021.",
        ),
    )
    numbers = {f"layer{layer.number}": m for layer, m in zip(captured.layers, maps, strict=True)}
    return Drawing(figure, style, caption, {"image": pixels, **numbers})


def _block(
    axes: Axes,
    layer: LayerAttention,
    values: Array,
    limit: float,
    pixels: Pixels,
    place: tuple[int, int],
    style: Style,
) -> None:
    layout = layer.layout
    cell = layout.cell_at(place)
    height, width = layout.image_size
    shown = np.kron(values, np.ones(layout.stride))[:height, :width]
    show_map(axes, pixels, shown, limit, gamma=GAMMA)
    masked = layout.masked(cell).cpu().numpy()
    for y, x in np.argwhere(masked):
        top, left, bottom, right = layout.box((int(y), int(x)))
        axes.add_patch(
            Rectangle(
                (left, top), right - left, bottom - top,
                fill=False, hatch="/////", edgecolor=MASKED, linewidth=0, alpha=0.6,
            )
        )  # fmt: skip
    for top, left, bottom, right in layout.outlines():
        y, x = layout.stride
        box = (top * y, left * x, min(bottom * y, height), min(right * x, width))
        outline(axes, box, LINES, 0.6)
    outline(axes, layout.box(cell), QUERY, 1.6)
    axes.set_title(f"block {layer.number}", loc="left")
    note(axes, _described_block(layer, cell), style)


def _described_block(layer: LayerAttention, cell: Cell) -> str:
    layout = layer.layout
    words = f"{layout.grid[0]} × {layout.grid[1]} cells"
    if layout.shift is not None and any(layout.shift):
        words += f", shifted by {layout.shift[0]}"
    on_cells = float(layer.row(cell)[0].sum(-1).mean())
    if on_cells < 0.9995:
        words += f", {1 - on_cells:.0%} on padding"
    return words


def _described_layer(layer: LayerAttention) -> str:
    window, shift = layer.layout.window or (0, 0), layer.layout.shift or (0, 0)
    moved = f", shift {shift[0]} × {shift[1]}" if any(shift) else ""
    return f"{layer.name} (window {window[0]} × {window[1]}{moved})"
