"""Attention as the model computed it: of every head, of some patches, through Swin's windows.

Axes: b batch · h heads · n tokens · y, x rows and columns of cells.
"""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes

from vision.data.images.decode import Pixels
from vision.inspection.capture.captured import Captured, LayerAttention
from vision.inspection.capture.token_layout import Cell, Layout
from vision.inspection.figures.drawing import (
    MARK,
    SCREEN,
    Array,
    Caption,
    Drawing,
    Style,
    colour_limit,
    method_line,
    new_figure,
)
from vision.inspection.figures.parts import (
    COLOURS,
    bare,
    colour_bar,
    evenly_spread,
    mosaic,
    note,
    outline,
    set_title,
    show_image,
    show_map,
    tiles,
)
from vision.inspection.methods.rollout import Query, carried, seed_of, without_padding
from vision.terminal import percent

GAMMA = 0.5
"""Heads differ by orders of magnitude: colours follow the square root of the value."""
TILE_PIXELS = 120
PER_ROW = 12
"""Heads in a row; a layer with more has several rows."""
MOST_LAYERS = 6
"""Layers in the sheet of queries."""
COLUMNS = 6
"""Blocks in a row of the microscope."""
LINES, QUERY, MASKED = "#ffffff", "#4cc9f0", "#ffffff"


def heads_sheet(
    captured: Captured, pixels: Pixels, *, query: Query = "pool", style: Style = SCREEN
) -> Drawing:
    """Heads × layers of one image, as multiples of uniform attention, with one scale for all."""
    maps = [_per_head(layer, captured, query) for layer in captured.layers]
    limit, beyond = colour_limit(maps, style.percentile)
    columns = min(PER_ROW, max(len(m) for m in maps))
    heights = [-(-len(m) // columns) for m in maps]
    ratio = pixels.shape[0] / pixels.shape[1]
    tile = min(1.2, 10 / columns)
    height = (tile * ratio + 0.06) * sum(heights) + 1.0
    with new_figure(style, max(tile * columns + 0.4, 4.5), height) as figure:
        grid = figure.add_gridspec(len(maps), 1, height_ratios=heights)
        drawn: list[Axes] = []
        for i, (layer, values) in enumerate(zip(captured.layers, maps, strict=True)):
            axes = figure.add_subplot(grid[i])
            drawn.append(axes)
            _tiles(axes, values, columns, limit, ratio)
            size = style.size * 0.9
            axes.set_ylabel(f"{layer.number}", rotation=0, ha="right", va="center", fontsize=size)
        colour_bar(figure, limit, beyond, gamma=GAMMA, ax=drawn)
        title = f"Every head of {captured.model}: where {_named(captured, query)} looks"
        set_title(figure, title, style)
    caption = Caption(
        shows=f"The attention of {_named(captured, query)} in every layer (from top "
        "to bottom) and head (from left to right).",
        facts=(
            ("Query", _named(captured, query)),
            ("Layers", ", ".join(layer.name for layer in captured.layers)),
            (
                "Scale",
                "multiples of uniform attention; colours follow the square root of the value "
                f"and end at {limit:.3g} ({style.percentile:g}th percentile of all heads)",
            ),
        ),
        methods=(method_line("attention", layer="all", head="all"),),
    )
    numbers = {f"layer{layer.number}": m for layer, m in zip(captured.layers, maps, strict=True)}
    return Drawing(figure, style, caption, {"image": pixels, **numbers})


def _per_head(layer: LayerAttention, captured: Captured, query: Query) -> Array:
    """The first image's attention of every head, in multiples of uniform: (h y x)."""
    seed = seed_of(captured, query, layer=layer.number)[:1]
    heads = layer.weights[:1].unbind(layer.head_axis)
    rows = [carried(seed, without_padding(h, layer.layout), layer.layout)[0, 0] for h in heads]
    values = layer.layout.to_grid(torch.stack(rows))
    keys = layer.layout.tokens if query == "pool" else layer.layout.keys(query)
    return (values * keys).float().cpu().numpy()


def _tiles(axes: Axes, values: Array, columns: int, limit: float, ratio: float) -> None:
    """The heads of a layer as one image of equal tiles with white gaps."""
    height, width = round(TILE_PIXELS * ratio), TILE_PIXELS
    up = np.arange(height) * values.shape[1] // height
    left = np.arange(width) * values.shape[2] // width
    colours = COLOURS(np.clip(values / limit, 0, 1) ** GAMMA)[:, up][:, :, left]
    axes.imshow(mosaic(colours, columns, 4), interpolation="nearest")
    bare(axes)


def queries_sheet(
    captured: Captured,
    pixels: Pixels,
    places: Sequence[tuple[int, int]],
    *,
    style: Style = SCREEN,
) -> Drawing:
    """Where the patches at some pixels look in at most six layers, mean over heads.

    places: (row, column) in pixels, so that they mean the same in layers of different grids.
    """
    layers = [captured.layers[i] for i in evenly_spread(captured.depth, MOST_LAYERS)]
    maps = [[attention_row(layer, layer.layout.cell_at(p)) for layer in layers] for p in places]
    limit, beyond = colour_limit([m for row in maps for m in row], style.percentile)
    ratio = pixels.shape[0] / pixels.shape[1]
    tile = 1.45
    width, height = tile * (len(layers) + 1) + 0.2, (tile * ratio + 0.06) * len(places) + 0.9
    with new_figure(style, width, height) as figure:
        grid = figure.subplots(len(places), len(layers) + 1, squeeze=False)
        for r, place in enumerate(places):
            show_image(grid[r, 0], pixels)
            box = layers[-1].layout.field(layers[-1].layout.cell_at(place))
            outline(grid[r, 0], box, "#ffffff", 2.4)
            outline(grid[r, 0], box, MARK, 1.3)
            for c, layer in enumerate(layers):
                axes = grid[r, c + 1]
                show_map(axes, pixels, maps[r][c], limit, gamma=GAMMA)
                outline(axes, layer.layout.field(layer.layout.cell_at(place)), QUERY, 1.0)
                if r == 0:
                    axes.set_title(f"layer {layer.number}")
        if not style.paper:
            grid[0, 0].set_title("query")
        colour_bar(figure, limit, beyond, gamma=GAMMA, ax=list(grid.flat))
    caption = Caption(
        shows="Where patches look: a row for each query (framed), a column for each layer, mean "
        "over heads.",
        facts=(
            ("Queries", "pixels (row, column) " + ", ".join(map(str, places))),
            ("Layers", ", ".join(layer.name for layer in layers)),
            (
                "Scale",
                "multiples of uniform attention over the keys of the query; colours follow the "
                f"square root of the value and end at {limit:.3g}",
            ),
        ),
        methods=(method_line("attention", layer="see above"),),
    )
    numbers = {
        f"query{r}_layer{layer.number}": maps[r][c]
        for r in range(len(places))
        for c, layer in enumerate(layers)
    }
    return Drawing(figure, style, caption, {"image": pixels, **numbers})


def nine_places(image_size: tuple[int, int]) -> list[tuple[int, int]]:
    """The centres of an image's nine equal parts: (row, column) in pixels."""
    height, width = image_size
    return [
        (height * (2 * y + 1) // 6, width * (2 * x + 1) // 6) for y in range(3) for x in range(3)
    ]


def attention_row(layer: LayerAttention, cell: Cell) -> Array:
    """A cell's attention, mean over heads, in multiples of uniform: (y x)."""
    values = layer.layout.to_grid(layer.row(cell)[0].mean(0)) * layer.layout.keys(cell)
    return values.float().cpu().numpy()


def _named(captured: Captured, query: Query) -> str:
    """A query in words."""
    if query == "pool":
        pool = captured.anatomy.pool
        named = {
            "class": "the class token",
            "mean": "the mean of all cells",
            "attention": "the attention pooling",
        }
        return named.get(pool, pool)
    return f"the {query} token" if isinstance(query, str) else f"the cell {query}"


def microscope(
    captured: Captured, pixels: Pixels, place: tuple[int, int], *, style: Style = SCREEN
) -> Drawing:
    """The stitched attention of the patch at a pixel (row, column) in every block.

    White lines are windows as they lie in the image; cells that share the query's window but are
    masked from it, because a shift brought them together from opposite edges, are hatched.
    """
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
            cell = layer.layout.cell_at(place)
            shown = np.kron(values, np.ones(layer.layout.stride))
            show_map(axes, pixels, shown[: pixels.shape[0], : pixels.shape[1]], limit, gamma=GAMMA)
            _draw_windows(axes, layer.layout, cell)
            axes.set_title(f"block {layer.number}", loc="left")
            note(axes, _described_block(layer, cell), style)
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


def _draw_windows(axes: Axes, layout: Layout, cell: Cell) -> None:
    """Outlines of the windows and of the query; hatching of the cells masked from it."""
    for y, x in layout.masked(cell).nonzero().tolist():
        outline(axes, layout.box((y, x)), MASKED, 0, hatch="/////", alpha=0.6)
    (height, width), (y, x) = layout.image_size, layout.stride
    for top, left, bottom, right in layout.outlines():
        box = (top * y, left * x, min(bottom * y, height), min(right * x, width))
        outline(axes, box, LINES, 0.6)
    outline(axes, layout.field(cell), QUERY, 1.6)


def _described_block(layer: LayerAttention, cell: Cell) -> str:
    layout = layer.layout
    words = f"{layout.grid[0]} × {layout.grid[1]} cells"
    if layout.shift is not None and any(layout.shift):
        words += f", shifted by {layout.shift[0]}"
    on_cells = float(layer.row(cell)[0].sum(-1).mean())
    if on_cells < 0.9995:
        words += f", {percent(1 - on_cells, 0)} on padding"
    return words


def _described_layer(layer: LayerAttention) -> str:
    window, shift = layer.layout.window or (0, 0), layer.layout.shift or (0, 0)
    moved = f", shift {shift[0]} × {shift[1]}" if any(shift) else ""
    return f"{layer.name} (window {window[0]} × {window[1]}{moved})"
