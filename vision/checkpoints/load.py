"""Weights from anywhere into a model, with a report of what became of each of them.

Tensors of a file look into the file itself and become the model's parameters without being copied.
What is changed afterwards is copied page by page; the file stays as it is. It must not be written
to while the model is in use; replacing it by a new one, as this project does, is harmless.
"""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.fit import Fitting, NewHead, fit_head, fit_swin, fit_vit
from vision.checkpoints.formats.rules import Converted
from vision.checkpoints.geometry import stored_offsets
from vision.checkpoints.infer import Inferred, infer_model
from vision.checkpoints.metadata import Metadata
from vision.checkpoints.reading import nonfinite
from vision.checkpoints.report import LoadReport
from vision.checkpoints.resize import PositionMethod, WindowMethod
from vision.checkpoints.source import AnySource, Source, WhichWeights, open_source
from vision.config import Size, pair
from vision.models.build import build_model
from vision.models.configs import SwinV2Config, TimmConfig
from vision.models.layers import Classifier, Grid, ceil_div
from vision.models.swin import Swin
from vision.models.swin_v2 import SwinV2
from vision.models.vit import ViT

_NAMED = 5
"""How many names of a kind an error lists."""


def load_weights(
    model: Classifier,
    source: AnySource | Source,
    *,
    weights: WhichWeights = "auto",
    positions: PositionMethod = "bicubic_antialias",
    windows: WindowMethod = "geometric",
    new_head: NewHead = "auto",
    trained_size: Size | None = None,
) -> LoadReport:
    """Put weights into a model. Only a head may be missing; anything else that does not fit is an
    error, and the model is then as it was.

    `positions` and `windows` say how tables are resized; `trained_size` is the size of the pictures
    that the weights saw, for tables that are not square.
    """
    found = source if isinstance(source, Source) else _open_for(model, source, weights)
    fitting = fit_source(model, found, positions, windows, new_head, trained_size)
    _assign(model, fitting.tensors, copy=found.in_memory)
    converted = found.converted.changed
    done = {*fitting.resized, *converted}
    return LoadReport(
        source=found.name,
        layout=found.layout,
        path_taken=found.path_taken,
        loaded=tuple(name for name in fitting.tensors if name not in done),
        converted={n: how for n, how in converted.items() if n in fitting.tensors},
        resized=fitting.resized,
        new=fitting.new,
        ignored=found.converted.ignored | fitting.ignored,
        left=found.left or {},
        warnings=tuple(fitting.warnings),
    )


def fit_source(
    model: Classifier,
    found: Source,
    positions: PositionMethod = "bicubic_antialias",
    windows: WindowMethod = "geometric",
    new_head: NewHead = "auto",
    trained_size: Size | None = None,
) -> Fitting:
    """Weights under our names, checked to be what a model takes; the model stays as it is."""
    size = None if trained_size is None else pair(trained_size)
    hint = found.metadata.image_size
    fitting = Fitting(dict(found.converted.tensors), warnings=list(found.warnings))
    try:
        if isinstance(model, ViT):
            fit_vit(model, fitting, (size, hint), positions)
        elif isinstance(model, Swin):
            fit_swin(model, fitting, (size, hint), positions, windows)
            _compare_windows(model, found, fitting)
        fit_head(model, fitting, new_head)
        _check(model, found.converted, fitting)
    except CheckpointError as error:
        raise CheckpointError(f"{found.name} ({found.layout}): {error}") from error
    _compare_settings(model, found, fitting)
    return fitting


def open_model(
    source: AnySource,
    *,
    weights: WhichWeights = "auto",
    image_size: Size | None = None,
    trained_size: Size | None = None,
    device: torch.device | str = "cpu",
    positions: PositionMethod = "bicubic_antialias",
    windows: WindowMethod = "geometric",
    **given: Any,
) -> tuple[Classifier, Inferred, LoadReport]:
    """The model of a file, in evaluation mode, what was found out about it, and the report.

    `image_size` is the size of the pictures that the model shall see, by default the one that it
    was trained with; what the file cannot tell may be `given` (see `infer_model`).
    """
    opened = open_source(source, weights)
    inferred = infer_model(opened, trained_size=trained_size, **given)
    size = inferred.image_size if image_size is None else pair(image_size)
    if isinstance(inferred.config, SwinV2Config):
        config = with_trained_windows(inferred.config, inferred.image_size, size)
        inferred = replace(inferred, config=config)
    model = build_model(
        inferred.config,
        size,
        channels=inferred.channels,
        classes=inferred.classes,
        # timm's models have buffers, which do not come back from the meta device.
        device="cpu" if isinstance(inferred.config, TimmConfig) else "meta",
    )
    report = load_weights(
        model,
        opened,
        positions=positions,
        windows=windows,
        new_head="never",
        trained_size=inferred.image_size,
    )
    return model.to(device).eval(), inferred, replace(report, assumed=inferred.assumed)


def _open_for(model: nn.Module, source: AnySource, weights: WhichWeights) -> Source:
    """Tensors that have the model's own names are taken as they are, whatever they look like."""
    if isinstance(source, Mapping):
        own = {name for name in model.state_dict() if not name.startswith("head")}
        if own <= source.keys():
            tensors = dict(source)
            return Source(
                "tensors in memory", "vision", tensors, Converted(tensors), Metadata(""), True
            )
    return open_source(source, weights)


def with_trained_windows(config: SwinV2Config, trained: Grid, size: Grid) -> SwinV2Config:
    """Where other pictures change the windows, the position network must go on measuring offsets in
    the windows that it was trained with.
    """
    before, after = _windows(config, trained), _windows(config, size)
    if config.pretrained_window is not None or before == after:
        return config
    if any(height != width for height, width in before):
        return config
    return config.model_copy(update={"pretrained_window": tuple(height for height, _ in before)})


def _windows(config: SwinV2Config, size: Grid) -> list[Grid]:
    patch, window = pair(config.patch_size), pair(config.window)
    result = []
    for stage in range(len(config.depths)):
        y, x = (ceil_div(ceil_div(n, p), 2**stage) for n, p in zip(size, patch, strict=True))
        result.append((min(window[0], y), min(window[1], x)))
    return result


def _check(model: nn.Module, converted: Converted, fitting: Fitting) -> None:
    """Every parameter has its tensor, every tensor its parameter, of the same shape and finite."""
    wanted, found = model.state_dict(), fitting.tensors
    missing = [name for name in wanted if name not in found and name not in fitting.new]
    unexpected = [*converted.unknown, *(name for name in found if name not in wanted)]
    shapes = [
        f"'{name}' is {tuple(found[name].shape)}, the model's is {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    problems = []
    if unexpected:
        names = [f"'{name}'{_near(name, missing)}" for name in unexpected]
        problems.append(f"{_count(unexpected)} that the model does not have: {_some(names)}")
    if missing:
        problems.append(
            f"{_count(missing)} of the model that are not in the file: "
            f"{_some([repr(name) for name in missing])}"
        )
    if shapes:
        problems.append(f"{_count(shapes)} of another shape: {_some(shapes)}")
    if problems:
        raise CheckpointError(
            f"the weights do not fit the model. There are {'; and '.join(problems)}. "
            f"Nothing was loaded."
        )
    bad = nonfinite(found)
    if bad:
        names = [f"'{name}'" for name in bad]
        raise CheckpointError(f"NaN or infinity in {_count(bad)}: {_some(names)}.")


def _compare_windows(model: Swin, source: Source, fitting: Fitting) -> None:
    """Whether a Swin V2 measures offsets as the weights did, where those tell."""
    offsets = stored_offsets(source.tensors)
    if not isinstance(model, SwinV2) or len(offsets) != len(model.windows):
        return
    assert isinstance(model.config, SwinV2Config)
    own = model.config.pretrained_window or tuple(max(window) for window in model.windows)
    trained = tuple(offset.trained for offset in offsets)
    if own != trained:
        fitting.warnings.append(
            f"The position networks of the weights measure offsets in windows of {list(trained)}, "
            f"the model in {list(own)}. Set pretrained_window={list(trained)}."
        )


def _compare_settings(model: nn.Module, source: Source, fitting: Fitting) -> None:
    """Warn where the weights were trained with another pooling than the model's."""
    config = getattr(model, "config", None)
    for name, value in source.converted.facts.items():
        own = getattr(config, name, value)
        if own != value:
            fitting.warnings.append(
                f"The weights were trained with {name}={value}; the model has {name}={own}."
            )


def _assign(model: nn.Module, tensors: Mapping[str, Tensor], copy: bool) -> None:
    """Give every parameter its numbers, in its own type and on its own device.

    Without `copy` a parameter takes over the tensor's memory where that has the right form, and
    stays the same object, so that an optimiser that knows it goes on knowing it.
    """
    values = model.state_dict(keep_vars=True)
    empty = [name for name, own in values.items() if own.is_meta]
    if missing := [name for name in empty if name not in tensors]:
        raise ValueError(f"a model on the meta device has no values for {_some(sorted(missing))}.")
    with torch.no_grad():
        for name, own in values.items():
            if name not in tensors:
                continue
            tensor = tensors[name]
            if own.is_meta:
                _replace(model, name, own, tensor.to(own.dtype, copy=copy))
                continue
            alike = (own.device, own.dtype, own.stride()) == (
                tensor.device,
                tensor.dtype,
                tensor.stride(),
            )
            if alike and not copy:
                own.data = tensor
            else:
                own.copy_(tensor)


def _replace(model: nn.Module, name: str, own: Tensor, tensor: Tensor) -> None:
    """A tensor for one that has no memory: `load_state_dict(assign=True)` for one name, quicker."""
    place, _, leaf = name.rpartition(".")
    parameter = isinstance(own, nn.Parameter)
    new = nn.Parameter(tensor, requires_grad=own.requires_grad) if parameter else tensor
    setattr(model.get_submodule(place), leaf, new)


def _near(name: str, missing: list[str]) -> str:
    near = difflib.get_close_matches(name, missing, n=1, cutoff=0.6)
    return f" (did it mean '{near[0]}'?)" if near else ""


def _count(items: list[str]) -> str:
    return f"{len(items)} tensor{'' if len(items) == 1 else 's'}"


def _some(items: list[str]) -> str:
    return ", ".join(items[:_NAMED]) + (
        f" and {len(items) - _NAMED} more" if items[_NAMED:] else ""
    )
