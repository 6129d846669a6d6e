"""Keeping gradients within bounds before the step."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor],
    clip: Literal["none", "norm", "value", "agc"],
    clip_at: float,
    head: Iterable[Tensor] = (),
) -> Tensor:
    """Clip the gradients in place; returns the norm of all of them before that, on their device.

    norm: all together have at most the norm `clip_at`. value: no number is larger. agc: no unit's
    gradient is larger than this share of its weights (Brock et al., ICML 2021); as in the paper the
    parameters of the `head` are left alone by that, and by that only.
    """
    learning = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in learning if parameter.grad is not None]
    total = get_total_norm(gradients)
    match clip:
        case "none":
            pass
        case "norm":
            clip_grads_with_norm_(learning, clip_at, total)
        case "value":
            clip_grad_value_(learning, clip_at)
        case "agc":
            exempt = {id(parameter) for parameter in head}
            for parameter in learning:
                if id(parameter) not in exempt and parameter.grad is not None:
                    _clip_units(parameter, parameter.grad, clip_at)
    return total.full_tensor() if isinstance(total, DTensor) else total


def _clip_units(weights: Tensor, gradient: Tensor, share: float) -> None:
    """Scale the gradient of each unit (row of a matrix, output channel) down to its limit.

    Written without timm's function, which cannot handle parameters that are spread over devices.
    """
    # Weights near 0 may grow: they count as 10⁻³.
    limit = _unit_norms(weights).clamp(min=1e-3) * share
    norm = _unit_norms(gradient)
    gradient.mul_(torch.where(norm > limit, limit / norm, torch.ones_like(norm)))


def _unit_norms(tensor: Tensor) -> Tensor:
    axes = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=axes, keepdim=axes is not None)
    return norms
