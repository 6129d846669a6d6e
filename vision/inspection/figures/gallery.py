"""Several images, a row for each: input and maps of the most probable class."""

from collections.abc import Sequence

from vision.inspection.explain import Look
from vision.inspection.figures.captions import Caption, method_lines
from vision.inspection.figures.drawing import Drawing, Style, colour_limit, new_figure
from vision.inspection.figures.parts import fitted, note, scale_in, show_image, show_map

TILE = 1.5


def gallery(
    looks: Sequence[Look],
    *,
    style: Style | None = None,
    percentile: float = 99.5,
    title: str = "",
) -> Drawing:
    """Images one below the other, methods side by side, one scale for each method."""
    style = style or Style()
    requests = list({str(p.request): p.request for p in looks[0].panels}.values())
    limits = [
        colour_limit([look.panels_of(r)[0].values for look in looks], percentile) for r in requests
    ]
    ratio = looks[0].pixels.shape[0] / looks[0].pixels.shape[1]
    width = TILE * (len(requests) + 1) + 0.2
    height = (TILE * ratio + 0.24) * len(looks) + 0.9
    with new_figure(style, width, height) as figure:
        heights = [*[1.0] * len(looks), 0.06]
        grid = figure.add_gridspec(len(looks) + 1, len(requests) + 1, height_ratios=heights)
        for r, look in enumerate(looks):
            axes = figure.add_subplot(grid[r, 0])
            show_image(axes, look.pixels)
            if look.answers:
                best = look.answers[0]
                words = f"{best.name} {best.probability:.0%}"
                note(axes, fitted(words, TILE, style.size * 0.75, lines=1), style)
            for c, request in enumerate(requests):
                panel = look.panels_of(request)[0]
                axes = figure.add_subplot(grid[r, c + 1])
                show_map(axes, look.pixels, panel.pixels, limits[c][0])
                if r == 0:
                    axes.set_title(fitted(request.title, TILE, style.size))
        for c, (limit, beyond) in enumerate(limits):
            scale_in(figure.add_subplot(grid[-1, c + 1]), limit, beyond)
        if title and not style.paper:
            figure.suptitle(title, x=0.01, ha="left", fontsize=style.size * 1.15, weight="bold")
    caption = Caption(
        shows="Where the model looks: a row for each image, with its most probable class below "
        "it; maps of a class are of that one.",
        facts=(("Scale", "multiples of a uniform map, linear from 0; one scale for each method"),),
        methods=method_lines(panel for look in looks for panel in look.panels),
    )
    numbers = {
        f"image{i}_{str(panel.request).replace(':', '_')}": panel.values
        for i, look in enumerate(looks)
        for panel in look.panels
    }
    return Drawing(figure, style, caption, numbers)
