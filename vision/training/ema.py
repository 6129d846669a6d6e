"""An exponential moving average of a model's weights: a plain dict of tensors.

The average has the names of the model's own parameters and buffers, whatever the model is wrapped
in. Whole numbers (such as the number of batches that a BatchNorm has seen) are not averaged.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Average = dict[str, Tensor]


def start_average(model: nn.Module) -> Average:
    """The average before the first step: a copy of the weights."""
    return {name: tensor.clone() for name, tensor in _averaged_tensors(model).items()}


def decay_at(step: int, decay: float) -> float:
    """min(decay, (1 + step) / (10 + step)), for the update number `step`, counted from 0.

    With a constant decay of 0.9999 the random weights of the start would keep more than a third of
    the average for ten thousand steps, and a short run would evaluate little else. With this rise,
    TensorFlow's, the average looks back over about the last ninth of the run until the configured
    decay is reached. A function of the step alone, so that there is nothing to save.
    """
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(average: Mapping[str, Tensor], model: nn.Module, decay: float) -> None:
    """average ← decay · average + (1 − decay) · weights, in place."""
    current = _averaged_tensors(model)
    _check_names(average, current)
    torch._foreach_lerp_(list(average.values()), [current[name] for name in average], 1 - decay)


@contextmanager
def averaged(model: nn.Module, average: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the context the model has the averaged weights; afterwards its own, to the bit.

    Values are copied, not tensors exchanged: optimisers, compiled graphs and sharded parameters
    hold on to the tensors that they know.
    """
    current = _averaged_tensors(model)
    _check_names(average, current)
    own = {name: tensor.clone() for name, tensor in current.items()}
    try:
        _copy(average, current)
        yield
    finally:
        _copy(own, current)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of what DistributedDataParallel and torch.compile made of it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point parameters and stored buffers: the tensors themselves, no copies."""
    state = unwrapped(model).state_dict()
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _check_names(average: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    if different := average.keys() ^ current.keys():
        raise ValueError(
            f"the average is of another model: {len(different)} names are only in one of them, "
            f"such as {min(different)}."
        )


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(values[name])
