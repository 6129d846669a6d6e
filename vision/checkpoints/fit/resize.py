"""Weights of one geometry for another: position tables, patch size, channels.

Projects resize position tables in five ways that give different numbers; each has a name here, so
that what another project would compute can be had. The default is timm's.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from vision.models.layers import Grid, full_precision

PositionMethod = Literal[
    "bicubic_antialias", "bicubic", "bicubic_corners", "dino", "bilinear_corners"
]
"""timm · Hugging Face, DeiT, mmpretrain · torchvision · DINO and DINOv2 · Google, big_vision."""

_INTERPOLATION: dict[PositionMethod, dict[str, Any]] = {
    "bicubic_antialias": {"mode": "bicubic", "antialias": True},
    "bicubic": {"mode": "bicubic"},
    "bicubic_corners": {"mode": "bicubic", "align_corners": True},
    "dino": {"mode": "bicubic"},
    "bilinear_corners": {"mode": "bilinear", "align_corners": True},
}


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
    # DINO adds a tenth against rounding, and by it the sampled points move a little.
    scale = [(n + 0.1) / o for n, o in zip(new, old, strict=True)]
    to = {"scale_factor": scale} if method == "dino" else {"size": new}
    cells = F.interpolate(cells, **to, **_INTERPOLATION[method])
    assert tuple(cells.shape[-2:]) == new
    resized = rearrange(cells, "one c y x -> one (y x) c").to(table.dtype)
    return torch.cat([first, resized], dim=1)


def resize_patches(weight: Tensor, new: Grid) -> Tensor:
    """A patch embedding (c channels h w) for another patch size, by the pseudo-inverse of the
    resizing of images (FlexiViT, Beyer et al., CVPR 2023): a resized patch gives the same token
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
    """A patch embedding for images of other channels: their sum for one; else repeated in turn
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
