"""`vision convert`: weights of any known layout, written as another library reads them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from vision.checkpoints.configs import Format, WhichWeights
from vision.checkpoints.errors import system_errors
from vision.checkpoints.layouts.export_pytorch import (
    mae_tensors,
    official_tensors,
    torchvision_tensors,
)
from vision.checkpoints.layouts.exporting import Export, refuse
from vision.checkpoints.layouts.huggingface.export_huggingface import (
    huggingface_model,
    huggingface_preprocessor,
)
from vision.checkpoints.layouts.timm.export_timm import timm_model
from vision.checkpoints.native.checkpoint import write_checkpoint
from vision.checkpoints.new_folder import check_new
from vision.checkpoints.open import OpenedModel, open_model
from vision.config import ConfigError, suggest
from vision.files import replacing
from vision.models.configs import ModelChoice

FORMATS = get_args(Format)


@dataclass(frozen=True)
class Conversion:
    """The outcome of a conversion."""

    files: tuple[Path, ...]
    format: Format
    layout: str
    """Of the weights."""
    tensors: int
    notes: tuple[str, ...]
    """Differences of the other library, and what was assumed about the weights."""


def convert(
    place: str | Path,
    format: Format,
    output: Path,
    *,
    model: ModelChoice | None = None,
    weights: WhichWeights = "auto",
    rename: Sequence[tuple[str, str]] = (),
    **given: Any,
) -> Conversion:
    """Write weights as another library stores them; the numbers stay the same, bit by bit.

    timm and huggingface: a new folder that the library opens by its path. torchvision, official,
    mae and vision: a new file. A model that the library cannot express is refused with the reason.
    """
    if format not in FORMATS:
        raise ConfigError(f"format: '{format}' is unknown. {suggest(str(format), FORMATS)}")
    check_new(output)
    opened = open_model(
        place, model=model, weights=weights, rename=rename, setting="source", **given
    )
    return write_as(opened, format, output)


def write_as(opened: OpenedModel, format: Format, output: Path) -> Conversion:
    """Write an open model to a new folder or file; see `convert`."""
    export = Export(opened, opened.tensors)
    if opened.decoder and format != "mae":
        export.notes.append("The decoder of masked pretraining is left out; format=mae has it.")
    if format != "vision" and getattr(opened.config, "stem", "") in ("conv", "conv_whitened"):
        refuse(format, "its models embed patches, not the outputs of convolutions (model.stem)")
    written: list[Path] = []
    with system_errors(f"{output} cannot be written"):
        match format:
            case "timm":
                tensors, config = timm_model(export)
                written = _write_folder(output, tensors, {"config.json": config})
            case "huggingface":
                tensors, config = huggingface_model(export)
                beside = {"config.json": config} | huggingface_preprocessor(export)
                written = _write_folder(output, tensors, beside)
            case "torchvision":
                tensors = torchvision_tensors(export)
                written = _write_file(output, _separate(tensors))
            case "official":
                tensors = official_tensors(export)
                written = _write_file(output, {"model": _separate(tensors)})
            case "mae":
                tensors = mae_tensors(export)
                written = _write_file(output, {"model": _separate(tensors)})
            case "vision":
                tensors = {f"model.{name}": tensor for name, tensor in export.tensors.items()}
                write_checkpoint(output, tensors, _record(export))
                written = [output]
    if opened.multi_label and format not in ("vision", "huggingface"):
        export.notes.append("probabilities are sigmoids of the logits; the file does not say so")
    notes = (*export.notes, *opened.report.assumed, *opened.report.warnings)
    return Conversion(tuple(written), format, opened.report.layout, len(tensors), notes)


def _write_folder(
    folder: Path, tensors: Mapping[str, Tensor], beside: Mapping[str, Mapping[str, Any]]
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    save_file(_separate(tensors), weights, metadata={"format": "pt"})
    files = [weights]
    for name, content in beside.items():
        files.append(folder / name)
        files[-1].write_text(json.dumps(content, indent=2) + "\n")
    return files


def _write_file(path: Path, content: Mapping[str, Any]) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save(content, file)
    return [path]


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with memory of their own. Parts of one tensor of ours share its memory, which
    safetensors refuses to store and torch would store whole with each part.
    """
    return {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}


def _record(export: Export) -> dict[str, Any]:
    """The record of a run, as far as a foreign file provides it."""
    opened = export.opened
    names = opened.class_names or tuple(str(index) for index in range(opened.classes))
    several = {"task": {"kind": "multi_label"}} if opened.multi_label else {}
    return {
        "step": 0,
        "config": {"model": opened.config.model_dump(mode="json"), **several},
        **({"thresholds": list(opened.thresholds)} if several else {}),
        "classes": list(names),
        "channels": opened.channels,
        "preprocess": {"image_size": list(opened.image_size), **opened.preprocess.values()},
        "origin": {"layout": opened.resized_as, "assumed": list(opened.report.assumed)},
    }
