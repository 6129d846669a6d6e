"""The figure of ImageNet's test sets: accuracy on each, and over the severity of corruptions."""

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vision.evaluation.imagenet_family.family_report import FamilyModel, FamilyReport
from vision.evaluation.imagenet_family.family_sets import SEVERITIES, TITLES

COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#7a5195", "#e68a00", "#5f6368")
_BAR = 0.8
"""Height of the bars of a set, all models together."""


def draw_family(report: FamilyReport) -> bytes:
    """The figure as PNG."""
    names = [name for name in TITLES if name in report.models[0].sets]
    corrupted = bool(report.models[0].corruptions)
    parts = [part for part, there in (("sets", bool(names)), ("c", corrupted)) if there]
    rows = max(len(names), 3) * max(len(report.models), 2)
    figure = Figure(figsize=(1.5 + 5 * len(parts), 1.6 + 0.2 * rows), layout="constrained")
    panels = dict(zip(parts, figure.subplots(1, len(parts), squeeze=False)[0], strict=True))
    if "sets" in panels:
        _bars(panels["sets"], report, names)
    if "c" in panels:
        _severities(panels["c"], report)
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    if len(report.models) > 1:
        handles, labels = next(iter(panels.values())).get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    return drawn.getvalue()


def _bars(axes: Axes, report: FamilyReport, names: list[str]) -> None:
    """A bar for every set and model, with its confidence interval."""
    height = _BAR / len(report.models)
    for number, model in enumerate(report.models):
        places = np.arange(len(names)) + (number + 0.5) * height - _BAR / 2
        values = np.array([100 * model.sets[name].top1 for name in names])
        axes.barh(places, values, 0.9 * height, color=_colour(number), label=_label(model))
        for place, value, name in zip(places, values, names, strict=True):
            right = value
            if (limits := report.interval(model.sets[name])) is not None:
                low, right = (100 * limit for limit in limits)
                axes.plot([low, right], [place, place], color="#202124", linewidth=1)
            axes.annotate(
                f"{value:.1f}", (right, place), (4, 0), textcoords="offset points", va="center"
            )
    axes.set_yticks(range(len(names)), [TITLES[name] for name in names])
    axes.invert_yaxis()
    axes.set(xlabel="top-1 accuracy (%)", xlim=(0, 109), xticks=range(0, 101, 20))


def _severities(axes: Axes, report: FamilyReport) -> None:
    """Mean accuracy over the corruptions of each severity; each corruption as a thin line."""
    for number, model in enumerate(report.models):
        by_severity = {
            severity: [e[severity] for e in model.corruptions.values() if severity in e]
            for severity in SEVERITIES
        }
        there = [severity for severity, errors in by_severity.items() if errors]
        for errors in model.corruptions.values():
            values = [100 * (1 - error) for error in errors.values()]
            axes.plot(list(errors), values, color=_colour(number), alpha=0.2, linewidth=0.8)
        means = [100 * (1 - float(np.mean(by_severity[severity]))) for severity in there]
        axes.plot(there, means, "o-", color=_colour(number), label=_label(model))
    axes.set(
        title="ImageNet-C: mean, and each corruption",
        xlabel="severity",
        ylabel="top-1 accuracy (%)",
        xticks=list(SEVERITIES),
    )


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _label(model: FamilyModel) -> str:
    # Matplotlib leaves names with a leading underscore out of a legend, and sets $…$ as formulas.
    return model.name.lstrip("_").replace("$", r"\$")
