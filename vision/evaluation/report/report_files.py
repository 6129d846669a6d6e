"""The files of an evaluation: report.json, report.html, the confusion matrix and the predictions of
every image.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from vision.checkpoints.native.checkpoint_folder import run_of
from vision.config import ConfigError, pair
from vision.data.images.decode import to_image
from vision.data.preprocess import input_pixels
from vision.data.sources.source import label_names
from vision.evaluation.configs import EvalConfig
from vision.evaluation.evaluated_model import Answers
from vision.evaluation.metrics import chunks
from vision.evaluation.model_metrics import Mistake, ModelMetrics, confident_mistakes
from vision.evaluation.multi_label_metrics import LabelMistake, confident_label_mistakes
from vision.evaluation.report.eval_report import Report
from vision.evaluation.report.evaluation_figures import confusion
from vision.files import spreadsheet_cell
from vision.inspection.explorer.self_contained import data_url, self_contained
from vision.models.configs import AutoModelConfig

SCRIPTS = ("draw.js", "confusion.js", "sections.js", "report.js")
LARGEST = 192
"""Longer side of an image on the page, in pixels."""
SMALL = 64
"""Images up to this size are stored without loss, because single pixels are visible."""
TOP = 5
"""Number of classes whose probabilities are in the table of predictions."""


def check_parquet() -> None:
    """Raise a ConfigError if Parquet files cannot be written."""
    if find_spec("pyarrow") is None:
        raise ConfigError(
            "predictions=parquet needs pyarrow: pip install pyarrow; or use predictions=csv."
        )


def output_folder(config: EvalConfig, checkpoint: Path) -> Path:
    """Create the folder that the config names, or one in the folder of the (first) run.

    Its name lists the settings that are not the usual ones, so that different evaluations of one
    checkpoint do not overwrite each other.
    """
    folder = config.output
    if folder is None:
        path = checkpoint.resolve()
        parts = [config.split, *_unusual(config)]
        if path.name != "best.safetensors":
            parts.append(path.stem)
        if len(config.checkpoints) > 1:
            parts.append(f"compared-{len(config.checkpoints)}")
        folder = (run_of(path) or Path.cwd()) / "evaluation" / "-".join(parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of an evaluation that failed."""
    with suppress(OSError):  # not empty
        folder.rmdir()
        folder.parent.rmdir()


def _unusual(config: EvalConfig) -> list[str]:
    """The settings that change the numbers, as parts of a file name."""
    parts = []
    if config.data is not None:
        place = getattr(config.data, "root", None) or getattr(config.data, "path", None) or ""
        parts.append(f"{config.data.kind} {Path(place).name}")
    if config.weights != "auto":
        parts.append(config.weights)
    if config.image_size is not None:
        height, width = pair(config.image_size)
        parts.append(f"{height}px" if height == width else f"{height}x{width}px")
    if isinstance(config.model, AutoModelConfig):
        parts += [f"{name}{value}" for name, value in config.model.given().items()]
    given = {n: v for n, v in config.preprocess.model_dump().items() if v != "auto"}
    if (ratio := given.pop("crop_ratio", None)) is not None:
        parts.append(f"crop{ratio:g}")
    parts += given  # mean, std, interpolation
    if config.augmentation != "none":
        parts.append(config.augmentation)
    return [_file_name(part) for part in parts]


def save(folder: Path, config: EvalConfig, report: Report, answers: Sequence[Answers]) -> Report:
    """Write all files; returns the report with their names."""
    names = [""] if len(answers) == 1 else [f"-{_file_name(m.name)}" for m in report.models]
    tables = [folder / f"predictions{name}.{config.predictions}" for name in names]
    tables = [] if config.predictions == "none" else tables
    figures = {
        folder / f"confusion{name}.png": confusion(model.name, model.results)
        for name, model in zip(names, report.models, strict=True)
        if isinstance(model.results, ModelMetrics)
    }
    written = (folder / "report.json", folder / "report.html", *figures, *tables)
    report = replace(report, files=written)
    galleries = [gallery(answer, config.gallery, config.loader.max_pixels) for answer in answers]
    values = report.as_dict()
    try:
        report.files[0].write_text(json.dumps(values, indent=1), encoding="utf-8")
        report.files[1].write_text(page(values, galleries), encoding="utf-8")
        for path, drawing in figures.items():
            path.write_bytes(drawing.encoded("png"))
        for path, answer in zip(tables, answers, strict=bool(tables)):
            write_predictions(path, answer, config.probabilities)
    except OSError as error:
        raise unwritable(folder, error) from error
    return report


def _file_name(name: str) -> str:
    """A name without characters that are special to file systems or shells."""
    return re.sub(r"[^\w.=+-]+", "-", name).strip("-")


def unwritable(folder: Path, error: OSError) -> ConfigError:
    """The error of a folder that cannot be written to."""
    reason, path = error.strerror or error, error.filename or folder
    return ConfigError(
        f"output: {path} cannot be written: {reason}. Choose output=… or save=false."
    )


def page(report: Mapping[str, Any], galleries: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The page of a report (from `Report.as_dict`) with a gallery for each of its models."""
    static = files("vision.evaluation.report") / "static"
    html, style, *scripts = (
        (static / name).read_text(encoding="utf-8")
        for name in ("report.html", "report.css", *SCRIPTS)
    )
    shown = {key: value for key, value in report.items() if key not in ("files", "settings")}
    return self_contained(html, style, scripts, {"report": shown, "galleries": galleries})


def gallery(answers: Answers, most: int, max_pixels: int) -> list[dict[str, Any]]:
    """The most confident mistakes, with the images as the model saw them."""
    source, preprocess = answers.model.source, answers.model.preprocess
    logits, labels = answers.predictions.logits, answers.labels
    mistakes: Sequence[Mistake | LabelMistake]
    if labels.ndim == 2:
        limits = answers.model.opened.thresholds
        mistakes = confident_label_mistakes(logits, labels, limits, most)
    else:
        mistakes = confident_mistakes(logits, labels, most)
    entries = []
    for mistake in mistakes:
        index = int(answers.predictions.ids[mistake.row])
        name = source.name(index)
        image = to_image(input_pixels(source.read(index), name, preprocess, max_pixels))
        entries.append({"name": name, **asdict(mistake), "image": data_url(image, LARGEST, SMALL)})
    return entries


def write_predictions(path: Path, answers: Answers, probabilities: Literal["top5", "all"]) -> None:
    """Write a row for every image, by the suffix of the path: as CSV for a spreadsheet, which must
    not run a name as a formula, or exactly, as Parquet.

    Columns: sample (its index in the split), name, label, predicted, correct, loss,
    label_probability; top1 … top5 and probability1 … probability5; with "all" a column "p(class)"
    for every class. Several labels are lists, `a;b`, and `predicted` are those at or above their
    thresholds; label_probability is left out then.
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
            texts = ("name", "label", "predicted", *(f"top{rank}" for rank in range(1, TOP + 1)))
            for name in columns.keys() & set(texts):
                columns[name] = [spreadsheet_cell(text) for text in columns[name]]
            writer.writerows(zip(*columns.values(), strict=True))


def _columns(
    answers: Answers, probabilities: Literal["top5", "all"]
) -> Iterator[dict[str, list[Any]]]:
    """The columns of the table, some thousand rows at a time."""
    classes, ids = answers.model.classes, answers.predictions.ids.tolist()
    top = min(TOP, len(classes))
    for logits, labels in chunks(answers.predictions.logits, answers.labels):
        samples, ids = ids[: len(labels)], ids[len(labels) :]
        if labels.ndim == 2:
            chances, columns = logits.sigmoid(), _label_columns(answers, logits, labels)
        else:
            chances, columns = logits.softmax(1), _class_columns(classes, logits, labels)
        # A stable sort puts the first of equally probable classes first, as argmax does.
        order = logits.argsort(dim=1, descending=True, stable=True)[:, :top]
        best = chances.gather(1, order)
        columns = {
            "sample": samples,
            "name": [answers.model.source.name(sample) for sample in samples],
            **columns,
        }
        for rank in range(top):
            columns[f"top{rank + 1}"] = [classes[i] for i in order[:, rank].tolist()]
        for rank in range(top):
            columns[f"probability{rank + 1}"] = _rounded(best[:, rank])
        if probabilities == "all":
            for name, values in zip(_column_names(classes), chances.T, strict=True):
                columns[name] = _rounded(values)
        yield columns


def _class_columns(classes: Sequence[str], logits: Tensor, labels: Tensor) -> dict[str, list[Any]]:
    """Label and prediction of images with one class each."""
    predicted = logits.argmax(1)
    own_logs = logits.log_softmax(1).gather(1, labels[:, None])[:, 0]
    return {
        "label": [classes[i] for i in labels.tolist()],
        "predicted": [classes[i] for i in predicted.tolist()],
        "correct": (predicted == labels).tolist(),
        "loss": _rounded(-own_logs),
        "label_probability": _rounded(own_logs.exp()),
    }


def _label_columns(answers: Answers, logits: Tensor, labels: Tensor) -> dict[str, list[Any]]:
    """Labels and predictions of images with any number of classes."""
    limits = torch.tensor(answers.model.opened.thresholds, dtype=torch.float64)
    predicted = (logits.sigmoid() >= limits).to(torch.int8)
    known = labels >= 0
    entries = binary_cross_entropy_with_logits(logits, (labels == 1).double(), reduction="none")
    loss = entries.where(known, 0.0).sum(1) / known.sum(1).clamp(min=1)
    listed = (
        [label_names(row, answers.model.classes) for row in rows.numpy()]
        for rows in (labels, predicted)
    )
    return {
        **dict(zip(("label", "predicted"), listed, strict=True)),
        "correct": ((predicted == labels) | ~known).all(1).tolist(),
        "loss": _rounded(loss),
    }


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

    with ExitStack() as stack:
        writer = None
        for columns in parts:
            # File names may contain bytes that are not valid text; Parquet requires text.
            columns["name"] = [
                name.encode("utf-8", "backslashreplace").decode() for name in columns["name"]
            ]
            table = pyarrow.table(columns)
            if writer is None:
                writer = stack.enter_context(parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)
