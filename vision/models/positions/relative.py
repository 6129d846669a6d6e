"""A learned bias of attention by relative position, and tables of such biases for another grid."""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.models.layers import Derived, Grid, full_precision
from vision.models.windows import relative_index

WindowMethod = Literal["geometric", "bicubic", "bilinear"]
"""Methods that resize a table of relative positions: timm and BEiT · the official Swin code · BEiT
in transformers.
"""


class RelativeBias(nn.Module):
    """A learned bias for every offset between two patches, and three more: class token to patch,
    patch to class token, and class token to itself (BEiT, Bao et al., ICLR 2022).
    """

    def __init__(self, grid: Grid, heads: int) -> None:
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.empty(_offsets(grid) + 3, heads))
        self.index = Derived(_relative_index, grid)

    def forward(self, grid: Grid) -> Tensor:
        """(1 h n n) for the class token and the patches."""
        table: Tensor = self.table
        if grid != self.grid:
            offsets = resize_relative(table[:-3], self.grid, grid)
            table = torch.cat([offsets, table[-3:]])
        (index,) = self.index(grid)
        # index_select, because the gradient of table[index] is not deterministic.
        pairs = table.transpose(0, 1).index_select(1, index)
        return rearrange(pairs, "h (n m) -> 1 h n m", n=grid[0] * grid[1] + 1)


def resize_relative(
    table: Tensor, old: Grid, new: Grid, method: WindowMethod = "geometric"
) -> Tensor:
    """A table ((2h-1)(2w-1), heads) of relative positions of one window for another.

    `bicubic` and `bilinear` stretch the table: the bias of a neighbour becomes that of a farther
    token. `geometric` keeps near offsets in place and moves far ones by growing steps (Bao et al.,
    BEiT, 2022), then interpolates linearly.
    """
    if old == new:
        return table
    sizes = [2 * side - 1 for side in (*old, *new)]
    image = rearrange(full_precision(table), "(y x) heads -> heads y x", y=sizes[0])
    if method != "geometric":
        image = F.interpolate(image[None], (sizes[2], sizes[3]), mode=method)[0]
    else:
        along_y = _geometric(sizes[0], sizes[2]).to(image)
        along_x = _geometric(sizes[1], sizes[3]).to(image)
        image = torch.einsum("Yy,hyx,Xx->hYX", along_y, image, along_x)
    return rearrange(image, "heads y x -> (y x) heads").to(table.dtype)


def _offsets(grid: Grid) -> int:
    return (2 * grid[0] - 1) * (2 * grid[1] - 1)


def _relative_index(grid: Grid, device: torch.device) -> tuple[Tensor]:
    """Row of the bias table for every pair of tokens, class token first: (n·n)."""
    (between_patches,) = relative_index(grid, device)
    cells = grid[0] * grid[1]
    index = F.pad(between_patches.view(cells, cells), (1, 0, 1, 0))
    index[0, :], index[:, 0] = _offsets(grid), _offsets(grid) + 1
    index[0, 0] = _offsets(grid) + 2
    return (index.flatten(),)


def _geometric(old: int, new: int) -> Tensor:
    """Linear interpolation (new, old) between old offsets, laid out at growing distances."""
    if old == new:
        return torch.eye(old, dtype=torch.float64)
    half = old // 2
    ratio = _ratio(half, new // 2)
    steps = torch.tensor([ratio**i for i in range(half)], dtype=torch.float64).cumsum(0)
    places = torch.cat([-steps.flip(0), torch.zeros(1, dtype=torch.float64), steps])
    wanted = torch.arange(-(new // 2), new // 2 + 1, dtype=torch.float64)
    wanted = wanted.clamp(places[0], places[-1])  # the last offset's bias holds beyond it
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
    """The ratio q at which `steps` terms of 1 + q + q² + … sum up to `reach`, by bisection.

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
