"""An exponential moving average of a model's weights: a plain dict of tensors.

The average has the names of the model's parameters and stored buffers. Integers (such as the number
of batches that a BatchNorm has seen) are not averaged.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def start_average(model: nn.Module) -> dict[str, Tensor]:
    """The average before the first step: a copy of the weights."""
    return {name: tensor.clone() for name, tensor in _averaged_tensors(model).items()}


def decay_at(step: int, decay: float) -> float:
    """min(decay, (1 + step) / (10 + step)), for the update number `step`, counted from 0.

    With a constant decay of 0.9999 the random weights of the start would keep more than a third of
    the average for ten thousand steps, and a short run would evaluate little else. With this rise,
    TensorFlow's, the average looks back over about the last ninth of the run until the configured
    decay is reached. It is a function of the step alone, so there is no state to save.
    """
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(average: Mapping[str, Tensor], model: nn.Module, decay: float) -> None:
    """average ← decay · average + (1 − decay) · weights, in place."""
    current = _averaged_tensors(model)
    torch._foreach_lerp_(list(average.values()), [current[name] for name in average], 1 - decay)


@contextmanager
def averaged(model: nn.Module, average: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the model has the averaged weights; afterwards its own, to the bit.

    Values are copied, tensors are not exchanged: optimisers, compiled graphs and sharded parameters
    keep references to them.
    """
    current = _averaged_tensors(model)
    own = {name: tensor.clone() for name, tensor in current.items()}
    try:
        _copy(average, current)
        yield
    finally:
        _copy(own, current)


def _averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point parameters and stored buffers themselves, not copies."""
    return {name: t for name, t in model.state_dict().items() if t.is_floating_point()}


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(values[name])
