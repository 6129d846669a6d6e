"""The state of a torch optimiser as tensors and a plain record, by the names of its parameters.

Torch numbers the parameters in the order in which the optimiser was given them. Here every value is
stored under its parameter's name, so that another order can never give a parameter another one's
momentum, and a resumed run whose parameters are not the stored ones is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vision.checkpoints.files.mapped import DTYPE_NAMES, STORED_DTYPES
from vision.checkpoints.native.header import Record, check_record

Names = Sequence[Sequence[str]]
"""The names of the parameters of each group, in the optimiser's order."""


def parameter_names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """The name in `model` of every parameter of every group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def flatten_optimizer(
    state_dict: Mapping[str, Any], names: Names
) -> tuple[dict[str, Tensor], Record]:
    """The tensors of an optimiser's state dict, named `state/<parameter>/<key>`, and a record of
    everything else that says where they belong.

    `names` are those of the parameters of each group.
    """
    state_dict = _rename(state_dict, _numbering(state_dict["param_groups"], names))
    tensors: dict[str, Tensor] = {}
    record = {key: _split(value, (key,), tensors) for key, value in state_dict.items()}
    check_record(record, "optimizer")
    return tensors, record


def unflatten_optimizer(
    tensors: Mapping[str, Tensor], record: Mapping[str, Any], names: Names
) -> dict[str, Any]:
    """The state dict for an optimiser whose groups hold the parameters `names`, in that order."""
    state_dict = {key: _join(value, tensors) for key, value in record.items()}
    groups = state_dict["param_groups"]
    _check_same_groups([group["params"] for group in groups], names)
    flat = [name for group in names for name in group]
    renamed = _rename(state_dict, {name: number for number, name in enumerate(flat)})
    for group in renamed["param_groups"]:
        group["params"].sort()
    return renamed


def _numbering(groups: Sequence[Mapping[str, Any]], names: Names) -> dict[int, str]:
    """The name of each number of a state dict."""
    sizes, given = [len(group["params"]) for group in groups], [len(group) for group in names]
    if sizes != given:
        raise ValueError(
            f"The optimiser's groups hold {sizes} parameters, but {given} names are given."
        )
    flat = [name for group in names for name in group]
    if len(set(flat)) < len(flat):
        repeated = sorted({name for name in flat if flat.count(name) > 1})
        raise ValueError(f"Parameters in the optimiser twice: {', '.join(repeated)}.")
    numbers = [number for group in groups for number in group["params"]]
    return dict(zip(numbers, flat, strict=True))


def _rename(state_dict: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    """The state dict with other keys for its parameters. Keys of the state that stand for no
    parameter (some optimisers keep values of their own there) stay.
    """
    return {
        **state_dict,
        "state": {new.get(key, key): value for key, value in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [new[key] for key in group["params"]]}
            for group in state_dict["param_groups"]
        ],
    }


def _check_same_groups(stored: Names, names: Names) -> None:
    if len(stored) != len(names):
        raise ValueError(
            f"The checkpoint's optimiser has {len(stored)} groups of parameters, this one "
            f"{len(names)}. Resume with the settings that the run was started with."
        )
    for index, (old, new) in enumerate(zip(stored, names, strict=True)):
        if set(old) != set(new) or len(old) != len(new):
            missing, extra = sorted(set(new) - set(old)), sorted(set(old) - set(new))
            raise ValueError(
                f"Group {index} of the checkpoint's optimiser holds other parameters than this "
                f"one: without {missing[:5]}, but with {extra[:5]}. Resume with the settings that "
                f"the run was started with."
            )


def _split(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """A value without its tensors, which go to `tensors`. What JSON cannot say is wrapped in a
    mapping whose one key starts with $.
    """
    match value:
        case Tensor():
            name = "/".join(path)
            if name in tensors:
                raise ValueError(f"Two values of the optimiser's state are named '{name}'.")
            tensors[name] = value
            return {"$tensor": name}
        case torch.dtype():
            return {"$dtype": DTYPE_NAMES[value]}
        case list():
            return [_split(v, (*path, str(i)), tensors) for i, v in enumerate(value)]
        case tuple() if type(value) is tuple:
            return {"$tuple": [_split(v, (*path, str(i)), tensors) for i, v in enumerate(value)]}
        case dict() if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: _split(v, (*path, k), tensors) for k, v in value.items()}
        case dict():
            pairs = [[k, _split(v, (*path, str(k)), tensors)] for k, v in value.items()]
            return {"$items": pairs}
        case _:
            return value


def _join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `_split` took apart."""
    match value:
        case {"$tensor": name}:
            if name not in tensors:
                raise ValueError(f"The checkpoint's optimiser lacks the tensor '{name}'.")
            return tensors[name]
        case {"$dtype": dtype}:
            return STORED_DTYPES[dtype]
        case {"$tuple": items}:
            return tuple(_join(v, tensors) for v in items)
        case {"$items": pairs}:
            return {k: _join(v, tensors) for k, v in pairs}
        case dict():
            return {k: _join(v, tensors) for k, v in value.items()}
        case list():
            return [_join(v, tensors) for v in value]
        case _:
            return value
