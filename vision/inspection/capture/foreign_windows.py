"""The order of tokens in the windows of other libraries' Swins, and their masks of shifts.

Axes: w windows · t, s slots of a window (queries, keys) · h, w rows and columns of a window.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vision.inspection.capture.layout import PADDING
from vision.models.layers import Grid, ceil_div


def window_index(grid: Grid, window: Grid, shift: Grid, *, pad_first: bool) -> Tensor:
    """The cell in every slot, or `PADDING`: (w t).

    `pad_first`: the grid is padded to whole windows and then rolled (torchvision, transformers).
    Otherwise it is rolled and then padded (timm).
    """
    rows, columns = grid
    cells = torch.arange(rows * columns).view(rows, columns)
    back = (-shift[0], -shift[1])
    if pad_first:
        placed = _pad(cells, window).roll(back, (0, 1))
    else:
        placed = _pad(cells.roll(back, (0, 1)), window)
    return rearrange(placed, "(wy h) (wx w) -> (wy wx) (h w)", h=window[0], w=window[1])


def shift_regions(grid: Grid, window: Grid, shift: Grid) -> Tensor | None:
    """The pairs of slots that the mask of shifted windows allows: (w t s). None: all of them.

    Rows of the rolled grid fall into three regions, before the last window, in it, and wrapped
    around; so do columns; tokens attend within their own region.
    """
    if not any(shift):
        return None
    region = torch.zeros(1, 1, dtype=torch.int64)
    for axis in (0, 1):
        size = ceil_div(grid[axis], window[axis]) * window[axis]
        place = torch.arange(size)
        step = torch.zeros(size, dtype=torch.int64)
        if shift[axis]:
            step = (place >= size - window[axis]).long() + (place >= size - shift[axis]).long()
        region = region * 3 + (step[:, None] if axis == 0 else step[None])
    slots = rearrange(region, "(wy h) (wx w) -> (wy wx) (h w)", h=window[0], w=window[1])
    allowed = slots[:, :, None] == slots[:, None, :]
    return None if bool(allowed.all()) else allowed


def _pad(cells: Tensor, window: Grid) -> Tensor:
    below, right = -cells.shape[0] % window[0], -cells.shape[1] % window[1]
    return F.pad(cells, (0, right, 0, below), value=PADDING)
