"""Weights of one geometry for another: position tables, patch size, channels.

Projects resize position tables in five ways that give different numbers; each has a name here, so
that what another project would compute can be had. The default is timm's.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from vision.models.layers import Grid, full_precision

PositionMethod = Literal[
    "bicubic_antialias", "bicubic", "bicubic_corners", "dino", "bilinear_corners"
]
"""timm · Hugging Face, DeiT, mmpretrain · torchvision · DINO and DINOv2 · Google, big_vision."""
WindowMethod = Literal["geometric", "bicubic"]
"""timm, BEiT · the official Swin code."""


def resize_positions(
    table: Tensor, rows: int, old: Grid, new: Grid, method: PositionMethod
) -> Tensor:
    """A table (1, rows + y·x, c) of one grid for another; the first rows belong to tokens without a
    place and stay.
    """
    if old == new:
        return table
    first, cells = table[:, :rows], full_precision(table[:, rows:])
    cells = rearrange(cells, "one (y x) c -> one c y x", y=old[0])
    match method:
        case "bicubic_antialias":
            cells = F.interpolate(cells, new, mode="bicubic", antialias=True)
        case "bicubic":
            cells = F.interpolate(cells, new, mode="bicubic", align_corners=False)
        case "bicubic_corners":
            cells = F.interpolate(cells, new, mode="bicubic", align_corners=True)
        case "dino":
            # A tenth is added against rounding, and by it the sampled points move a little.
            scale = [(n + 0.1) / o for n, o in zip(new, old, strict=True)]
            cells = F.interpolate(cells, scale_factor=scale, mode="bicubic")
            assert tuple(cells.shape[-2:]) == new
        case "bilinear_corners":
            cells = F.interpolate(cells, new, mode="bilinear", align_corners=True)
    resized = rearrange(cells, "one c y x -> one (y x) c").to(table.dtype)
    return torch.cat([first, resized], dim=1)


def resize_relative(table: Tensor, old: Grid, new: Grid, method: WindowMethod) -> Tensor:
    """A table ((2h-1)(2w-1), heads) of relative positions of one window for another.

    `bicubic` stretches the table, so that a neighbour's bias becomes that of a farther token.
    `geometric` keeps near offsets in place and moves far ones by steps that grow (Bao et al., BEiT,
    2022), then interpolates linearly.
    """
    if old == new:
        return table
    sizes = [2 * side - 1 for side in (*old, *new)]
    image = rearrange(full_precision(table), "(y x) heads -> heads y x", y=sizes[0])
    if method == "bicubic":
        image = F.interpolate(image[None], (sizes[2], sizes[3]), mode="bicubic")[0]
    else:
        along_y = _geometric(sizes[0], sizes[2]).to(image)
        along_x = _geometric(sizes[1], sizes[3]).to(image)
        image = torch.einsum("Yy,hyx,Xx->hYX", along_y, image, along_x)
    return rearrange(image, "heads y x -> (y x) heads").to(table.dtype)


def resize_patches(weight: Tensor, new: Grid) -> Tensor:
    """A patch embedding (c channels h w) for another patch size, by the pseudo-inverse of the
    resizing of pictures (FlexiViT, Beyer et al., CVPR 2023): a resized patch gives the same token
    as far as that is possible.
    """
    height, width = weight.shape[-2:]
    if (height, width) == new:
        return weight
    basis = torch.eye(height * width, dtype=torch.float64).view(-1, 1, height, width)
    resized = F.interpolate(basis, new, mode="bicubic", antialias=True)
    matrix = rearrange(resized, "old one h w -> (h w) (one old)")
    flat = rearrange(weight.double().cpu(), "c i h w -> c i (h w)") @ torch.linalg.pinv(matrix)
    return rearrange(flat, "c i (h w) -> c i h w", h=new[0]).to(weight)


def change_channels(weight: Tensor, channels: int) -> Tensor:
    """A patch embedding for pictures of other channels: their sum for one; else repeated in turn
    and scaled so that the sum over channels keeps its size.
    """
    old = weight.shape[1]
    if channels == old:
        return weight
    if channels == 1:
        return full_precision(weight).sum(dim=1, keepdim=True).to(weight.dtype)
    turns = -(-channels // old)
    tiled = repeat(full_precision(weight), "c i h w -> c (turns i) h w", turns=turns)[:, :channels]
    return (tiled * (old / channels)).to(weight.dtype)


def _geometric(old: int, new: int) -> Tensor:
    """Linear interpolation (new, old) between old offsets, laid out at growing distances."""
    if old == new:
        return torch.eye(old, dtype=torch.float64)
    half = old // 2
    ratio = _ratio(half, new // 2)
    steps = torch.tensor([ratio**i for i in range(half)], dtype=torch.float64).cumsum(0)
    places = torch.cat([-steps.flip(0), torch.zeros(1, dtype=torch.float64), steps])
    wanted = torch.arange(-(new // 2), new // 2 + 1, dtype=torch.float64)
    wanted = wanted.clamp(places[0], places[-1])  # beyond the last offset its bias goes on
    right = torch.searchsorted(places, wanted).clamp(1 if half else 0, old - 1)
    left = (right - 1).clamp(min=0)
    span = places[right] - places[left]
    share = torch.where(span > 0, (wanted - places[left]) / span.clamp(min=1e-12), 1.0)
    matrix = torch.zeros(new, old, dtype=torch.float64)
    index = torch.arange(new)
    matrix[index, left] += 1 - share
    matrix[index, right] += share
    return matrix


def _ratio(steps: int, reach: int) -> float:
    """The ratio of a geometric row 1 + q + q² + … of so many steps with this sum, by bisection.

    Between 1.01 and 1.5, as in BEiT's code: a window that shrinks keeps its offsets' places.
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        if (ratio**steps - 1) / (ratio - 1) > reach:
            high = ratio
        else:
            low = ratio
    return ratio
