"""`vision visualize score=true`: a table of how true the maps of each method are."""

import csv
import io
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vision.config import ConfigError
from vision.data.images.decode import UnreadableImageError
from vision.data.sources.shapes import CLASSES
from vision.inference.visualize.configs import VisualizeConfig
from vision.inference.visualize.draw import Viewer
from vision.inference.visualize.images import Item, has_pairs
from vision.inspection.figures.drawing import write_whole
from vision.inspection.trust.masks import Pair, Sample, two_object_pairs
from vision.inspection.trust.scoring import METRICS, score
from vision.terminal import plain, print_wide, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

Scores = dict[str, dict[str, dict[str, float]]]
"""By model, method and metric."""


def score_all(subjects: Sequence[Viewer], items: Sequence[Item], config: VisualizeConfig) -> int:
    """Score every method of every model, print and store the table; returns the exit code."""
    found: Scores = {}
    problems: dict[str, None] = {}
    count = 0
    with progress_bar() as progress:
        for subject in subjects:
            samples, bad = _samples(subject, items)
            problems.update(dict.fromkeys(bad))
            if not samples:
                raise ConfigError("score: there is no image left to score maps on.")
            task = progress.add_task(subject.name, total=len(samples))
            found[subject.name] = _scored(
                subject,
                samples,
                config,
                lambda n, t=task: progress.advance(t, n),
            )
            count = len(samples)
    show(found, config.format)
    _store(found, count, config)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _scored(
    subject: Viewer, samples: Sequence[Sample], config: VisualizeConfig, advance: Any
) -> dict[str, dict[str, float]]:
    pairs: list[Pair] = []
    if has_pairs(config.data) and set(CLASSES) <= set(subject.loaded.classes):
        pairs = two_object_pairs(subject.loaded, len(samples), config.seed, CLASSES)
    try:
        return score(
            subject.loaded,
            samples,
            subject.every,
            pairs=pairs,
            steps=config.steps,
            seed=config.seed,
            batch_size=config.batch_size,
            advance=advance,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"score: {subject.name}: {error}") from error


def _samples(subject: Viewer, items: Sequence[Item]) -> tuple[list[Sample], list[str]]:
    """Images with their masks, and what is wrong with others."""
    samples, bad = [], []
    for item in items:
        try:
            pixels = item.pixels(subject.loaded)
            mask = item.seen_mask(subject.loaded)
        except UnreadableImageError as error:
            bad.append(str(error))
            continue
        if mask is not None and not mask.any():
            bad.append(f"{item.name}: nothing of the object is left in what the model sees.")
            continue
        samples.append(Sample(item.name, pixels, mask))
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
    result = Table(caption="all in percent; arrows say which way is better")
    result.add_column("method")
    for metric in metrics:
        result.add_column(METRICS[metric], justify="right")
    for model, methods in found.items():
        if len(found) > 1:
            result.add_row(plain(model), style="bold")
        for method, numbers in methods.items():
            style = "dim" if method in ("random", "centre") else ""
            values = (f"{numbers[m]:.1f}" if m in numbers else "–" for m in metrics)
            result.add_row(method, *values, style=style)
        result.add_section()
    return result


def _metrics(found: Scores) -> list[str]:
    """Those that some method has, in order."""
    there = {m for methods in found.values() for numbers in methods.values() for m in numbers}
    return [metric for metric in METRICS if metric in there]


def _csv(found: Scores) -> str:
    stream = io.StringIO()
    metrics = _metrics(found)
    writer = csv.writer(stream)
    writer.writerow(["model", "method", *metrics])
    for model, methods in found.items():
        for method, numbers in methods.items():
            writer.writerow([model, method, *(numbers.get(m, "") for m in metrics)])
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
    write_whole(config.output / "scores.json", (json.dumps(content, indent=1) + "\n").encode())
    write_whole(config.output / "scores.csv", _csv(found).encode())
    print(f"The scores are in {config.output}/scores.json and scores.csv.", file=sys.stderr)
