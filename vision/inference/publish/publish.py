"""`vision publish`: weights, config, preprocessing and a model card in a folder for the hub.

The folder has timm's layout where timm computes the same, so that timm and transformers open it;
otherwise this project's own. It appears only after its weights were opened again and compared.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vision.checkpoints.convert import write_as
from vision.checkpoints.native.checkpoint_folder import run_of
from vision.checkpoints.new_folder import check_new, new_folder
from vision.checkpoints.open import open_model
from vision.config import ConfigError, UserError
from vision.evaluation.model_metrics import ModelMetrics
from vision.evaluation.report.eval_report import Report
from vision.evaluation.report.evaluation_figures import calibration, confusion
from vision.inference.export import largest_difference
from vision.inference.predict import Loaded, beside_checkpoint
from vision.inference.publish.configs import PublishConfig
from vision.inference.publish.hub import upload
from vision.inference.publish.model_card import Card, model_card
from vision.models.configs import TimmConfig
from vision.models.layers import Classifier

TOLERANCE = 1e-4
"""Largest accepted difference of a probability after opening the folder again."""


@dataclass(frozen=True)
class Published:
    """A folder for the hub."""

    folder: Path
    layout: str
    notes: tuple[str, ...]
    url: str | None
    """Of the repository, if it was uploaded."""


class _UnlikeError(UserError):
    """A layout in which the model computes something else."""


def published_folder(loaded: Loaded, config: PublishConfig) -> Path:
    """The folder to write, which must be new."""
    beside = beside_checkpoint(config.checkpoint, loaded.opened.path)
    folder = config.output or beside / "publish"
    check_new(folder)
    return folder


def publish(
    loaded: Loaded, config: PublishConfig, report: Report | None, folder: Path
) -> Published:
    """Write the folder, with results of the report on its card, and upload it if requested."""
    loaded.model.requires_grad_(False).cpu()
    with new_folder(folder) as part:
        layout, reason, notes = _write_weights(loaded, config, part)
        figures = _draw(report, part)
        name = (config.repository or _name(loaded, config)).rpartition("/")[2]
        card = Card(name, config.repository, config.license, layout, reason, figures)
        part.joinpath("README.md").write_text(model_card(loaded, card, report), encoding="utf-8")
        mode = part.joinpath("README.md").stat().st_mode
        part.joinpath("model.safetensors").chmod(mode)  # written for the owner only by some
    url = None
    if config.push:
        assert config.repository is not None
        url = upload(folder, config.repository, config.private, f"{name}, by vision publish")
    return Published(folder, layout, tuple(notes), url)


def _name(loaded: Loaded, config: PublishConfig) -> str:
    """The name of the run's folder or of the file."""
    path = loaded.opened.path.resolve()
    return run.name if (run := run_of(path)) is not None else path.stem


def _write_weights(
    loaded: Loaded, config: PublishConfig, folder: Path
) -> tuple[str, str, list[str]]:
    """Write weights and config.json; returns the layout, why it is not timm's, and notes."""
    reason = ""
    if config.layout != "vision":
        try:
            return "timm", "", _write_timm(loaded, folder)
        except (ConfigError, _UnlikeError) as error:
            reason = str(error).partition(" format=vision")[0]
            if config.layout == "timm":
                raise ConfigError(f"layout=timm: {reason} layout=vision keeps it all.") from error
            for file in folder.iterdir():
                file.unlink()
    written = write_as(loaded.opened, "vision", folder / "model.safetensors")
    text = json.dumps(_own_config(loaded), indent=2, ensure_ascii=False)
    folder.joinpath("config.json").write_text(text + "\n", encoding="utf-8")
    _compare(loaded, open_model(folder).model, "this project")
    return "vision", reason, [*written.notes, *([reason] if reason else [])]


def _write_timm(loaded: Loaded, folder: Path) -> list[str]:
    """Write timm's layout and open it again, by timm and by this project."""
    import timm

    opened = loaded.opened
    if opened.multi_label:
        raise _UnlikeError("timm's layout does not say that an image may have several labels.")
    written = write_as(opened, "timm", folder)
    _compare(loaded, timm.create_model(f"local-dir:{folder}", pretrained=True).eval(), "timm")
    baseline = opened.config if isinstance(opened.config, TimmConfig) else None
    _compare(loaded, open_model(folder, model=baseline).model, "this project")
    return list(written.notes)


def _compare(loaded: Loaded, model: nn.Module | Classifier, reader: str) -> None:
    with torch.no_grad():
        difference = largest_difference(loaded, model)
    if not difference <= TOLERANCE or math.isnan(difference):
        raise _UnlikeError(f"opened by {reader}, probabilities differ by up to {difference:.2g}.")


def _own_config(loaded: Loaded) -> dict[str, Any]:
    """What model.safetensors says itself, for readers and other programs."""
    opened, images = loaded.opened, loaded.preprocess
    values: dict[str, Any] = {
        "library_name": "vit-swin",
        "model": opened.config.model_dump(mode="json"),
        "classes": list(loaded.classes),
        "channels": opened.channels,
        "preprocess": {"image_size": list(images.image_size), **images.values()},
    }
    if opened.multi_label:
        values["thresholds"] = dict(zip(loaded.classes, opened.thresholds, strict=True))
    return values


def _draw(report: Report | None, folder: Path) -> tuple[str, ...]:
    """Draw the results of a model for one class per image; returns the names of the figures."""
    if report is None or not isinstance(results := report.models[0].results, ModelMetrics):
        return ()
    name = report.models[0].name
    for file, drawing in (
        ("confusion.png", confusion(name, results)),
        ("calibration.png", calibration(name, results)),
    ):
        folder.joinpath(file).write_bytes(drawing.encoded("png"))
    return "confusion.png", "calibration.png"
