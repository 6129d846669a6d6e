"""Positions added to the tokens of patches: one small class for each choice of `positions`.

Rotations of queries and keys are in `rotary.py`, biases of the scores in `relative.py`.

An added encoding has `forward(grid) -> (1, rows, c)`. Every encoding works on any grid, also on one
that the model was not configured for.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from vision.models.configs import ViTConfig
from vision.models.layers import Derived, Grid, full_precision, trunc_normal


class LearnedPositions(nn.Module):
    """One learned vector per cell of the grid, and before them one for each token with a row."""

    def __init__(self, grid: Grid, width: int, class_rows: int) -> None:
        super().__init__()
        self.grid = grid
        self.class_rows = class_rows
        self.table = nn.Parameter(torch.empty(1, self.class_rows + grid[0] * grid[1], width))

    def forward(self, grid: Grid) -> Tensor:
        """The table, resized to another grid where need be: (1, class rows + y·x, c)."""
        if grid == self.grid:
            return self.table
        class_rows, cells = self.table[:, : self.class_rows], self.table[:, self.class_rows :]
        return torch.cat([class_rows, resize_table(cells, self.grid, grid)], dim=1)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw the table as BERT, ViT and DeiT do."""
        trunc_normal(self.table, 0.02, generator)


class SinCos2d(nn.Module):
    """Fixed sines and cosines of row and column ("better plain ViT", Beyer et al., 2022).

    Wavelengths reach 2π · 10000; with `open_end`, as in MoCo v3 and MAE, one step less.
    """

    def __init__(self, grid: Grid, width: int, open_end: bool = False) -> None:
        super().__init__()
        self.table = Derived(partial(_sincos2d, width, open_end), grid)

    def forward(self, grid: Grid) -> Tensor:
        """(1, y·x, c)"""
        (table,) = self.table(grid)
        return table

    def init_weights(self, generator: torch.Generator) -> None:
        """Nothing is learned."""


class FourierPositions(nn.Module):
    """Sines and cosines of the coordinates, from one wave per image up to the grid's Nyquist
    frequency, mapped to the width of the model by a learned layer (Perceiver, Jaegle et al., ICML
    2021).
    """

    bands = 32

    def __init__(self, grid: Grid, width: int) -> None:
        super().__init__()
        self.features = Derived(partial(_fourier, grid, self.bands), grid)
        self.proj = nn.Linear(4 * self.bands, width)

    def forward(self, grid: Grid) -> Tensor:
        """(1, y·x, c)"""
        (features,) = self.features(grid)
        return self.proj(features)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw the mapping so that positions start at the size of a learned table's."""
        trunc_normal(self.proj.weight, 0.02 / math.sqrt(2 * self.bands), generator)
        nn.init.zeros_(self.proj.bias)


def added_positions(config: ViTConfig, grid: Grid) -> nn.Module | None:
    """The encoding that `config.positions` adds to the patches, if any."""
    match config.positions:
        case "learned" | "learned_rotary":
            rows = int(config.class_token) + int(config.distillation_token)
            rows = rows if config.class_token_position else 0
            return LearnedPositions(grid, config.width, rows)
        case "sincos2d":
            return SinCos2d(grid, config.width)
        case "fourier":
            return FourierPositions(grid, config.width)
        case "rotary" | "none":
            return None


def resize_table(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """A table (1, y·x, c) of one grid for another: bicubic with antialias, in full precision."""
    cells = rearrange(full_precision(table), "one (y x) c -> one c y x", y=old[0])
    cells = F.interpolate(cells, size=new, mode="bicubic", antialias=True)
    return rearrange(cells, "one c y x -> one (y x) c").to(table.dtype)


def by_cell(along_y: Tensor, along_x: Tensor) -> tuple[Tensor, Tensor]:
    """Values of every row (y f) and of every column (x f), each for every cell: (y·x f)."""
    y, x = len(along_y), len(along_x)
    return repeat(along_y, "y f -> (y x) f", x=x), repeat(along_x, "x f -> (y x) f", y=y)


def _sincos2d(width: int, open_end: bool, grid: Grid, device: torch.device) -> tuple[Tensor]:
    quarter = width // 4
    steps = quarter if open_end else max(quarter - 1, 1)
    frequency = 10_000 ** -(torch.arange(quarter, device=device) / steps)
    angles = [torch.outer(torch.arange(cells, device=device).float(), frequency) for cells in grid]
    rows, columns = by_cell(*angles)
    return (torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=-1)[None],)


def _fourier(nyquist: Grid, bands: int, grid: Grid, device: torch.device) -> tuple[Tensor]:
    angles = []
    for cells, limit in zip(grid, nyquist, strict=True):
        # Cell centres on [-1, 1], so that another grid samples the same waves at other points.
        place = (2 * torch.arange(cells, device=device) + 1) / cells - 1
        waves = math.pi * torch.linspace(1, max(limit / 2, 1), bands, device=device)
        angles.append(torch.outer(place, waves))
    rows, columns = by_cell(*angles)
    return (torch.cat([rows.sin(), rows.cos(), columns.sin(), columns.cos()], dim=-1)[None],)
