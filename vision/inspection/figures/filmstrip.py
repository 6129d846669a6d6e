"""A rollout as it grows from the last layer to the first, and every method side by side."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from vision.inspection.capture.recording import Captured
from vision.inspection.explain import Look, Pixels
from vision.inspection.figures.captions import Caption, method_lines
from vision.inspection.figures.drawing import Array, Drawing, Style, colour_limit, new_figure
from vision.inspection.figures.parts import (
    bare,
    colour_bar,
    fitted,
    note,
    shortened,
    show_image,
    show_map,
)
from vision.inspection.methods.rollout import rollout_steps
from vision.inspection.methods.token_maps import feature_components, norm_map

COLUMNS = 6


def film_strip(
    captured: Captured,
    pixels: Pixels,
    seed: Tensor,
    *,
    query: str,
    residual: float = 0.5,
    style: Style | None = None,
    percentile: float = 99.5,
) -> Drawing:
    """Rollout of a query (b 1 n) down to each layer, from the last to the first."""
    style = style or Style()
    steps = [
        (layer, layer.layout.to_grid(rows[0, 0]).float().cpu().numpy() * layer.layout.tokens)
        for layer, rows in rollout_steps(captured, seed, residual=residual)
    ]
    limit, beyond = colour_limit([values for _, values in steps], percentile)
    columns = min(COLUMNS, len(steps) + 1)
    rows = -(-(len(steps) + 1) // columns)
    ratio = pixels.shape[0] / pixels.shape[1]
    tile = 1.7
    with new_figure(style, tile * columns + 0.1, (tile * ratio + 0.4) * rows + 0.85) as figure:
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(steps) + 1 :]:
            axes.set_visible(False)
        show_image(grid.flat[0], pixels)
        grid.flat[0].set_title("input", loc="left")
        for axes, (layer, values) in zip(grid.flat[1:], steps, strict=False):
            show_map(axes, pixels, values, limit)
            axes.set_title(f"into layer {layer.number}", loc="left")
            y, x = layer.layout.grid
            note(axes, f"{y} × {x} cells · max {values.max():.3g} ×", style)
        used = list(grid.flat[: len(steps) + 1])
        colour_bar(figure, used, limit, beyond, share=0.5)
    caption = Caption(
        shows="Attention rollout layer by layer: how much of each cell that enters a layer is in "
        "the query, from the last layer (first panel) down to the first.",
        facts=(
            ("Query", query),
            ("Layers", ", ".join(layer.name for layer, _ in steps)),
            (
                "Scale",
                f"multiples of a uniform map, linear from 0; colours end at {limit:.3g} "
                f"({percentile:g}th percentile of all panels); cells are shown as they are",
            ),
        ),
        methods=(
            f"Rollout: r ← r · rownorm(a A + (1 - a) I), a = {1 - residual:g}, mean over heads. "
            "Abnar & Zuidema, ACL 2020.",
        ),
    )
    numbers = {f"into_layer{layer.number}": values for layer, values in steps}
    return Drawing(figure, style, caption, {"image": pixels, **numbers})


def comparison(
    look: Look,
    captured: Captured,
    *,
    scores: Mapping[str, Mapping[str, float]] | None = None,
    style: Style | None = None,
    percentile: float = 99.5,
    interpolation: str = "bilinear",
) -> Drawing:
    """Every method for one image and one class, each with a scale of its own, and the features.

    scores: by method as it was asked for, shown below its map.
    """
    style = style or Style()
    panels = [panel for panel in look.panels if panel.request.method not in ("norm", "pca")]
    extra = _features(captured)
    number = 1 + len(panels) + len(extra)
    columns = min(COLUMNS, number)
    rows = -(-number // columns)
    ratio = look.pixels.shape[0] / look.pixels.shape[1]
    tile = 1.7
    with new_figure(
        style, tile * columns + 0.1, (tile * ratio + (0.85 if scores else 0.58)) * rows + 0.1
    ) as figure:
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[number:]:
            axes.set_visible(False)
        show_image(grid.flat[0], look.pixels)
        grid.flat[0].set_title("Input", loc="left")
        if look.answers:
            best = look.answers[0]
            note(grid.flat[0], f"{shortened(best.name, 26)} {best.probability:.0%}", style)
        for axes, panel in zip(grid.flat[1:], panels, strict=False):
            limit, _ = colour_limit([panel.values], percentile)
            show_map(axes, look.pixels, panel.pixels, limit)
            axes.set_title(fitted(panel.request.title, tile, style.size), loc="left")
            words = [f"max {panel.values.max():.3g} × uniform"]
            for metric, value in (scores or {}).get(str(panel.request), {}).items():
                words.append(f"{metric.replace('_', ' ')} {value:.0f}")
            note(axes, "\n".join(words[:3]), style)
        for axes, (title, image, about) in zip(grid.flat[1 + len(panels) :], extra, strict=False):
            _image(axes, image, look.pixels)
            axes.set_title(title, loc="left")
            note(axes, about, style)
    answer = next((p.answer for p in panels if p.answer is not None), None)
    of_class = f" Maps of a class are of {answer.name}." if answer is not None else ""
    caption = Caption(
        shows=f"Every method for one image.{of_class}",
        facts=(
            ("Model", look.model),
            (
                "Scale",
                "multiples of a uniform map; each map has a scale of its own, from 0 to the "
                f"{percentile:g}th percentile of its values, at least 2",
            ),
            ("Between cells", interpolation),
            *((title, f"{words}.") for title, _, words in extra),
        ),
        methods=method_lines(panels),
    )
    numbers = {str(p.request).replace(":", "_"): p.values for p in panels} | {
        title.lower().replace(" ", "_"): image for title, image, _ in extra
    }
    return Drawing(figure, style, caption, {"image": look.pixels, **numbers})


def _features(captured: Captured) -> list[tuple[str, Array, str]]:
    """Title, image and words: norms of the last tokens, and their three main components."""
    if captured.tokens is None:
        return []
    norms = norm_map(captured)
    values = norms.norms[0].cpu().numpy()
    outliers = int(norms.outliers[0].sum())
    found = [
        (
            "Token norms",
            values,
            f"{values.min():.3g} … {values.max():.3g}, {outliers} outliers",
        )
    ]
    if captured.layout.cells >= 3 and captured.tokens.shape[-1] >= 3:
        parts = feature_components(captured, 3)[0].cpu().numpy()
        low, high = parts.min(axis=(0, 1)), parts.max(axis=(0, 1))
        colours = (parts - low) / np.maximum(high - low, 1e-12)
        found.append(("Feature PCA", colours, "three components as RGB"))
    return found


def _image(axes: Axes, values: Array, pixels: Pixels) -> None:
    height, width = pixels.shape[:2]
    axes.imshow(values, cmap="viridis", interpolation="nearest", extent=(0, width, height, 0))
    axes.set_anchor("N")
    bare(axes)
