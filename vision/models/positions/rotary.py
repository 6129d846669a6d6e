"""Rotary positions: queries and keys are rotated by angles that grow with a patch's coordinates.

One small class for each family of published angles; see `rotary_positions`. Each gives a rotation
for every block, on any grid. Tokens before the patches are not rotated.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.config import pair
from vision.models.attention import width_of_head
from vision.models.configs import ViTConfig
from vision.models.layers import Derived, Grid, full_precision
from vision.models.positions.added import by_cell


class Rotation(NamedTuple):
    """Angles for the channel pairs of a head."""

    cos: Tensor
    """(n pairs), (h n pairs) where each head has its own, or (b h n pairs) where each image has."""
    sin: Tensor
    halves: bool
    """Whether a pair has one channel from each half of a head, or two neighbouring channels."""

    def at(self, tokens: Tensor) -> "Rotation":
        """The rotation of some tokens (b n) of each image."""

        def taken(angles: Tensor) -> Tensor:
            heads = angles if angles.ndim == 3 else angles[None]
            return rearrange(heads[:, tokens], "h b n pair -> b h n pair")

        return Rotation(taken(self.cos), taken(self.sin), self.halves)


def rotary_positions(config: ViTConfig, grid: Grid, prefix: int) -> nn.Module:
    """The module for `config.rotary`: forward(grid) gives one rotation per block."""
    match config.rotary:
        case "axial":
            return AxialRotary(config, grid, prefix, temperature=100, columns_first=True)
        case "eva":
            return AxialRotary(config, grid, prefix, temperature=10_000, columns_first=False)
        case "pe":
            # Meta's code counts the class token as a first cell of each axis.
            offset = int(config.class_token)
            return AxialRotary(config, grid, prefix, 10_000, columns_first=True, offset=offset)
        case "mixed":
            return MixedRotary(config, grid, prefix)
        case "dinov3":
            return CentredRotary(config, grid, prefix)
        case "dinov3_hf":
            return RoundedRotary(config, grid, prefix)


class AxialRotary(nn.Module):
    """Half of a head's pairs rotate with the column, half with the row (RoPE-ViT, Heo et al., ECCV
    2024; EVA-02, Fang et al., 2023; Perception Encoder, Bolya et al., 2025).
    """

    def __init__(
        self,
        config: ViTConfig,
        grid: Grid,
        prefix: int,
        temperature: float,
        columns_first: bool,
        offset: int = 0,
    ) -> None:
        super().__init__()
        self.depth, self.prefix = config.depth, prefix
        self.pairs, self.temperature = width_of_head(config) // 4, temperature
        self.columns_first, self.offset = columns_first, offset
        scaled = config.rotary_grid if config.rotary in ("eva", "pe") else None
        self.reference = None if scaled is None else pair(scaled)
        self.angles = Derived(self._angles, grid)

    def forward(self, grid: Grid) -> list[Rotation]:
        """The same rotation for every block."""
        cos, sin = self.angles(grid)
        return [Rotation(cos, sin, halves=False)] * self.depth

    def _angles(self, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles: (n pairs)."""
        frequency = 1 / self.temperature ** (torch.arange(self.pairs, device=device) / self.pairs)
        angles = []
        for axis, cells in enumerate(grid):
            place = torch.arange(cells, device=device).float() + self.offset
            if self.reference is not None:
                place = place / cells * self.reference[axis]
            angles.append(torch.outer(place, frequency))
        rows, columns = by_cell(*angles)
        angle = torch.cat([columns, rows] if self.columns_first else [rows, columns], dim=-1)
        angle = F.pad(angle, (0, 0, self.prefix, 0))
        return angle.cos(), angle.sin()

    def init_weights(self, generator: torch.Generator) -> None:
        """Nothing is learned."""


class MixedRotary(nn.Module):
    """Learned frequencies for columns and rows, for each block and head (RoPE-ViT, mixed)."""

    def __init__(self, config: ViTConfig, grid: Grid, prefix: int) -> None:
        super().__init__()
        pairs = width_of_head(config) // 2
        self.frequencies = nn.Parameter(torch.empty(2, config.depth, config.heads, pairs))
        self.coordinates = Derived(_cells, grid)
        self.prefix = prefix

    def forward(self, grid: Grid) -> list[Rotation]:
        """A rotation for each block, with angles for each head."""
        y, x = self.coordinates(grid)
        # In 32 bits even for a model in 64, as models of this kind were trained.
        along_x, along_y = rearrange(
            self.frequencies.float(), "two depth h pair -> two depth h 1 pair"
        )
        angle = F.pad(x.float() * along_x + y.float() * along_y, (0, 0, self.prefix, 0))
        cos, sin = (part.to(self.frequencies.dtype) for part in (angle.cos(), angle.sin()))
        return [Rotation(c, s, halves=False) for c, s in zip(cos, sin, strict=True)]

    def init_weights(self, generator: torch.Generator) -> None:
        """Two perpendicular directions at a random angle for each head, ever slower."""
        _, depth, heads, pairs = self.frequencies.shape
        slower = 10 ** -(torch.arange(pairs // 2) * 2 / pairs)
        angle = 2 * math.pi * torch.rand(depth, heads, 1, generator=generator)
        turned = angle + math.pi / 2
        along_x = torch.cat([slower * angle.cos(), slower * turned.cos()], dim=-1)
        along_y = torch.cat([slower * angle.sin(), slower * turned.sin()], dim=-1)
        self.frequencies.copy_(torch.stack([along_x, along_y]))


class CentredRotary(nn.Module):
    """Coordinates from -1 to 1 along each axis, whatever the grid (DINOv3, Siméoni et al., 2025).

    The periods are stored with the weights, as Meta does: published files hold rounded ones.
    """

    def __init__(self, config: ViTConfig, grid: Grid, prefix: int) -> None:
        super().__init__()
        self.depth, self.prefix = config.depth, prefix
        self.shift, self.stretch, self.rescale = config.rotary_jitter
        self.coordinates = Derived(_centred, grid)
        self.pairs = width_of_head(config) // 4
        self.periods: Tensor | None
        self.register_buffer("periods", self._stored())

    def forward(self, grid: Grid) -> list[Rotation]:
        """The same rotation for every block; in training with jittered coordinates."""
        coordinates, *_ = self.coordinates(grid)
        coordinates = self._jitter(coordinates) if self.training else coordinates
        angle = rearrange(self._angles(coordinates), "n two pair -> n (two pair)")
        angle = F.pad(angle, (0, 0, self.prefix, 0))
        return [Rotation(angle.cos(), angle.sin(), halves=True)] * self.depth

    def _stored(self) -> Tensor | None:
        return torch.empty(self.pairs)

    def _angles(self, coordinates: Tensor) -> Tensor:
        """(n 2) → (n 2 pairs)"""
        assert self.periods is not None
        periods = full_precision(self.periods)
        return 2 * math.pi * coordinates.to(periods.dtype)[:, :, None] / periods

    def _jitter(self, coordinates: Tensor) -> Tensor:
        """(n 2) shifted and scaled at random."""
        if self.shift:
            coordinates = coordinates + coordinates.new_empty(2).uniform_(-self.shift, self.shift)
        for largest, axes in ((self.stretch, 2), (self.rescale, 1)):
            if largest > 1:
                bound = math.log(largest)
                coordinates = (
                    coordinates * coordinates.new_empty(axes).uniform_(-bound, bound).exp()
                )
        return coordinates

    def init_weights(self, generator: torch.Generator) -> None:
        """Periods from 1 to 100; nothing is learned."""
        if self.periods is not None:
            self.periods.copy_(dinov3_periods(self.pairs))


class RoundedRotary(CentredRotary):
    """DINOv3's angles as transformers computes them: frequencies are not stored, and coordinates
    are rounded to 32 bits first, which makes a difference in 64.
    """

    def _stored(self) -> None:
        return None

    def _angles(self, coordinates: Tensor) -> Tensor:
        """(n 2) → (n 2 pairs)"""
        steps = torch.arange(self.pairs, device=coordinates.device) / self.pairs
        radians = full_precision((2 * math.pi * coordinates.float()).to(coordinates.dtype))
        return radians[:, :, None] * (1 / 100**steps).to(radians.dtype)


def dinov3_periods(pairs: int) -> Tensor:
    """DINOv3's periods, before rounding to fewer bits."""
    return 100 ** (2 * torch.arange(pairs, dtype=torch.float32) / (2 * pairs))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the channel pairs of x (b h n d) in full precision."""
    cos, sin = full_precision(rotation.cos), full_precision(rotation.sin)
    pattern = "b h n (two pair)" if rotation.halves else "b h n (pair two)"
    first, second = rearrange(full_precision(x), f"{pattern} -> two b h n pair", two=2)
    turned = (first * cos - second * sin, second * cos + first * sin)
    dim = -2 if rotation.halves else -1
    return torch.stack(turned, dim=dim).flatten(-2).to(x.dtype)


def _cells(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of every cell: (n 1)."""
    y, x = (torch.arange(cells, device=device).float()[:, None] for cells in grid)
    return by_cell(y, x)


def _centred(grid: Grid, device: torch.device) -> tuple[Tensor]:
    """Centre of every cell (n 2), rows first, from -1 to 1 along each axis."""
    y, x = (2 * ((torch.arange(cells, device=device) + 0.5) / cells) - 1 for cells in grid)
    return (torch.cat(by_cell(y[:, None], x[:, None]), dim=-1),)
