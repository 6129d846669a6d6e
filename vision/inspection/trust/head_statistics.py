"""Statistics of heads, and of what a model has learned of positions, independent of classes.

As in the ViT paper's figure 7 (Dosovitskiy et al., ICLR 2021): distances (right),
position similarity (middle), patch filters (left); and for windows the bias by relative position.

Axes: b batch · h heads · n tokens · w windows · t, s slots · y, x rows and columns.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.inspection.capture.captured import Captured, LayerAttention
from vision.inspection.capture.token_layout import Layout
from vision.models.windows import relative_index


class HeadStatistics(NamedTuple):
    """Statistics of one layer, each (b h): means over the querying cells."""

    distance: Tensor
    """Pixels between the centres of querying and attended cell; weights over cells sum to 1."""
    entropy: Tensor
    """In nats, over all keys."""
    prefix_mass: Tensor
    """Weight on prefix tokens."""
    self_mass: Tensor
    """Weight on the cell itself."""
    padding_mass: Tensor
    """Weight on padding, which some models do not mask."""
    wrapped_mass: Tensor
    """Weight on cells at least a window away, which a shift brought around the image's edge."""


def head_statistics(layer: LayerAttention) -> HeadStatistics:
    """The statistics of a layer's heads. Heads that were fused by `reduce` count as one."""
    layout, weights = layer.layout, layer.weights.float()
    prefix = len(layout.prefix)
    offsets = _offsets(layout, weights.device)  # (t s 2) or (w t s 2)
    pixels = offsets * torch.tensor(layout.stride, device=offsets.device)
    distance = pixels.float().norm(dim=-1)
    asking, real = torch.ones((), device=weights.device), torch.ones((), device=weights.device)
    far = torch.zeros_like(distance)
    if layout.index is None:
        weights, on_prefix = weights[:, :, prefix:, prefix:], weights[:, :, prefix:, :prefix]
        entropy = _entropy(weights) + _entropy(on_prefix)
    else:
        weights = rearrange(weights, "b w h t s -> b h w t s")
        cells = (~layout.padding()).float()
        asking, real = cells, cells[:, None, :]
        assert layout.window is not None
        window = torch.tensor(layout.window, device=offsets.device)
        far = (offsets.abs() >= window).any(dim=-1).float() * real
        on_prefix = weights[..., :0]
        entropy = _entropy(weights)
    on_cells = (weights * real).sum(dim=-1)
    share = (weights * real) / on_cells.clamp_min(torch.finfo(weights.dtype).tiny)[..., None]

    def mean(values: Tensor) -> Tensor:
        return (values * asking).flatten(2).sum(dim=-1) / layout.cells

    return HeadStatistics(
        distance=mean((share * distance).sum(dim=-1)),
        entropy=mean(entropy),
        prefix_mass=mean(on_prefix.sum(dim=-1)),
        self_mass=mean(weights.diagonal(dim1=-2, dim2=-1)),
        padding_mass=mean((weights * (1 - real)).sum(dim=-1)),
        wrapped_mass=mean((weights * far).sum(dim=-1)),
    )


def _offsets(layout: Layout, device: torch.device) -> Tensor:
    """Rows and columns from query to key, in cells: (n n 2) of cells, or (w t s 2) of slots."""
    index = layout.index
    token = torch.arange(layout.cells, device=device) if index is None else index.clamp_min(0)
    place = torch.stack([token // layout.grid[1], token % layout.grid[1]], dim=-1)
    return place[..., None, :, :] - place[..., :, None, :]


def _entropy(weights: Tensor) -> Tensor:
    return -torch.xlogy(weights, weights).sum(dim=-1)


def positionality(captured: Captured, model: nn.Module) -> list[Tensor]:
    """The divergence of each head from one that depends on positions only, in nats: (b h) by layer.

    KL(A ‖ P), mean over the querying cells; 0 is a head that ignores content. For windows
    with a bias P is the softmax of the bias alone; elsewhere it is the mean of A over the batch,
    which should then hold many different images.
    """
    biases = relative_biases(model)
    found = []
    for layer in captured.layers:
        own = (b for n, b in biases.items() if f"{n}.".startswith(f"{layer.name}."))
        found.append(_divergence(layer, next(own, None)))
    return found


def _divergence(layer: LayerAttention, bias: Tensor | None) -> Tensor:
    layout, weights = layer.layout, layer.weights.float()
    if layout.index is None or bias is None:
        if weights.shape[0] < 2:
            raise ValueError(
                f"How positional the heads of {layer.name} are is measured against the mean over "
                "images: capture at least two."
            )
        expected = weights.mean(dim=0, keepdim=True)
        rows = _kl(weights, expected)
        if layout.index is None:
            return rows[:, :, len(layout.prefix) :].mean(dim=-1)
    else:
        if layer.reduced:
            raise ValueError("Heads that were fused have no bias of their own: leave out reduce.")
        scores = _by_pair(bias.float(), layout).expand(len(layout.index), -1, -1, -1)
        if layout.allowed is not None:
            scores = scores.masked_fill(~layout.allowed[:, None], -torch.inf)
            weights = weights.masked_fill(~layout.allowed[:, None], 0)
        rows = _kl(weights, scores.softmax(dim=-1)[None])
    cells = (~layout.padding()).float()
    return torch.einsum("bwht,wt->bh", rows, cells) / layout.cells


def _kl(weights: Tensor, expected: Tensor) -> Tensor:
    """Σ A (log A - log P) over keys, where A is not zero."""
    ratio = torch.where(weights > 0, weights / expected, torch.ones_like(weights))
    return (weights * ratio.log()).sum(dim=-1)


def _by_pair(table: Tensor, layout: Layout) -> Tensor:
    """A table (h, 2·rows - 1, 2·columns - 1) for every pair of a window's slots: (h t s)."""
    assert layout.window is not None
    (index,) = relative_index(layout.window, table.device)
    return rearrange(table.flatten(1)[:, index], "h (t s) -> h t s", t=math.prod(layout.window))


def relative_biases(model: nn.Module) -> dict[str, Tensor]:
    """The position bias of every window attention: name → (h, 2·rows - 1, 2·columns - 1).

    Entry (Δy + rows - 1, Δx + columns - 1) is for Δ = query - key, so the middle is a token's bias
    for itself. Empty for a model without such biases. V2's come out of its position network.
    """
    tables = {}
    for name, module in model.named_modules():
        table = _table(module)
        window = getattr(module, "window", getattr(module, "window_size", None))
        if table is None or window is None:
            continue
        height, width = (window, window) if isinstance(window, int) else (window[0], window[1])
        if table.shape[0] == (2 * height - 1) * (2 * width - 1):
            tables[name] = rearrange(table.detach(), "(y x) h -> h y x", y=2 * height - 1)
    return tables


@torch.no_grad()
def _table(module: nn.Module) -> Tensor | None:
    """The bias of every offset, as this project and others keep it: (offsets h)."""
    table = getattr(module, "relative_position_bias_table", None)
    if isinstance(table, Tensor):
        return table
    for name in ("cpb_mlp", "continuous_position_bias_mlp"):
        network = getattr(module, name, None)
        if isinstance(network, nn.Module):
            if hasattr(module, "relative_coords_table"):
                offsets = module.relative_coords_table
            else:
                _, offsets = module.relative(module.window)  # type: ignore[operator]
            return 16 * network(offsets).flatten(0, -2).float().sigmoid()
    return None


def position_similarity(model: nn.Module) -> Tensor | None:
    """Cosine similarity of the position embeddings of every pair of cells: (y x y x).

    None for a model that adds no position embedding to its patches.
    """
    found = _positions(model)
    if found is None:
        return None
    table, grid = found
    cells = F.normalize(table.detach().float()[-grid[0] * grid[1] :], dim=-1)
    return rearrange(cells @ cells.T, "(y x) (v u) -> y x v u", y=grid[0], v=grid[0])


def _positions(model: nn.Module) -> tuple[Tensor, tuple[int, int]] | None:
    """The table of positions (rows c), cells last, and the grid of its cells."""
    for module in model.modules():
        positions = getattr(module, "positions", None)
        grid = getattr(module, "grid", None)
        if isinstance(positions, nn.Module) and isinstance(grid, tuple):
            table = positions(grid)
            if isinstance(table, Tensor):
                return table[0], grid
        embedding = getattr(module, "patch_embed", getattr(module, "patch_embeddings", None))
        for name in ("absolute_pos_embed", "pos_embed", "position_embeddings"):
            table = getattr(module, name, None)
            cells = grid or getattr(embedding, "grid_size", None) or _grid(embedding)
            if isinstance(table, Tensor) and isinstance(cells, tuple | list):
                return table[0], (int(cells[0]), int(cells[1]))
        encoder = getattr(module, "encoder", None)
        table = getattr(encoder, "pos_embedding", None)
        if isinstance(table, Tensor) and hasattr(module, "patch_size"):
            side = int(module.image_size) // int(module.patch_size)  # type: ignore[arg-type]
            return table[0], (side, side)
    return None


def _grid(embedding: object) -> tuple[int, int] | None:
    """As transformers names it."""
    size, patch = (getattr(embedding, name, None) for name in ("image_size", "patch_size"))
    if isinstance(size, tuple | list) and isinstance(patch, tuple | list):
        return size[0] // patch[0], size[1] // patch[1]
    return None


def patch_filters(model: nn.Module, most: int) -> Tensor:
    """The first principal components of the filters that embed patches: (k channels y x).

    Each has length 1; its entry of largest size is positive.
    """
    conv = next(m for m in model.modules() if isinstance(m, nn.Conv2d))  # or nothing is captured
    filters = conv.weight.detach().float()
    flat = filters.flatten(1)
    _, _, right = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    right = right[:most]
    largest = right.gather(1, right.abs().argmax(dim=1, keepdim=True))
    return (right * largest.sign()).view(-1, *filters.shape[1:])
