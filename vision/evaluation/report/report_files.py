"""The files of an evaluation: report.json, report.html and the predictions of every image."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vision.config import ConfigError, pair
from vision.evaluation.configs import EvalConfig
from vision.evaluation.evaluated_model import Answers
from vision.evaluation.report.eval_report import Report
from vision.evaluation.report.prediction_files import write_predictions
from vision.evaluation.report.report_page import gallery, page
from vision.models.configs import AutoModelConfig


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
        parent = path.parent.parent if path.parent.name == "checkpoints" else Path.cwd()
        folder = parent / "evaluation" / "-".join(parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
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
    report = replace(report, files=(folder / "report.json", folder / "report.html", *tables))
    galleries = [gallery(answer, config.gallery, config.loader.max_pixels) for answer in answers]
    values = report.as_dict()
    try:
        report.files[0].write_text(json.dumps(values, indent=1), encoding="utf-8")
        report.files[1].write_text(page(values, galleries), encoding="utf-8")
        for path, answer in zip(tables, answers, strict=bool(tables)):
            write_predictions(path, answer, config.probabilities)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return report


def _file_name(name: str) -> str:
    """A name without characters that are special to file systems or shells."""
    return re.sub(r"[^\w.=+-]+", "-", name).strip("-")


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    reason, path = error.strerror or error, error.filename or folder
    return ConfigError(
        f"output: {path} cannot be written: {reason}. Choose output=… or save=false."
    )
