"""Several images, a row for each: input and maps of the most probable class."""

from collections.abc import Sequence

from vision.inspection.explain import Explanation
from vision.inspection.figures.captions import Caption, method_lines
from vision.inspection.figures.drawing import SCREEN, Drawing, Style, colour_limit, new_figure
from vision.inspection.figures.parts import (
    fitted,
    note,
    scale_in,
    set_title,
    show_image,
    show_map,
)

TILE = 1.5
"""Inches."""


def gallery(
    explanations: Sequence[Explanation], *, style: Style = SCREEN, title: str = ""
) -> Drawing:
    """Images one below the other, methods side by side, one scale for each method."""
    columns = list(zip(*(e.heatmaps for e in explanations), strict=True))
    limits = [colour_limit([h.values for h in column], style.percentile) for column in columns]
    ratio = explanations[0].pixels.shape[0] / explanations[0].pixels.shape[1]
    rows = len(explanations)
    width, height = TILE * (len(columns) + 1) + 0.2, (TILE * ratio + 0.24) * rows + 0.9
    with new_figure(style, width, height) as figure:
        grid = figure.add_gridspec(rows + 1, len(columns) + 1, height_ratios=[*[1.0] * rows, 0.06])
        for r, explanation in enumerate(explanations):
            axes = figure.add_subplot(grid[r, 0])
            show_image(axes, explanation.pixels)
            for best in explanation.top[:1]:
                words = f"{best.name} {best.probability:.0%}"
                note(axes, fitted(words, TILE, style.size * 0.75, lines=1), style)
            for c, heatmap in enumerate(explanation.heatmaps):
                axes = figure.add_subplot(grid[r, c + 1])
                show_map(axes, explanation.pixels, heatmap.pixels, limits[c][0])
                if r == 0:
                    axes.set_title(fitted(heatmap.choice.title, TILE, style.size))
        for c, (limit, beyond) in enumerate(limits):
            scale_in(figure.add_subplot(grid[-1, c + 1]), limit, beyond)
        set_title(figure, title, style)
    caption = Caption(
        shows="Where the model looks: a row for each image, with its most probable class below "
        "it, which is the class that maps of a class explain.",
        facts=(("Scale", "multiples of a uniform map, linear from 0; one scale for each method"),),
        methods=method_lines(h for e in explanations for h in e.heatmaps),
    )
    numbers = {
        f"image{i}_{str(heatmap.choice).replace(':', '_')}": heatmap.values
        for i, explanation in enumerate(explanations)
        for heatmap in explanation.heatmaps
    }
    return Drawing(figure, style, caption, numbers)
