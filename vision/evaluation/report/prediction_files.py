"""The answers for every image as a table: CSV, or Parquet where pyarrow is installed."""

import csv
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vision.config import ConfigError
from vision.data.sources.source import Source

CHUNK = 4096
TOP = 5


def check_parquet() -> None:
    """An error where Parquet files cannot be written."""
    if find_spec("pyarrow") is None:
        raise ConfigError(
            "predictions=parquet needs pyarrow: pip install pyarrow; or use predictions=csv."
        )


def write_predictions(
    path: Path,
    source: Source,
    ids: Tensor,
    logits: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    probabilities: Literal["top5", "all"],
) -> None:
    """One row for every image, as CSV or Parquet by the suffix of the path.

    Columns: sample (its number in the split), name, label, predicted, correct, loss,
    label_probability; top1 … top5 and probability1 … probability5; with "all" a column "p(class)"
    for every class.
    """
    batches = _batches(source, ids, logits, labels, classes, probabilities)
    if path.suffix == ".parquet":
        _write_parquet(path, batches)
        return
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        for number, columns in enumerate(batches):
            if number == 0:
                writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))


def _batches(
    source: Source,
    ids: Tensor,
    logits: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    probabilities: Literal["top5", "all"],
) -> Iterator[dict[str, list[Any]]]:
    """The columns of the table, some thousand rows at a time."""
    top = min(TOP, len(classes))
    names = _column_names(classes)
    for first in range(0, len(ids), CHUNK):
        part, own = logits[first : first + CHUNK].double(), labels[first : first + CHUNK]
        numbers: list[int] = ids[first : first + CHUNK].tolist()
        logs = part.log_softmax(1)
        own_logs = logs.gather(1, own[:, None])[:, 0]
        # Sorted stably, so that of equal classes the first one comes first, as in argmax.
        order = logs.argsort(dim=1, descending=True, stable=True)[:, :top]
        chances = logs.gather(1, order).exp()
        predicted = logits[first : first + CHUNK].argmax(1)
        columns: dict[str, list[Any]] = {
            "sample": numbers,
            "name": [source.name(number) for number in numbers],
            "label": [classes[i] for i in own.tolist()],
            "predicted": [classes[i] for i in predicted.tolist()],
            "correct": (predicted == own).tolist(),
            "loss": _rounded(-own_logs),
            "label_probability": _rounded(own_logs.exp()),
        }
        for place in range(top):
            columns[f"top{place + 1}"] = [classes[i] for i in order[:, place].tolist()]
        for place in range(top):
            columns[f"probability{place + 1}"] = _rounded(chances[:, place])
        if probabilities == "all":
            every = logs.exp()
            for i, name in enumerate(names):
                columns[name] = _rounded(every[:, i])
        yield columns


def _column_names(classes: Sequence[str]) -> list[str]:
    """A name for the column of every class; two classes of one name get their numbers."""
    return [
        f"p({name})" if classes.count(name) == 1 else f"p({name} #{i})"
        for i, name in enumerate(classes)
    ]


def _rounded(numbers: Tensor) -> list[float]:
    """As float32 has them: the digits beyond are those of a conversion."""
    return [float(f"{number:.9g}") for number in numbers.to(torch.float32).tolist()]


def _write_parquet(path: Path, batches: Iterator[dict[str, list[Any]]]) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    writer = None
    try:
        for columns in batches:
            # File names may have bytes that are no text; Parquet wants text.
            columns["name"] = [
                name.encode("utf-8", "backslashreplace").decode() for name in columns["name"]
            ]
            table = pyarrow.table(columns)
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
