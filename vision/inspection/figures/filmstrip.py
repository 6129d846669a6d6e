"""A rollout as it grows from the last layer to the first, and every method side by side."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from vision.data.images.decode import Pixels
from vision.inspection.capture.captured import Captured
from vision.inspection.explain import Explanation
from vision.inspection.figures.drawing import (
    SCREEN,
    Array,
    Caption,
    Drawing,
    Style,
    colour_limit,
    method_line,
    method_lines,
    new_figure,
)
from vision.inspection.figures.parts import (
    bare,
    colour_bar,
    fitted,
    note,
    shortened,
    show_image,
    show_map,
    tiles,
)
from vision.inspection.methods.layer_maps import feature_components, norm_outliers, token_norms
from vision.inspection.methods.rollout import rollout_steps
from vision.terminal import percent

COLUMNS = 6
TILE = 1.7
"""Inches."""


def film_strip(
    captured: Captured, pixels: Pixels, seed: Tensor, *, query: str, style: Style = SCREEN
) -> Drawing:
    """Rollout of a query (b 1 n) down to each layer, from the last to the first."""
    steps = [
        (layer, layer.layout.to_grid(rows[0, 0]).float().cpu().numpy() * layer.layout.tokens)
        for layer, rows in rollout_steps(captured, seed)
    ]
    limit, beyond = colour_limit([values for _, values in steps], style.percentile)
    with new_figure(style, *_size(len(steps) + 1, pixels, 0.4, 0.85)) as figure:
        first, *panels = tiles(figure, len(steps) + 1, COLUMNS)
        show_image(first, pixels)
        first.set_title("input", loc="left")
        for axes, (layer, values) in zip(panels, steps, strict=True):
            show_map(axes, pixels, values, limit)
            axes.set_title(f"into layer {layer.number}", loc="left")
            y, x = layer.layout.grid
            note(axes, f"{y} × {x} cells · max {values.max():.3g} ×", style)
        colour_bar(figure, limit, beyond, ax=[first, *panels])
    caption = Caption(
        shows="Attention rollout layer by layer: the share of each cell that enters a layer in "
        "the query, from the last layer (first panel) down to the first.",
        facts=(
            ("Query", query),
            ("Layers", ", ".join(layer.name for layer, _ in steps)),
            (
                "Scale",
                f"multiples of a uniform map, linear from 0; colours end at {limit:.3g} "
                f"({style.percentile:g}th percentile of all panels); cells are not interpolated",
            ),
        ),
        methods=(method_line("rollout"),),
    )
    numbers = {f"into_layer{layer.number}": values for layer, values in steps}
    return Drawing(figure, style, caption, {"image": pixels, **numbers})


def comparison(
    explanation: Explanation,
    captured: Captured,
    *,
    scores: Mapping[str, Mapping[str, float]] | None = None,
    style: Style = SCREEN,
) -> Drawing:
    """Every method for one image and one class, each with its own scale, and the features.

    scores: by method, shown below its map.
    """
    pixels = explanation.pixels
    heatmaps = [h for h in explanation.heatmaps if h.choice.name not in ("norm", "pca")]
    features = _features(captured)
    number = 1 + len(heatmaps) + len(features)
    with new_figure(style, *_size(number, pixels, 0.85 if scores else 0.58, 0.1)) as figure:
        first, *panels = tiles(figure, number, COLUMNS)
        show_image(first, pixels)
        first.set_title("Input", loc="left")
        for best in explanation.top[:1]:
            note(first, f"{shortened(best.name, 26)} {percent(best.probability, 0)}", style)
        for axes, heatmap in zip(panels, heatmaps, strict=False):
            limit, _ = colour_limit([heatmap.values], style.percentile)
            show_map(axes, pixels, heatmap.pixels, limit)
            axes.set_title(fitted(heatmap.choice.title, TILE, style.size), loc="left")
            words = [f"max {heatmap.values.max():.3g} × uniform"]
            for metric, value in (scores or {}).get(str(heatmap.choice), {}).items():
                words.append(f"{metric.replace('_', ' ')} {value:.0f}")
            note(axes, "\n".join(words[:3]), style)
        for axes, (title, image, about) in zip(panels[len(heatmaps) :], features, strict=True):
            extent = (0, pixels.shape[1], pixels.shape[0], 0)
            axes.imshow(image, cmap="viridis", interpolation="nearest", extent=extent)
            axes.set_anchor("N")
            bare(axes)
            axes.set_title(title, loc="left")
            note(axes, about, style)
    explained = next((h.explained for h in heatmaps if h.explained is not None), None)
    of_class = f" Maps of a class explain {explained.name}." if explained is not None else ""
    caption = Caption(
        shows=f"Every method for one image.{of_class}",
        facts=(
            ("Model", explanation.model),
            (
                "Scale",
                "multiples of a uniform map; each map has its own scale, from 0 to the "
                f"{style.percentile:g}th percentile of its values, at least 2",
            ),
            ("Between cells", style.interpolation),
            *((title, f"{words}.") for title, _, words in features),
        ),
        methods=method_lines(heatmaps),
    )
    numbers = {str(h.choice).replace(":", "_"): h.values for h in heatmaps} | {
        title.lower().replace(" ", "_"): image for title, image, _ in features
    }
    return Drawing(figure, style, caption, {"image": pixels, **numbers})


def _size(number: int, pixels: Pixels, between: float, below: float) -> tuple[float, float]:
    """Width and height in inches of a number of tiles, with room for text."""
    columns = min(COLUMNS, number)
    ratio = pixels.shape[0] / pixels.shape[1]
    return TILE * columns + 0.1, (TILE * ratio + between) * -(-number // columns) + below


def _features(captured: Captured) -> list[tuple[str, Array, str]]:
    """Title, image and text: norms of the last tokens, and their three main components."""
    if captured.tokens is None:
        return []
    norms = captured.layout.to_grid(token_norms(captured))
    values = norms[0].cpu().numpy()
    outliers = int(norm_outliers(norms)[0].sum())
    words = f"{values.min():.3g} … {values.max():.3g}, {outliers} outliers"
    found = [("Token norms", values, words)]
    if captured.layout.cells >= 3 and captured.tokens.shape[-1] >= 3:
        parts = feature_components(captured, 3)[0].cpu().numpy()
        low, high = parts.min(axis=(0, 1)), parts.max(axis=(0, 1))
        colours = (parts - low) / np.maximum(high - low, 1e-12)
        found.append(("Feature PCA", colours, "three components as RGB"))
    return found
