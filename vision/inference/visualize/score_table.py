"""`vision visualize score=true`: a table of the scores of every method."""

import csv
import io
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from vision.config import ConfigError
from vision.data.configs import ShapesConfig
from vision.data.images.decode import UnreadableImageError
from vision.data.sources.shapes import CLASSES
from vision.files import spreadsheet_cell, write_text
from vision.inference.visualize.configs import VisualizeConfig
from vision.inference.visualize.draw import VisualizedModel
from vision.inference.visualize.images import Item, two_object_pairs
from vision.inspection.explain import settings_error
from vision.inspection.trust.scoring import BASELINES, METRICS, Pair, Sample, score
from vision.terminal import plain, print_wide, progress_bar

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

Scores = dict[str, dict[str, dict[str, float]]]
"""By model, method and metric."""


def score_all(
    models: Sequence[VisualizedModel], items: Sequence[Item], config: VisualizeConfig
) -> int:
    """Score every method of every model, print and store the table; returns the exit code."""
    found: Scores = {}
    problems: dict[str, None] = {}
    count = 0
    with progress_bar() as progress:
        for model in models:
            samples, bad = _samples(model, items)
            problems.update(dict.fromkeys(bad))
            if not samples:
                raise ConfigError("score: no image is left to score maps on.")
            found[model.name] = _scored(model, samples, config, progress)
            count = len(samples)
    show(found, config.format)
    _store(found, count, config)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _scored(
    model: VisualizedModel, samples: Sequence[Sample], config: VisualizeConfig, progress: "Progress"
) -> dict[str, dict[str, float]]:
    task = progress.add_task(model.name, total=len(samples))
    pairs: list[Pair] = []
    if isinstance(config.data, ShapesConfig) and set(CLASSES) <= set(model.loaded.classes):
        pairs = two_object_pairs(model.loaded, len(samples), config.seed)
    with settings_error(f"score: {model.name}"):
        return score(
            model.loaded,
            samples,
            model.every,
            pairs=pairs,
            steps=config.steps,
            seed=config.seed,
            batch_size=config.batch_size,
            advance=partial(progress.advance, task),
        )


def _samples(model: VisualizedModel, items: Sequence[Item]) -> tuple[list[Sample], list[str]]:
    """Images with their masks, and the problems of others."""
    samples, bad = [], []
    for item in items:
        try:
            pixels = item.pixels(model.loaded)
            mask = item.object_mask(model.loaded)
        except UnreadableImageError as error:
            bad.append(str(error))
            continue
        if item.mask is not None and mask is None:
            bad.append(f"{item.name}: nothing of the object is left in what the model sees.")
            continue
        samples.append(Sample(pixels, mask))
    return samples, bad


def show(found: Scores, kind: str) -> None:
    """Print the scores."""
    match kind:
        case "json":
            print(json.dumps(found, indent=1))
        case "csv":
            print(_csv(found), end="")
        case _:
            print_wide(table(found))


def table(found: Scores) -> "Table":
    """For a terminal: a row for each method, baselines first."""
    from rich.table import Table

    metrics = _metrics(found)
    result = Table(caption="all in percent; arrows point to the better direction")
    result.add_column("method")
    for metric in metrics:
        result.add_column(METRICS[metric], justify="right")
    for model, methods in found.items():
        if len(found) > 1:
            result.add_row(plain(model), style="bold")
        for method, numbers in methods.items():
            style = "dim" if method in BASELINES else ""
            values = (f"{numbers[m]:.1f}" if m in numbers else "–" for m in metrics)
            result.add_row(method, *values, style=style)
        result.add_section()
    return result


def _metrics(found: Scores) -> list[str]:
    """The metrics that some method has, in order."""
    there = {m for methods in found.values() for numbers in methods.values() for m in numbers}
    return [metric for metric in METRICS if metric in there]


def _csv(found: Scores) -> str:
    stream = io.StringIO()
    metrics = _metrics(found)
    writer = csv.writer(stream)
    writer.writerow(["model", "method", *metrics])
    for model, methods in found.items():
        for method, numbers in methods.items():
            names = map(spreadsheet_cell, (model, method))
            writer.writerow([*names, *(numbers.get(m, "") for m in metrics)])
    return stream.getvalue()


def _store(found: Scores, images: int, config: VisualizeConfig) -> None:
    config.output.mkdir(parents=True, exist_ok=True)
    content = {
        "images": images,
        "steps": config.steps,
        "seed": config.seed,
        "checkpoint": list(config.checkpoint),
        "scores": found,
    }
    write_text(config.output / "scores.json", json.dumps(content, indent=1) + "\n")
    write_text(config.output / "scores.csv", _csv(found))
    print(f"The scores are in {config.output}/scores.json and scores.csv.", file=sys.stderr)
