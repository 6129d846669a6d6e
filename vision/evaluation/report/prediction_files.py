"""The predictions of every image as a table: CSV, or Parquet where pyarrow is installed."""

import csv
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vision.config import ConfigError
from vision.evaluation.evaluated_model import Answers
from vision.evaluation.metrics import chunks

TOP = 5


def check_parquet() -> None:
    """Raise a ConfigError if Parquet files cannot be written."""
    if find_spec("pyarrow") is None:
        raise ConfigError(
            "predictions=parquet needs pyarrow: pip install pyarrow; or use predictions=csv."
        )


def write_predictions(path: Path, answers: Answers, probabilities: Literal["top5", "all"]) -> None:
    """Write a row for every image, as CSV or Parquet by the suffix of the path.

    Columns: sample (its index in the split), name, label, predicted, correct, loss,
    label_probability; top1 … top5 and probability1 … probability5; with "all" a column "p(class)"
    for every class.
    """
    parts = _columns(answers, probabilities)
    if path.suffix == ".parquet":
        _write_parquet(path, parts)
        return
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        for number, columns in enumerate(parts):
            if number == 0:
                writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))


def _columns(
    answers: Answers, probabilities: Literal["top5", "all"]
) -> Iterator[dict[str, list[Any]]]:
    """The columns of the table, some thousand rows at a time."""
    classes, ids = answers.model.classes, answers.predictions.ids.tolist()
    top = min(TOP, len(classes))
    for logits, labels in chunks(answers.predictions.logits, answers.labels):
        samples, ids = ids[: len(labels)], ids[len(labels) :]
        logs = logits.log_softmax(1)
        own_logs = logs.gather(1, labels[:, None])[:, 0]
        # A stable sort puts the first of equally probable classes first, as argmax does.
        order = logs.argsort(dim=1, descending=True, stable=True)[:, :top]
        best = logs.gather(1, order).exp()
        predicted = logits.argmax(1)
        columns: dict[str, list[Any]] = {
            "sample": samples,
            "name": [answers.model.source.name(sample) for sample in samples],
            "label": [classes[i] for i in labels.tolist()],
            "predicted": [classes[i] for i in predicted.tolist()],
            "correct": (predicted == labels).tolist(),
            "loss": _rounded(-own_logs),
            "label_probability": _rounded(own_logs.exp()),
        }
        for rank in range(top):
            columns[f"top{rank + 1}"] = [classes[i] for i in order[:, rank].tolist()]
        for rank in range(top):
            columns[f"probability{rank + 1}"] = _rounded(best[:, rank])
        if probabilities == "all":
            for name, values in zip(_column_names(classes), logs.exp().T, strict=True):
                columns[name] = _rounded(values)
        yield columns


def _column_names(classes: Sequence[str]) -> list[str]:
    """The column of every class; classes of the same name are numbered."""
    return [
        f"p({name})" if classes.count(name) == 1 else f"p({name} #{i})"
        for i, name in enumerate(classes)
    ]


def _rounded(numbers: Tensor) -> list[float]:
    """Numbers with the nine digits that identify a float32."""
    return [float(f"{number:.9g}") for number in numbers.to(torch.float32).tolist()]


def _write_parquet(path: Path, parts: Iterator[dict[str, list[Any]]]) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    writer = None
    try:
        for columns in parts:
            # File names may contain bytes that are not valid text; Parquet requires text.
            columns["name"] = [
                name.encode("utf-8", "backslashreplace").decode() for name in columns["name"]
            ]
            table = pyarrow.table(columns)
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
