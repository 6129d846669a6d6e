"""The figures of the guides, drawn from runs.

    python docs/figures.py curves docs/images/cifar10.png outputs/cifar10_vit outputs/cifar10_swin
    python docs/figures.py data docs/images/lecture_data.png outputs/…
    python docs/figures.py bars docs/images/lecture_positions.png model.positions outputs/…
    python docs/figures.py ladder docs/images/lecture_ladder.png outputs/…
    python docs/figures.py memory docs/images/lecture_memory.png

`curves` shows the validation accuracy of runs over the images seen; `data` the last accuracy over
the number of training images, a line for each model; `bars` the last accuracy for each value of a
setting; `ladder` the last accuracy of each model, in the order given. Runs that differ only in
their seed are one line or bar, except in `ladder`: their mean, each run as a dot.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from vision.cli.composition import compose
from vision.config import ConfigError, parse
from vision.models.configs import ModelConfig
from vision.models.cost.count import cost
from vision.sweeps.outcome import evaluations, find_runs
from vision.training.run.run_folder import Run
from vision.training.run.run_settings import flat

COLOURS = ["#1b6ca8", "#d1495b", "#2e933c", "#7a5195", "#e68a00"]


def settings_of(folder: Path) -> dict[str, Any]:
    """A run's settings by dotted names."""
    return flat(Run(folder).stored_settings())


def accuracies(folder: Path) -> tuple[list[float], list[float]]:
    """Thousands of images seen, and the accuracy in percent, of every evaluation."""
    batch = settings_of(folder)["batch_size"]
    events = [event for event in evaluations(Run(folder)) if event["split"] == "val"]
    seen = [event["step"] * batch / 1000 for event in events]
    return seen, [100 * event["top1"] for event in events]


def model_of(folder: Path) -> str:
    """What to call a run's model."""
    settings = settings_of(folder)
    if settings.get("model.patch_size") == 1:
        return "pixel transformer"
    names = {"vit": "ViT", "swin": "Swin", "swin_v2": "Swin V2", "lr_net": "LR-Net"}
    return names.get(settings["model.kind"], settings.get("model.name", ""))


def curves(axes: Axes, folders: list[Path]) -> None:
    """Accuracy over images seen."""
    ends = []
    for folder, colour in zip(folders, COLOURS, strict=False):
        seen, values = accuracies(folder)
        axes.plot(seen, values, "o-", color=colour, markersize=3)
        ends.append((values[-1], seen[-1], f" {model_of(folder)} {values[-1]:.1f} %", colour))
    axes.set(xlabel="images seen (thousands)", ylabel="validation accuracy (%)")
    axes.margins(x=0.2)
    low, high = axes.get_ylim()
    place = low
    for value, last, text, colour in sorted(ends):
        place = max(value, place + 0.06 * (high - low))  # names do not cover each other
        axes.annotate(text, (last, place), color=colour, va="center")


def data(axes: Axes, folders: list[Path]) -> None:
    """Accuracy over the number of training images."""
    points: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        settings = settings_of(folder)
        images = round(settings["data.train_samples"] * settings["data.train_fraction"])
        points[model_of(folder)][images].append(accuracies(folder)[1][-1])
    for (model, line), colour in zip(sorted(points.items()), COLOURS, strict=False):
        numbers = sorted(line)
        means = [statistics.fmean(line[number]) for number in numbers]
        axes.plot(numbers, means, "-", color=colour)
        for number in numbers:
            axes.plot([number] * len(line[number]), line[number], "o", color=colour, markersize=4)
        axes.annotate(f" {model}", (numbers[-1], means[-1]), color=colour)
    axes.set(xlabel="training images", ylabel="validation accuracy (%)", xscale="log")
    shown = sorted({number for line in points.values() for number in line})
    axes.set_xticks(shown, [f"{number:,}" for number in shown])
    axes.minorticks_off()
    axes.margins(x=0.2)


def bars(axes: Axes, folders: list[Path], setting: str) -> None:
    """Accuracy for each value of a setting, or for each combination of several (a,b)."""
    found: dict[str, list[float]] = defaultdict(list)
    for folder in folders:
        settings = settings_of(folder)
        label = ", ".join(f"{s.rpartition('.')[2]} {settings[s]}" for s in setting.split(","))
        found[label].append(accuracies(folder)[1][-1])
    for row, (label, values) in enumerate(reversed(found.items())):
        mean = statistics.fmean(values)
        axes.barh(row, mean, color=COLOURS[0], alpha=0.35)
        axes.plot(values, [row] * len(values), "o", color=COLOURS[0], markersize=4)
        axes.annotate(
            f"{label}: {mean:.1f} % ", (0, row), (4, 0), textcoords="offset points", va="center"
        )
    axes.set(xlabel="validation accuracy (%)", yticks=[])


def ladder(axes: Axes, folders: list[Path]) -> None:
    """Accuracy of each model, with its size and that of its images."""
    for row, folder in enumerate(reversed(folders)):
        value, size = accuracies(folder)[1][-1], settings_of(folder)["data.image_size"]
        parameters = Run(folder).status()["parameters"] / 1e6
        axes.barh(row, value, color=COLOURS[0], alpha=0.35)
        words = f"{model_of(folder)}, {parameters:.1f} M, {size} px: {value:.1f} %"
        axes.annotate(words, (0, row), (4, 0), textcoords="offset points", va="center")
    axes.set(xlabel="validation accuracy (%)", yticks=[], xlim=(0, 100))


def memory(axes: Axes) -> None:
    """Bytes of all attention matrices of one image over its size."""
    sizes = [224, 320, 448, 640, 896]
    for name, kind, label, colour in (
        ("swin_tiny", "everywhere", "Swin-T's grids, global", COLOURS[2]),
        ("vit_small", "tokens", "ViT-S/16, global", COLOURS[0]),
        ("swin_tiny", "tokens", "Swin-T, windows", COLOURS[1]),
    ):
        values, _ = compose("info", [f"model={name}"])
        config: ModelConfig = parse(ModelConfig, values["model"])  # type: ignore[arg-type]
        totals = []
        for size in sizes:
            stored = cost(config, (size, size)).attention_bytes
            assert stored is not None
            totals.append(stored[kind] / 2**20)
        axes.plot(sizes, totals, "o-", color=colour, markersize=3)
        axes.annotate(f" {label}", (sizes[-1], totals[-1]), color=colour, va="center")
    axes.set(xlabel="image size (pixels)", ylabel="attention matrices, fp32 (MiB)", yscale="log")
    axes.margins(x=0.25)


def main() -> None:
    """Draw one figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=["curves", "data", "bars", "ladder", "memory"])
    parser.add_argument("output", type=Path)
    parser.add_argument("rest", nargs="*", help="for bars the setting, then the runs' folders")
    arguments = parser.parse_args()
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    match arguments.figure, arguments.rest:
        case "memory", []:
            memory(axes)
        case "bars", [setting, *places] if places:
            bars(axes, find_runs(places)[0], setting)
        case "curves", places if places:
            curves(axes, find_runs(places)[0])
        case "ladder", places if places:
            ladder(axes, find_runs(places)[0])
        case "data", places if places:
            data(axes, find_runs(places)[0])
        case _:
            parser.error(f"{arguments.figure} cannot be drawn from {arguments.rest}.")
    figure.savefig(arguments.output, dpi=150)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
