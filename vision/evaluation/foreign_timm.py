"""Weights for any model of timm, evaluated as timm itself would."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from vision.checkpoints.containers import unwrap
from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.metadata import Metadata, read_metadata
from vision.checkpoints.reading import nonfinite, read_raw
from vision.checkpoints.remote import pretrained_config
from vision.config import ConfigError, pair
from vision.evaluation.configs import EvalConfig
from vision.evaluation.foreign import Found
from vision.models.baseline import TimmModel
from vision.models.build import build_model
from vision.models.configs import TimmConfig
from vision.models.layers import Grid


def open_timm(
    name: str, place: Path, model: TimmConfig, config: EvalConfig, device: torch.device
) -> Found:
    """The model of timm that a config names, with a file's weights. Everything must fit.

    Pictures are prepared as it is written beside the weights, else as timm does for this name.
    """
    raw = read_raw(place)
    found = unwrap(raw, config.weights)
    if bad := nonfinite(found.tensors):
        raise CheckpointError(f"{place}: NaN or infinity in {', '.join(bad[:5])}.")
    metadata, notes = _metadata(name, model, raw.extra)
    size = metadata.image_size if config.image_size is None else pair(config.image_size)
    built, channels, classes = _fill(model, found.tensors, size or (224, 224), place)
    return Found(
        model=built.to(device).eval(),
        image_size=size or (224, 224),
        channels=channels,
        classes=classes,
        class_names=metadata.class_names if _fits(metadata, classes) else None,
        preprocess=metadata.preprocess,
        preprocess_origin=metadata.preprocess_origin,
        averaged="ema" in " ".join(found.path_taken),
        notes=(f"weights of {model.name} of timm", *notes, *raw.warnings),
    )


def _metadata(
    name: str, model: TimmConfig, extra: Mapping[str, Any]
) -> tuple[Metadata, tuple[str, ...]]:
    """What is known of the pictures; and that it was assumed, where nothing is beside the file."""
    beside = extra.get("config")
    written = pretrained_config(name) or (beside if isinstance(beside, Mapping) else {})
    if "architecture" in written or "pretrained_cfg" in written:
        return read_metadata({"config": {"architecture": "", **written}}, "timm ViT", False), ()
    usual = timm.models.get_pretrained_cfg(model.name)
    if usual is None:
        return Metadata(""), ()
    values = {k: v for k, v in dataclasses.asdict(usual).items() if v is not None}
    values.pop("label_names", None)
    metadata = read_metadata({"config": {"architecture": "", **values}}, "timm ViT", False)
    metadata.preprocess_origin = f"timm's settings of {model.name}"
    note = "image size and preprocessing as timm has them for this name: the file tells none"
    return metadata, (note,)


def _fill(
    config: TimmConfig, tensors: dict[str, Tensor], size: Grid, place: Path
) -> tuple[TimmModel, int, int]:
    """The model with the weights, for as many channels and classes as they have. timm itself brings
    names and geometry of older files up to date.
    """
    channels = 3
    shell = build_model(config, size, channels=channels, device="meta")
    assert isinstance(shell, TimmModel)
    module = sys.modules[type(shell.model).__module__]
    bring_up_to_date = getattr(module, "checkpoint_filter_fn", None)
    if bring_up_to_date is not None:
        tensors = bring_up_to_date(dict(tensors), shell.model)
    first = shell.model.pretrained_cfg.get("first_conv")
    if isinstance(first, str) and f"{first}.weight" in tensors:
        own = shell.model.get_submodule(first).weight.shape[1]
        channels = channels * tensors[f"{first}.weight"].shape[1] // own
    classes = _classes(shell, tensors)
    model = build_model(config, size, channels=channels, classes=classes)
    assert isinstance(model, TimmModel)
    _check(model, tensors, config.name, place)
    model.model.load_state_dict(tensors)
    return model, channels, classes


def _classes(shell: TimmModel, tensors: Mapping[str, Tensor]) -> int:
    """As many as the last layer has rows; 0 where the file has none."""
    names = shell.model.pretrained_cfg.get("classifier")
    for name in (names,) if isinstance(names, str) else names or ():
        if f"{name}.weight" in tensors:
            return tensors[f"{name}.weight"].shape[0]
        if f"{name}.bias" in tensors:
            return tensors[f"{name}.bias"].shape[0]
    return 0


def _check(model: TimmModel, tensors: Mapping[str, Tensor], name: str, place: Path) -> None:
    own = model.model.state_dict()
    missing, unknown = sorted(own.keys() - tensors), sorted(tensors.keys() - own)
    shapes = [
        f"{n} is {tuple(t.shape)} there and {tuple(own[n].shape)} here"
        for n, t in tensors.items()
        if n in own and t.shape != own[n].shape
    ]
    if missing or unknown or shapes:
        raise ConfigError(
            f"checkpoint: {place} does not fit model.name={name}: {len(missing)} tensors are "
            f"missing there {missing[:3]}, {len(unknown)} are not known here {unknown[:3]}, "
            f"{len(shapes)} have another shape {shapes[:1]}."
        )


def _fits(metadata: Metadata, classes: int) -> bool:
    return metadata.class_names is not None and len(metadata.class_names) == classes
