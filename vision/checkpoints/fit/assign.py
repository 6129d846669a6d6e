"""Put weights under our names into a model, or raise an error and leave the model unchanged.

Tensors of a file look into the file itself and become the model's parameters without being copied.
What is changed afterwards is copied page by page; the file stays as it is. It must not be written
to while the model is in use; replacing it by a new one, as this project does, is harmless.
"""

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, nn

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.reading import nonfinite
from vision.checkpoints.fit.stored_windows import stored_offsets
from vision.checkpoints.fit.tensors import Fitting, NewHead, fit_head, fit_swin, fit_vit
from vision.checkpoints.layouts.recognise import PositionMethod, resizing
from vision.checkpoints.metadata import StoredWeights
from vision.config import shorten
from vision.models.configs import SwinV2Config, TimmConfig
from vision.models.layers import Classifier, Grid
from vision.models.positions.relative import WindowMethod
from vision.models.swin import Swin
from vision.models.swin_v2 import SwinV2
from vision.models.vit import ViT

if TYPE_CHECKING:
    from vision.models.timm import TimmModel

ATTENDED = ("torchvision Swin", "Hugging Face", "mmpretrain")
"""Layouts of projects in which padding of a Swin takes part in attention."""
Positions = PositionMethod | Literal["auto"]
"""How a table of positions is resized; auto: as the project does whose layout the weights have."""
Windows = WindowMethod | Literal["auto"]
"""The same for a table of relative positions."""


def put(
    model: Classifier,
    stored: StoredWeights,
    *,
    trained_size: Grid | None,
    positions: Positions = "auto",
    windows: Windows = "auto",
    new_head: NewHead = "auto",
) -> Fitting:
    """Put weights into a model. Only a head may be missing; anything else that does not fit is an
    error, which leaves the model unchanged.
    """
    fitting = Fitting(dict(stored.converted.tensors), warnings=list(stored.warnings))
    own = model.state_dict(keep_vars=True)
    shapes = {name: tensor.shape for name, tensor in own.items()}
    fits = shapes == {name: tensor.shape for name, tensor in fitting.tensors.items()}
    try:
        if not fits or new_head in ("always", "other_classes"):
            _fit(model, stored, fitting, trained_size, positions, windows)
            fit_head(model, fitting, new_head)
        _check(own, stored, fitting)
    except CheckpointError as error:
        raise CheckpointError(f"{stored.path} ({stored.layout or 'timm'}): {error}") from error
    _compare_settings(model, stored, fitting)
    _compare_padding(model, stored, fitting)
    _assign(model, own, fitting.tensors, copy=stored.in_memory)
    return fitting


def _fit(
    model: Classifier,
    stored: StoredWeights,
    fitting: Fitting,
    trained_size: Grid | None,
    positions: Positions,
    windows: Windows,
) -> None:
    sizes = (trained_size, stored.metadata.image_size)
    method, relative = resizing(project_of(stored), stored.tensors.keys())
    method = method if positions == "auto" else positions
    relative = relative if windows == "auto" else windows
    for name, own in model.state_dict().items():  # resized in the precision of the model
        if own.dtype == torch.float64 and name in fitting.tensors:
            fitting.tensors[name] = fitting.tensors[name].to(own.dtype)
    if isinstance(model, ViT):
        fit_vit(model, fitting, sizes, method, relative)
    elif isinstance(model, Swin):
        fit_swin(model, fitting, sizes, method, relative)
        _compare_windows(model, stored, fitting)
    elif isinstance(getattr(model, "config", None), TimmConfig):
        from vision.checkpoints.fit.timm_weights import fit_timm  # timm is slow to load

        fit_timm(cast("TimmModel", model), fitting, own_run=stored.record is not None)


def project_of(stored: StoredWeights) -> str | None:
    """Whose way of resizing tables the weights have: their layout's, or that of the layout that a
    converted file had; timm's where the architecture is one of timm's.
    """
    if stored.record is not None and stored.record.origin is not None:
        return stored.record.origin.layout
    return "timm" if stored.metadata.architecture else stored.layout


def _check(wanted: Mapping[str, Tensor], stored: StoredWeights, fitting: Fitting) -> None:
    """Every parameter has its tensor, every tensor its parameter, of the same shape and finite."""
    found = fitting.tensors
    missing = [name for name in wanted if name not in found and name not in fitting.new]
    unexpected = [*stored.converted.unknown, *(name for name in found if name not in wanted)]
    shapes = [
        f"'{name}' is {tuple(found[name].shape)}, the model's is {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    problems = []
    if unexpected:
        names = [f"'{name}'{_near(name, missing)}" for name in unexpected]
        problems.append(f"{_count(unexpected)} that the model does not have: {shorten(names)}")
    if missing:
        problems.append(
            f"{_count(missing)} of the model that are not in the file: "
            f"{shorten([repr(name) for name in missing])}"
        )
    if shapes:
        problems.append(f"{_count(shapes)} of another shape: {shorten(shapes)}")
    if problems:
        raise CheckpointError(
            f"the weights do not fit the model. There are {'; and '.join(problems)}. "
            f"Nothing was loaded. {remedy(stored)}"
        )
    bad = nonfinite(found)
    if bad:
        names = [f"'{name}'" for name in bad]
        raise CheckpointError(f"NaN or infinity in {_count(bad)}: {shorten(names)}.")


def remedy(stored: StoredWeights) -> str:
    """What works for weights that are not opened as a model of this project."""
    name = stored.metadata.architecture
    if name is not None:
        return f"timm's own model takes them: model=timm model.name={name}"
    return (
        "rename=… maps other names to known ones; a model of timm takes its own weights: "
        "model=timm model.name=…"
    )


def _compare_padding(model: Classifier, stored: StoredWeights, fitting: Fitting) -> None:
    """Say where a Swin masks padding that takes part in attention in the project of the weights."""
    if not isinstance(model, Swin) or stored.layout not in ATTENDED:
        return
    padded = any(shape.padded != shape.grid for shape in model.shapes(model.grid))
    if padded and model.config.padding == "mask":
        fitting.warnings.append(
            "At this image size grids are padded to whole windows. Padding is masked here, while "
            "it takes part in attention in the project that wrote the weights; "
            "model.padding=attend computes the same."
        )


def _compare_windows(model: Swin, stored: StoredWeights, fitting: Fitting) -> None:
    """Whether a Swin V2 measures offsets as the weights did, where those show it."""
    offsets = stored_offsets(stored.tensors)
    if not isinstance(model, SwinV2) or len(offsets) != len(model.windows):
        return
    assert isinstance(model.config, SwinV2Config)
    own = model.config.pretrained_window or tuple(max(window) for window in model.windows)
    trained = tuple(offset.trained for offset in offsets)
    if own != trained:
        fitting.warnings.append(
            f"The position networks of the weights measure offsets in windows of {list(trained)}, "
            f"the model in {list(own)}. Set model.pretrained_window={list(trained)}."
        )


def _compare_settings(model: nn.Module, stored: StoredWeights, fitting: Fitting) -> None:
    """Warn where the weights were trained with other settings than the model's."""
    config = getattr(model, "config", None)
    for name, fact in stored.converted.facts.items():
        value = stored.metadata.model.get(name, fact)
        own = getattr(config, name, value)
        own = list(own) if isinstance(own, tuple) else own
        if own != value:
            fitting.warnings.append(
                f"The weights were trained with {name}={value}; the model has {name}={own}."
            )


def _assign(
    model: nn.Module, values: Mapping[str, Tensor], tensors: Mapping[str, Tensor], copy: bool
) -> None:
    """Give every parameter its values, in its own type and on its own device.

    Without `copy` a parameter takes over the tensor's memory where that has the right form, and
    stays the same object, so that an optimiser that refers to it stays valid.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    empty = [name for name, own in values.items() if own.is_meta]
    if missing := [name for name in empty if name not in tensors]:
        raise ValueError(
            f"a model on the meta device has no values for {shorten(sorted(missing))}."
        )
    with torch.no_grad():
        for name, own in values.items():
            if name not in tensors:
                continue
            tensor = tensors[name]
            if own.is_meta:
                _replace(modules, name, own, tensor.to(own.dtype, copy=copy))
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


def _replace(modules: Mapping[str, nn.Module], name: str, own: Tensor, tensor: Tensor) -> None:
    """A tensor for one that has no memory: `load_state_dict(assign=True)` for one name, quicker."""
    place, _, leaf = name.rpartition(".")
    parameter = isinstance(own, nn.Parameter)
    new = nn.Parameter(tensor, requires_grad=own.requires_grad) if parameter else tensor
    setattr(modules[place], leaf, new)


def _near(name: str, missing: list[str]) -> str:
    near = difflib.get_close_matches(name, missing, n=1, cutoff=0.6)
    return f" (did it mean '{near[0]}'?)" if near else ""


def _count(items: list[str]) -> str:
    return f"{len(items)} tensor{'' if len(items) == 1 else 's'}"
