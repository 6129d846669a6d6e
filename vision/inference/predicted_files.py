"""Predictions for files: `vision predict` on the command line."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

from vision.config import ConfigError
from vision.inference.configs import PredictConfig
from vision.inference.predict import ATTENTION, Loaded, Prediction, find_images
from vision.models.layers import static_bias
from vision.terminal import percent, plain, print_wide, tracked

if TYPE_CHECKING:
    from rich.table import Table

READERS = 4
"""Threads that read and decode while the model runs."""


@dataclass(frozen=True)
class PredictedFile:
    """A file with its prediction, or the reason why it could not be read."""

    path: Path
    prediction: Prediction | None
    problem: str | None


def predict_files(
    loaded: Loaded, files: Sequence[Path], batch_size: int, top: int
) -> Iterator[PredictedFile]:
    """The predictions of all files, in order. The next batch is read while the model runs."""
    with ThreadPoolExecutor(READERS) as readers, static_bias(loaded.model):
        upcoming = readers.map(loaded.try_pixels, files[:batch_size])
        for start in range(0, len(files), batch_size):
            end = start + batch_size
            results = list(upcoming)
            upcoming = readers.map(loaded.try_pixels, files[end : end + batch_size])
            good = [pixels for pixels in results if not isinstance(pixels, str)]
            named: Iterator[Prediction] = iter(())
            if good:
                with torch.inference_mode():  # not around a yield: it would affect the caller
                    named = iter(loaded.predictions(loaded.model(loaded.batch(good)), top))
            for path, result in zip(files[start:end], results, strict=True):
                if isinstance(result, str):
                    yield PredictedFile(path, None, result)
                else:
                    yield PredictedFile(path, next(named), None)


def run(loaded: Loaded, config: PredictConfig) -> int:
    """Predict all images and print or write the results; returns 1 if some could not be read."""
    loaded.opened.check_head()
    files = find_images(config.images)
    kind = config.format
    if kind == "auto":
        csv_file = config.output is not None and config.output.suffix == ".csv"
        kind = "csv" if csv_file else "jsonl"
        if config.output is None and sys.stdout.isatty():
            kind = "table"
    bad: list[PredictedFile] = []

    def results() -> Iterator[PredictedFile]:
        found = predict_files(loaded, files, config.batch_size, config.top)
        for file in tracked(found, "images", len(files)) if len(files) > 1 else found:
            if file.prediction is None:
                bad.append(file)
            elif config.attention:
                _save_attention(loaded, file.path)
            yield file

    with _opened(config.output) as target:
        match kind:
            case "table":
                print_wide(table([file for file in results() if file.prediction]), target)
            case "csv":
                write_csv(results(), target, config.top, loaded.opened.multi_label)
            case "jsonl":
                for file in results():
                    print(json.dumps(as_dict(file), ensure_ascii=False), file=target, flush=True)
    for file in bad:
        print(f"error: {file.problem}", file=sys.stderr)
    if bad:
        print(f"{len(bad)} of {len(files)} images could not be read.", file=sys.stderr)
    return 1 if bad else 0


def _save_attention(loaded: Loaded, path: Path) -> None:
    """Save a figure of the attention and its caption beside the image."""
    from vision.inspection.explain import settings_error
    from vision.inspection.figures.sheet import show_attention

    try:
        with settings_error("attention=true"):
            drawing = show_attention(loaded, path)
        drawing.save(path.with_name(f"{path.stem}{ATTENTION}"))
    except OSError as error:
        raise ConfigError(f"attention=true: {path.parent}: {error.strerror or error}") from error


def _opened(output: Path | None) -> AbstractContextManager[TextIO]:
    # A name may hold half of a character (a lone surrogate): it is written as JSON escapes it.
    errors = "backslashreplace"
    if output is None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors=errors)
        return nullcontext(sys.stdout)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return output.open("w", encoding="utf-8", errors=errors, newline="")
    except OSError as error:
        raise ConfigError(f"output: {output} cannot be written: {error.strerror}") from error


def as_dict(file: PredictedFile) -> dict[str, object]:
    """A result as a mapping for JSON."""
    if file.prediction is None:
        return {"image": str(file.path), "error": file.problem}
    top, present = (
        [{"label": label, "probability": p} for label, p in classes]
        for classes in (file.prediction.top, file.prediction.present or ())
    )
    labels = {} if file.prediction.present is None else {"labels": present}
    return {"image": str(file.path), **labels, **top[0], "top": top}


def write_csv(
    files: Iterable[PredictedFile], target: TextIO, top: int, several: bool = False
) -> None:
    """Write a row for each image: the most probable classes, or the error. `several`: all classes
    at or above their thresholds come first, as `a;b`.
    """
    writer = csv.writer(target)
    ranks = [
        f"{column}_{rank}" for rank in range(1, top + 1) for column in ("label", "probability")
    ]
    writer.writerow(["image", *(["labels"] if several else []), *ranks, "error"])
    for file in files:
        best = file.prediction.top if file.prediction else ()
        present = (file.prediction.present or ()) if file.prediction else ()
        listed = [";".join(label for label, _ in present)] if several else []
        cells = [cell for pair in best for cell in pair]
        missing = [""] * (len(ranks) - len(cells))
        writer.writerow([file.path, *listed, *cells, *missing, file.problem or ""])


def table(files: Sequence[PredictedFile]) -> "Table":
    """A table for a terminal: the most probable classes of every image with bars. Of several labels
    all that are present, in bold and marked, then the most probable others.
    """
    from rich.bar import Bar
    from rich.table import Column, Table

    folded, right = Column("image", overflow="fold"), Column("probability", justify="right")
    result = Table(folded, "class", right, "")
    for file in files:
        assert file.prediction is not None
        top, present = file.prediction.top, file.prediction.present
        chosen = top[:1] if present is None else present
        for rank, (label, probability) in enumerate(
            (*chosen, *(c for c in top if c not in chosen))
        ):
            name = str(file.path) if rank == 0 else ""
            style = "bold" if rank < len(chosen) else "dim"
            shown = (percent(probability), Bar(1, 0, probability, width=20))
            mark = "✓ " if present is not None and rank < len(chosen) else ""
            result.add_row(plain(name), plain(mark + label), *shown, style=style)
        result.add_section()
    return result
