"""The files of an evaluation: report.json, report.html and the answers for every image."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from vision.config import ConfigError, pair
from vision.data.sources.source import Source
from vision.evaluation.all_metrics import confident_mistakes
from vision.evaluation.configs import EvalConfig
from vision.evaluation.evaluated import EvaluatedModel
from vision.evaluation.predictions import Predictions
from vision.evaluation.report.eval_report import Report
from vision.evaluation.report.prediction_files import write_predictions
from vision.evaluation.report.report_page import gallery, page
from vision.models.configs import AutoModelConfig


@dataclass(frozen=True)
class Answers:
    """What one model says of the images."""

    subject: EvaluatedModel
    source: Source
    predictions: Predictions
    labels: Tensor
    """Of every prediction, as numbers of the model's classes: int64 (n,)."""
    votes: Tensor | None
    """Of the nearest training images for each class: (n, classes)."""
    notes: tuple[str, ...]
    """What was assumed of a foreign file; how classes were matched, if they differ."""


def output_folder(config: EvalConfig, checkpoints: Sequence[Path]) -> Path:
    """The folder that the config names, or one below the run's; made if it is not there.

    Its name says what is not as usual, so that evaluations of one checkpoint keep apart.
    """
    folder = config.output
    if folder is None:
        path = checkpoints[0].resolve()
        inside = path.parent.name == "checkpoints"
        parts = [config.split, *_unusual(config)]
        if path.name != "best.safetensors":
            parts.append(path.stem)
        if len(checkpoints) > 1:
            parts.append(f"compared-{len(checkpoints)}")
        folder = (path.parent.parent if inside else Path.cwd()) / "evaluation" / "-".join(parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(_cannot_write(folder, error)) from error
    return folder


def remove_if_empty(folder: Path) -> None:
    """Leave nothing behind of an evaluation that came to nothing."""
    with suppress(OSError):  # there is something in it
        folder.rmdir()
        folder.parent.rmdir()


def _unusual(config: EvalConfig) -> list[str]:
    parts = []
    if config.data is not None:
        place = getattr(config.data, "root", None) or getattr(config.data, "path", None) or ""
        parts.append(_file_name(f"{config.data.kind} {Path(place).name}".strip()))
    if config.weights != "auto":
        parts.append(config.weights)
    if config.image_size is not None:
        height, width = pair(config.image_size)
        parts.append(f"{height}px" if height == width else f"{height}x{width}px")
    parts += _given(config)
    given = {n: v for n, v in config.preprocess.model_dump().items() if v != "auto"}
    if (ratio := given.pop("crop_ratio", None)) is not None:
        parts.append(f"crop{ratio:g}")
    parts += given  # mean, std, interpolation
    if config.augmentation != "none":
        parts.append(config.augmentation)
    return parts


def _given(config: EvalConfig) -> list[str]:
    """Settings of the model that are not as the checkpoint says."""
    if not isinstance(config.model, AutoModelConfig):
        return []
    return [_file_name(f"{name}{value}") for name, value in config.model.given().items()]


def save(
    folder: Path, config: EvalConfig, report: Report, answers: Sequence[Answers]
) -> tuple[Path, ...]:
    """Write all files; returns them."""
    names = [""] if len(answers) == 1 else [f"-{_file_name(m.name)}" for m in report.models]
    tables = [folder / f"predictions{name}.{config.predictions}" for name in names]
    tables = [] if config.predictions == "none" else tables
    written = (folder / "report.json", folder / "report.html", *tables)
    report = replace(report, files=written)
    galleries = [
        gallery(
            confident_mistakes(answer.predictions.logits, answer.labels, config.gallery),
            answer.predictions.ids.tolist(),
            answer.source,
            answer.subject.preprocess,
            config.loader.max_pixels,
        )
        for answer in answers
    ]
    values = report.as_dict()
    try:
        written[0].write_text(json.dumps(values, indent=1), encoding="utf-8")
        written[1].write_text(page(values, galleries), encoding="utf-8")
        for path, answer in zip(tables, answers, strict=bool(tables)):
            write_predictions(
                path,
                answer.source,
                answer.predictions.ids,
                answer.predictions.logits,
                answer.labels,
                answer.subject.classes,
                config.probabilities,
            )
    except OSError as error:
        raise ConfigError(_cannot_write(folder, error)) from error
    return written


def _file_name(name: str) -> str:
    """A name without what file systems or shells take for something else."""
    return re.sub(r"[^\w.=+-]+", "-", name).strip("-")


def _cannot_write(folder: Path, error: OSError) -> str:
    reason = error.strerror or error
    place = error.filename or folder
    return f"output: {place} cannot be written: {reason}. Choose output=… or save=false."
