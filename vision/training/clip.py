"""Gradient clipping."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor],
    clip: Literal["none", "norm", "value", "agc"],
    clip_at: float,
    head: Iterable[Tensor] = (),
) -> None:
    """Clip the gradients in place.

    norm: the norm of all gradients together is at most `clip_at`. value: so is every number. agc:
    so is the gradient of every unit, relative to its weights (Brock et al., ICML 2021), except in
    the `head`, as in the paper.
    """
    parameters = list(parameters)
    match clip:
        case "norm":
            clip_grad_norm_(parameters, clip_at)
        case "value":
            clip_grad_value_(parameters, clip_at)
        case "agc":
            exempt = {id(parameter) for parameter in head}
            for parameter in parameters:
                if id(parameter) not in exempt and parameter.grad is not None:
                    _clip_units(parameter, parameter.grad, clip_at)


def _clip_units(weights: Tensor, gradient: Tensor, share: float) -> None:
    """Scale the gradient of each unit (row of a matrix, output channel) down to its limit.

    Not timm's function, which cannot handle sharded parameters.
    """
    # Weights near 0 may grow: they count as 10⁻³.
    limit = _unit_norms(weights).clamp(min=1e-3) * share
    norm = _unit_norms(gradient)
    gradient.mul_(torch.where(norm > limit, limit / norm, torch.ones_like(norm)))


def _unit_norms(tensor: Tensor) -> Tensor:
    axes = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=axes, keepdim=axes is not None)
    return norms
