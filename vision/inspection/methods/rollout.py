"""Methods that follow a query from the last layer to the first: rollout and its relatives.

A rollout of one query is a row vector r of shares over tokens that goes down through the layers,
r ← r Â with Â = rows of (a · A + (1 - a) · I) made to sum to 1, so no product of matrices is ever
needed (Abnar & Zuidema, ACL 2020). A is one layer's attention with its heads fused and a the share
of the attention branch. In a layer of windows A has a block per window, and r is gathered into
windows and back; where patches were merged, the share of a token goes to its children in equal
parts. Methods of a class weigh A by the gradient of its logit, which is that of the very tensor
that the forward pass used, so layers cannot be mixed up.

Axes: b batch · h heads · q queries · n tokens · w windows · t, s slots (queries, keys).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vision.inspection.capture.captured import Captured, Fusion, LayerAttention, fuse
from vision.inspection.capture.token_layout import Layout, Place
from vision.models.layers import ceil_div

Residual = float | Literal["measured"]
"""The weight of the identity: fixed, or as measured in the forward pass, token by token."""
Clamp = Literal["after", "before"]
"""Whether negative products are cut off after the mean over heads or before it."""
Query = Place | Literal["pool", "cam"]
"""A prefix token, a cell, what the head sees, or the cells that speak for a class."""
POOLED = {
    "class": {"class": 1.0},
    "mean": {"cells": 1.0},
    "class and distillation": {"class": 0.5, "distillation": 0.5},
    "class and mean": {"class": 0.5, "cells": 0.5},
}
"""The shares of tokens in what the head sees, by kind of pooling."""


def rollout(captured: Captured, seed: Tensor, **options: Any) -> Tensor:
    """Shares of the tokens that enter the lowest layer of `rollout_steps`: (b q n)."""
    *_, (_, rows) = rollout_steps(captured, seed, **options)
    return rows


def rollout_steps(
    captured: Captured,
    seed: Tensor,
    *,
    fusion: Fusion = "mean",
    residual: Residual = 0.5,
    discard: float = 0.0,
    start_layer: int = 0,
    end_layer: int = -1,
) -> Iterator[tuple[LayerAttention, Tensor]]:
    """Layer by layer from `end_layer` down to `start_layer`: the layer, and the shares before it.

    seed: (b q n), shares of the tokens of `end_layer`; each row of the result has the sum of its
    seed. discard: the share of the smallest weights of each row that is left out, never those of
    prefix tokens nor the token's own.
    """
    if not 0 <= discard < 1:
        raise ValueError(f"discard must be at least 0 and below 1, found {discard}.")

    def step(rows: Tensor, layer: LayerAttention) -> Tensor:
        matrix = fused(layer, fusion, discard)
        return mixed(rows, matrix, layer.layout, attention_share(layer, residual))

    layers = span(captured, start_layer, end_layer)
    return descend(layers, seed, step)


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


def span(captured: Captured, start_layer: int, end_layer: int) -> list[LayerAttention]:
    """The layers from one number to another; negative numbers count from the end."""
    layers = captured.need_all()
    start, end = (captured.layer(n).number for n in (start_layer, end_layer))
    if start > end:
        raise ValueError(f"start_layer {start_layer} lies above end_layer {end_layer}.")
    return layers[start : end + 1]


def descend(
    layers: Sequence[LayerAttention],
    seed: Tensor,
    step: Callable[[Tensor, LayerAttention], Tensor],
) -> Iterator[tuple[LayerAttention, Tensor]]:
    """Take shares down through layers, and through the merging of patches between them."""
    tokens = layers[-1].layout.tokens
    if seed.ndim != 3 or seed.shape[-1] != tokens:
        raise ValueError(f"Expected a seed (b, queries, {tokens}), found {tuple(seed.shape)}.")
    rows = seed
    above: Layout | None = None
    for layer in reversed(layers):
        if above is not None and above.grid != layer.layout.grid:
            rows = unmerged(rows, above, layer.layout)
        rows = step(rows, layer)
        above = layer.layout
        yield layer, rows


def unmerged(rows: Tensor, merged: Layout, parts: Layout) -> Tensor:
    """Shares (b q n) of merged tokens, given in equal parts to the 1, 2 or 4 cells of each."""
    (rows_above, columns_above), (y, x) = merged.grid, parts.grid
    if (rows_above, columns_above) != (ceil_div(y, 2), ceil_div(x, 2)) or parts.prefix:
        raise ValueError(
            f"A grid of {y} x {x} is followed by one of {rows_above} x {columns_above}, which "
            "merging 2 x 2 cells does not explain: rollout is impossible across these layers."
        )
    up, left = torch.arange(y, device=rows.device) // 2, torch.arange(x, device=rows.device) // 2
    parent = (up[:, None] * columns_above + left[None]).flatten()
    children = torch.bincount(parent, minlength=merged.cells)
    return (rows / children)[..., parent]


def attention_share(layer: LayerAttention, residual: Residual) -> float | Tensor:
    """The weight of the attention branch: a number, or measured by token (b n)."""
    if residual == "measured":
        if layer.share is None:
            raise ValueError(
                f"The residual share of {layer.name} could not be measured in this kind of block: "
                "give a number, such as residual=0.5."
            )
        return layer.share
    if isinstance(residual, str) or not 0 <= residual <= 1:
        raise ValueError(f"residual must be from 0 to 1 or 'measured', found {residual!r}.")
    return 1 - residual


def fused(layer: LayerAttention, fusion: Fusion, discard: float = 0.0) -> Tensor:
    """One layer's attention with its heads as one: (b n n) or (b w t s), nothing on padding."""
    if layer.reduced not in (None, fusion):
        raise ValueError(f"Captured with reduce={layer.reduced!r}: {fusion!r} is not available.")
    matrix = fuse(layer.weights, fusion, dim=layer.head_axis)
    matrix = without_padding(matrix, layer.layout)
    return _discarded(matrix, layer.layout, discard) if discard else matrix


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


def _normalized(matrix: Tensor) -> Tensor:
    """Rows that sum to 1; empty rows stay empty."""
    total = matrix.sum(dim=-1, keepdim=True)
    return matrix / total.masked_fill(total == 0, 1)


def without_padding(matrix: Tensor, layout: Layout) -> Tensor:
    """A layer's matrix with zero for padding keys."""
    if layout.index is None or not bool(layout.padding().any()):
        return matrix
    return matrix.masked_fill(layout.padding()[:, None, :], 0)


def mixed(rows: Tensor, matrix: Tensor, layout: Layout, share: float | Tensor) -> Tensor:
    """r Â: rows of (share · matrix + (1 - share) · I) are made to sum to 1 before r meets them.

    rows: (b q n). A token whose row has nothing in it keeps its share.
    """
    sums = matrix.sum(dim=-1)
    sums = sums if layout.index is None else layout.by_cell(sums)
    weight = torch.as_tensor(share, dtype=sums.dtype, device=sums.device).expand_as(sums)
    total = weight * sums + (1 - weight)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    moves = (weight / total).masked_fill(empty, 0)
    stays = ((1 - weight) / total).masked_fill(empty, 1)
    return carried(rows * moves[:, None], matrix, layout) + rows * stays[:, None]


def carried(rows: Tensor, matrix: Tensor, layout: Layout) -> Tensor:
    """r A of one layer: rows (b q n) times a matrix (b n n), or one of windows (b w t s)."""
    if layout.index is None:
        return rows @ matrix
    slots = rows[..., layout.index.clamp_min(0)]
    if bool(layout.padding().any()):
        slots = slots.masked_fill(layout.padding(), 0)
    return layout.by_cell(torch.einsum("bqwt,bwts->bqws", slots, matrix))


def seed_of(captured: Captured, query: Query = "pool", *, layer: int | str = -1) -> Tensor:
    """A query as shares of a layer's tokens: (b 1 n)."""
    layout = captured.layout if layer == -1 else captured.layer(layer).layout
    shares = captured.layers[-1].weights.new_zeros(layout.tokens)
    pool = captured.anatomy.pool
    if query != "pool":
        shares[layout.query(query)] = 1
    elif pool == "attention":
        assert captured.pooling is not None  # recorded with every layer
        return captured.pooling[:, None]
    elif pool in POOLED:
        for place, weight in POOLED[pool].items():
            if place == "cells":
                shares[len(layout.prefix) :] += weight / layout.cells
            else:
                shares[layout.query(place)] += weight
    else:
        raise ValueError(
            f"How {captured.model} pools its tokens is unknown, so 'pool' is not a query: "
            "name a prefix token or a cell."
        )
    return shares.expand(captured.batch, 1, -1)


def _discarded(matrix: Tensor, layout: Layout, share: float) -> Tensor:
    """Zero for the smallest weights of each row; prefix keys and the diagonal are spared."""
    size = matrix.shape[-1]
    spared = torch.eye(size, dtype=torch.bool, device=matrix.device)
    if layout.index is None:
        spared[:, : len(layout.prefix)] = True
    else:
        spared = spared | layout.padding()[:, None, :]
        if layout.allowed is not None:
            spared = spared | ~layout.allowed
    number = ((~spared).sum(dim=-1, keepdim=True) * share).floor()
    ordered = matrix.masked_fill(spared, torch.inf)
    rank = ordered.argsort(dim=-1).argsort(dim=-1)
    return matrix.masked_fill((rank < number) & ~spared, 0)
