"""Methods that weigh attention by the gradient of one class.

Every gradient is that of the very tensor that the forward pass used, so layers cannot be mixed up.

Axes: b batch · h heads · q queries · n tokens · w windows · t, s slots · c width.
"""

from typing import Literal

import torch
from torch import Tensor

from vision.inspection.capture.captured import Captured, LayerAttention
from vision.inspection.methods.rollout import (
    Residual,
    attention_share,
    carried,
    descend,
    mixed,
    span,
    without_padding,
)

Clamp = Literal["after", "before"]
"""Whether negative products are cut off after the mean over heads or before it."""


def gradient_weighted(layer: LayerAttention, clamp: Clamp) -> Tensor:
    """Positive part of attention × gradient, mean over heads: (b n n) or (b w t s)."""
    product = layer.weights * layer.need_gradient()
    match clamp:
        case "after":
            matrix = product.mean(layer.head_axis).clamp_min(0)
        case "before":
            matrix = product.clamp_min(0).mean(layer.head_axis)
        case _:
            raise ValueError(f"clamp must be 'after' or 'before' the mean, found {clamp!r}.")
    return without_padding(matrix, layer.layout)


def gradient_rollout(
    captured: Captured,
    seed: Tensor,
    *,
    clamp: Clamp = "after",
    residual: Residual = 0.5,
    normalize: bool = False,
    start_layer: int = 0,
) -> Tensor:
    """Rollout of gradient-weighted attention: (b q n).

    normalize: give the rows of each layer the sum 1 before the identity is added; otherwise small
    gradients leave nearly all the weight on it.
    """

    def step(rows: Tensor, layer: LayerAttention) -> Tensor:
        matrix = gradient_weighted(layer, clamp)
        if normalize:
            matrix = _normalized(matrix)
        return mixed(rows, matrix, layer.layout, attention_share(layer, residual))

    *_, (_, rows) = descend(span(captured, start_layer, -1), seed, step)
    return rows


def chefer(
    captured: Captured, seed: Tensor, *, normalize: bool = False, start_layer: int = 0
) -> Tensor:
    """Generic attribution, R ← R + Ā R (Chefer et al., ICCV 2021, section 3): (b q n).

    The identity path is left out. For a class token that changes no cell; for a pooled query the
    identity would add the query itself to the map.
    """

    def step(both: Tensor, layer: LayerAttention) -> Tensor:
        # The identity path is carried separately: subtracting it at the end would lose most digits.
        found, identity = both.chunk(2, dim=1)
        matrix = gradient_weighted(layer, "before")
        matrix = _normalized(matrix) if normalize else matrix
        found = found + carried(found + identity, matrix, layer.layout)
        return torch.cat([found, identity], dim=1)

    both = torch.cat([torch.zeros_like(seed), seed], dim=1)
    *_, (_, both) = descend(span(captured, start_layer, -1), both, step)
    return both.chunk(2, dim=1)[0]


def attention_gradcam(layer: LayerAttention, seed: Tensor) -> Tensor:
    """ReLU(mean over heads of g_h · a_h): (b q n), zero for prefix tokens.

    a_h: the query's attention in head h; g_h: the mean over cells of its gradient (Chefer et al.,
    CVPR 2021, baseline). A query of several tokens takes their rows in its proportions.
    """
    prefix = len(layer.layout.prefix)
    heads = layer.weights.unbind(layer.head_axis)
    total = torch.zeros_like(seed)
    for head, gradient in zip(heads, layer.need_gradient().unbind(layer.head_axis), strict=True):
        attended, slopes = (
            carried(seed, without_padding(matrix, layer.layout), layer.layout)
            for matrix in (head, gradient)
        )
        total = total + slopes[..., prefix:].mean(-1, keepdim=True) * attended
    total = (total / len(heads)).clamp_min(0)
    total[..., :prefix] = 0
    return total


def token_gradcam(layer: LayerAttention) -> Tensor:
    """Grad-CAM (Selvaraju et al., ICCV 2017) on the input of a layer's attention: (b n).

    Channels are weighted by the mean of their gradient over the cells. Not on the last tokens: in
    a model with a class token the gradients of all other last tokens are zero.
    """
    if layer.inputs is None or layer.inputs_gradient is None:
        raise ValueError(
            f"Token Grad-CAM of {layer.name} needs the input of its attention with gradients: "
            "capture(..., gradients=True)."
        )
    prefix = len(layer.layout.prefix)
    weights = layer.inputs_gradient[:, prefix:].mean(dim=1)
    values = torch.einsum("bnc,bc->bn", layer.inputs, weights).clamp_min(0)
    values[:, :prefix] = 0
    return values


def _normalized(matrix: Tensor) -> Tensor:
    """Rows that sum to 1; empty rows stay empty."""
    total = matrix.sum(dim=-1, keepdim=True)
    return matrix / total.masked_fill(total == 0, 1)
