"""timm's own definition of an architecture as the authority on the settings of its weights.

Where a config.json or a timm: name says the architecture, timm builds that model on the meta
device, and our settings are read off its modules. Everything that changes the function is read, or
the model is refused: a class, layer or option that is not known here is never passed over.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn

from vision.checkpoints.errors import CheckpointError
from vision.config import square

T = TypeVar("T")
LARGEST, LARGEST_DEPTH = 100_000, 200
"""Limits of what a config.json may ask timm to build."""


class Described(NamedTuple):
    """An architecture in our words."""

    settings: dict[str, Any]
    """All settings of its config that change the function."""
    notes: tuple[str, ...] = ()
    """Where timm computes something else, but not for images of the size in training."""


class UnlikeError(Exception):
    """Something in timm's model that no model of this project has."""


def describe(
    architecture: str, arguments: Mapping[str, Any], pretrained: Mapping[str, Any]
) -> Described | None:
    """Settings of timm's `architecture`, built with what config.json calls model_args and
    pretrained_cfg. None: this version of timm does not have it.
    """
    from vision.checkpoints.layouts.timm.timm_swins import swin
    from vision.checkpoints.layouts.timm.timm_vits import vit

    model = _built(architecture, arguments, pretrained)
    if model is None:
        return None
    try:
        found = swin(model) or vit(model)
    except UnlikeError as reason:
        raise CheckpointError(
            f"timm's {architecture} is not among the models of this project: {reason}. It runs as "
            f"a baseline: model=timm model.name={architecture}"
        ) from reason
    return found


def _built(
    architecture: str, arguments: Mapping[str, Any], pretrained: Mapping[str, Any]
) -> Any | None:
    """timm's model without memory for its weights."""
    from timm.models import PretrainedCfg, is_model, model_entrypoint

    name = architecture.partition(".")[0]
    if not is_model(name):
        return None
    fields = {field.name for field in dataclasses.fields(PretrainedCfg)}
    known = {key: value for key, value in pretrained.items() if key in fields}
    given = {key: value for key, value in arguments.items() if value is not None}
    try:
        _check_sizes(given)
        # Not create_model: it would open any file that an argument names.
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model_entrypoint(name)(pretrained=False, pretrained_cfg=known or None, **given)
    except (TypeError, ValueError, KeyError, RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"timm cannot build {architecture} as config.json describes it "
            f"(model_args: {dict(arguments)}): {error}. Correct or remove the entry."
        ) from error


def _check_sizes(arguments: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, before timm spends minutes on them."""
    for name, value in arguments.items():
        for number in value if isinstance(value, list | tuple) else (value,):
            largest = LARGEST_DEPTH if name.startswith("depth") else LARGEST
            if isinstance(number, int | float) and number > largest:
                raise ValueError(f"{name} = {value} is larger than {largest}")


def unlike(reason: str) -> NoReturn:
    """Refuse timm's model."""
    raise UnlikeError(reason)


def require(condition: bool, otherwise: str) -> None:
    """Refuse timm's model unless the condition holds."""
    if not condition:
        raise UnlikeError(otherwise)


def normed(module: nn.Module) -> bool:
    """Whether a place has a LayerNorm; any other norm is refused."""
    from timm.layers import LayerNorm  # type: ignore[attr-defined]

    if type(module) is nn.Identity:
        return False
    plain = type(module) in (nn.LayerNorm, LayerNorm)
    require(plain, f"its norms are {type(module).__name__}")
    require(module.weight is not None and module.bias is not None, "its norms lack a bias")
    return True


def norm_eps(model: nn.Module) -> float:
    """The one eps of all norms."""
    found = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    require(len(found) == 1, f"its norms have different eps {sorted(found)}")
    return float(found.pop())


def activation(module: nn.Module) -> str:
    """Our name of an activation."""
    from timm.layers import GELU, GELUTanh, QuickGELU

    if isinstance(module, nn.GELU):
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    names = {GELU: "gelu", GELUTanh: "gelu_tanh", QuickGELU: "quick_gelu"}
    names |= {nn.SiLU: "silu", nn.ReLU: "relu"}
    found = names.get(type(module))
    return found or unlike(f"its activation is {type(module).__name__}")


def patch_size(stem: Any, convolution: Any) -> int | list[int]:
    """The patch of a stem that is one convolution by steps of its own size."""
    kernel = tuple(convolution.kernel_size)
    plain = kernel == tuple(convolution.stride) and tuple(convolution.padding) == (0, 0)
    require(plain, "its patches overlap or are padded")
    return square(kernel)


def same(values: list[T], otherwise: str) -> T:
    """The one value that all have."""
    require(all(value == values[0] for value in values), otherwise)
    return values[0]
