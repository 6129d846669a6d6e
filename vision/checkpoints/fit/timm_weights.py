"""Weights for a model of timm, fitted as timm itself does."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import timm
from timm.models import adapt_input_conv
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.fit.tensors import Fitting
from vision.checkpoints.metadata import Metadata, read_metadata
from vision.config import abridged
from vision.models.build import build_model
from vision.models.configs import TimmConfig
from vision.models.layers import Grid
from vision.models.timm import TimmModel

PART = "model."
"""What the names of a timm model's tensors begin with here: it is a part of ours."""


def describe_timm(
    config: TimmConfig, tensors: Mapping[str, Tensor], known: Metadata
) -> tuple[Metadata, int, int, list[str]]:
    """What is known of the images that weights for this model of timm were trained on, the numbers
    of channels and classes, and what was assumed.
    """
    assumed = []
    if not known.origin:
        usual = timm.models.get_pretrained_cfg(config.name)
        if usual is not None:
            values = {k: v for k, v in dataclasses.asdict(usual).items() if v is not None}
            values.pop("label_names", None)
            known = read_metadata({"config": {"architecture": "", **values}}, described=False)
            known.preprocess_origin = f"timm's settings of {config.name}"
            assumed.append(
                f"image size and preprocessing as timm has them for {config.name}: nothing beside "
                f"the weights says otherwise"
            )
    shell = build_model(config, known.image_size or (224, 224), device="meta")
    assert isinstance(shell, TimmModel)
    updated = _up_to_date(shell.model, tensors)
    return known, _channels(shell.model, updated), _classes(shell.model, updated), assumed


def table_numbers(config: TimmConfig, size: Grid, channels: int, classes: int, there: int) -> int:
    """The size of all tables of a run's model, which only timm knows. A ValueError for a model that
    timm cannot build, or that is far larger than the numbers that are `there`.
    """
    name = abridged(config.name, 60)
    try:
        model = build_model(config, size, channels=channels, classes=classes, device="meta")
    # timm raises any of these for a size or a number of channels that a model cannot have.
    except (ValueError, TypeError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise ValueError(
            f"has an invalid record: timm cannot build '{name}' for images of {list(size)} pixels "
            f"({abridged(str(error))})."
        ) from error
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > 2 * there:
        raise ValueError(
            f"contradicts itself: {name} of timm has {wanted} parameters, its tensors have {there} "
            f"numbers."
        )
    return sum(buffer.numel() for buffer in model.buffers())


def fit_timm(model: TimmModel, fitting: Fitting, own_run: bool) -> None:
    """Names and geometry of older files are brought up to date by timm itself, and the first layer
    is fitted to other channels as timm does.
    """
    inner, tensors = model.model, fitting.tensors
    if own_run:
        tensors = {name.removeprefix(PART): tensor for name, tensor in tensors.items()}
    tensors = _up_to_date(inner, tensors)
    _fit_channels(inner, tensors, fitting)
    fitting.tensors = {f"{PART}{name}": tensor for name, tensor in tensors.items()}


def _up_to_date(inner: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    update = getattr(sys.modules[type(inner).__module__], "checkpoint_filter_fn", None)
    if update is None:
        return dict(tensors)
    try:
        return dict(update(dict(tensors), inner))
    # Tensors of another model, or an image smaller than a patch, fail anywhere inside.
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as e:
        raise CheckpointError(
            f"timm cannot fit the weights to {type(inner).__name__} ({e!s:.200}). model.name must "
            f"be the architecture that they were trained for."
        ) from e


def _fit_channels(inner: Any, tensors: dict[str, Tensor], fitting: Fitting) -> None:
    first = inner.pretrained_cfg.get("first_conv")
    name = f"{first}.weight"
    if name not in tensors:
        return
    before, after = tensors[name].shape, inner.get_submodule(first).weight.shape
    if before[1] != after[1]:
        tensors[name] = adapt_input_conv(after[1], tensors[name])
        fitting.resized[f"{PART}{name}"] = f"{before[1]} → {after[1]} channels, as timm does"


def _channels(inner: Any, tensors: Mapping[str, Tensor]) -> int:
    """Channels of the images, by the first layer; it may take several parts of each."""
    first = inner.pretrained_cfg.get("first_conv")
    if f"{first}.weight" not in tensors:
        return 3
    own = inner.get_submodule(first).weight.shape[1]
    return 3 * tensors[f"{first}.weight"].shape[1] // int(own)


def _classes(inner: Any, tensors: Mapping[str, Tensor]) -> int:
    """Rows of the last layer; 0 where the file has none."""
    names = inner.pretrained_cfg.get("classifier")
    for name in (names,) if isinstance(names, str) else names or ():
        for part in (f"{name}.weight", f"{name}.bias"):
            if part in tensors:
                return tensors[part].shape[0]
    return 0
