"""Weights for a baseline: timm's own files, and runs of this project that trained such a model."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from timm.models import adapt_input_conv
from torch import Tensor

from vision.checkpoints.containers import unwrap
from vision.checkpoints.reading import nonfinite, read_raw
from vision.checkpoints.remote import pretrained_config
from vision.checkpoints.report import LoadReport
from vision.config import ConfigError, suggest
from vision.models.baseline import TimmModel
from vision.models.layers import Grid
from vision.training.tune import head_names

WORDS = {"mean": "mean", "std": "std", "interpolation": "interpolation", "crop_pct": "crop_ratio"}
"""What timm says of a preprocessing, and how it is called here."""


def timm_preprocess(
    source: str, place: Path
) -> tuple[list[tuple[str, dict[str, Any]]], Grid | None]:
    """What is known of the pictures that the weights were trained on, with its origin; the size."""
    values: Mapping[str, Any] = pretrained_config(source)
    if not values:
        beside = read_raw(place).extra.get("config")
        values = beside.get("pretrained_cfg", {}) if isinstance(beside, Mapping) else {}
    found = {ours: values[name] for name, ours in WORDS.items() if name in values}
    if found.get("interpolation") not in ("nearest", "bilinear", "bicubic", "lanczos"):
        found.pop("interpolation", None)
    size = values.get("input_size")
    known = [(f"{source}: timm's settings of these weights", found)] if found else []
    return known, (size[1], size[2]) if size else None


def load_timm_weights(
    model: TimmModel, source: str, place: Path, weights: Literal["auto", "raw", "ema"]
) -> LoadReport:
    """Copy a file's weights into a timm model.

    Names and geometry of older files are brought up to date by timm itself. The first layer is
    fitted to other channels as timm does; a head for other classes stays as it was drawn. Anything
    else that does not fit is an error.
    """
    raw = read_raw(place)
    found = unwrap(raw, weights)
    inner = model.model
    bring_up_to_date = getattr(sys.modules[type(inner).__module__], "checkpoint_filter_fn", None)
    # In a run of this project the model of timm is a part of ours, called "model".
    own_run = raw.container == "vision"
    tensors = {n.removeprefix("model.") if own_run else n: t for n, t in found.tensors.items()}
    if bring_up_to_date is not None:
        tensors = bring_up_to_date(tensors, inner)
    own = inner.state_dict()
    head = {name.removeprefix("model.") for name in head_names(model)}
    resized = _fit_channels(inner, tensors, own)
    new = {
        name: "the file has a head for other classes, or none"
        for name in head
        if name not in tensors or tensors[name].shape != own[name].shape
    }
    ignored = {name: "of a head for other classes" for name in new if name in tensors}
    taken = {name: t for name, t in tensors.items() if name in own and name not in new}
    _check(source, {n: t for n, t in own.items() if n not in new}, taken, tensors.keys() - own)
    if bad := nonfinite(taken):
        raise ConfigError(f"init: {source} has numbers that are none in {', '.join(bad[:5])}.")
    with torch.no_grad():
        for name, tensor in taken.items():
            own[name].copy_(tensor)
    return LoadReport(
        source=str(raw.path),
        layout=f"timm ({model.config.name})",
        path_taken=found.path_taken,
        loaded=tuple(taken),
        resized=resized,
        new=new,
        ignored=ignored,
        left=found.left,
        warnings=raw.warnings,
    )


def _fit_channels(
    inner: Any, tensors: dict[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, str]:
    """Fit the first convolution to the pictures' channels, in place; what was done."""
    first = inner.pretrained_cfg.get("first_conv")
    name = f"{first}.weight" if isinstance(first, str) else ""
    if name not in tensors or name not in own:
        return {}
    before, after = tensors[name].shape, own[name].shape
    if before[1] == after[1]:
        return {}
    tensors[name] = adapt_input_conv(after[1], tensors[name])
    return {name: f"{before[1]} → {after[1]} channels, as timm does"}


def _check(
    source: str, own: Mapping[str, Tensor], taken: Mapping[str, Tensor], unknown: set[str]
) -> None:
    """Refuse what does not fit: nothing is missing or too much in silence."""
    missing = sorted(name for name in own if name not in taken)
    if missing or unknown:
        near = suggest(min(unknown), own) if unknown else ""
        raise ConfigError(
            f"init: {source} does not fit the model: {len(missing)} tensors are missing there "
            f"{missing[:3]}, {len(unknown)} are not known here {sorted(unknown)[:3]}. {near[:300]}"
        )
    for name, tensor in own.items():
        if taken[name].shape != tensor.shape:
            raise ConfigError(
                f"init: {source} does not fit the model: {name} is {tuple(taken[name].shape)} "
                f"there and {tuple(tensor.shape)} here."
            )
