"""The order of tokens in windows, by formula: what a layout of windows is made of.

Axes: w windows · t, s slots of a window (queries, keys) · h, w rows and columns of a window.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vision.inspection.capture.layout import PADDING, Layout
from vision.models.layers import Grid, ceil_div


def windowed_layout(
    grid: Grid,
    stride: Grid,
    image_size: Grid,
    *,
    window: Grid,
    shift: Grid,
    index: Tensor,
    allowed: Tensor | None,
) -> Layout:
    """A layer of windows. `allowed` is left out where it forbids nothing."""
    if allowed is not None and bool(allowed.all()):
        allowed = None
    return Layout("windowed", (), grid, stride, image_size, window, shift, index, allowed)


def window_index(grid: Grid, window: Grid, shift: Grid, *, pad_first: bool) -> Tensor:
    """The cell in every slot, or `PADDING`: (w t).

    `pad_first`: the grid is padded to whole windows and then rolled (this project, torchvision,
    transformers). Otherwise it is rolled and then padded, as timm does.
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
    """Which pairs of slots the usual mask of shifted windows allows: (w t s). None: no shift.

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
    return slots[:, :, None] == slots[:, None, :]


def _pad(cells: Tensor, window: Grid) -> Tensor:
    below, right = -cells.shape[0] % window[0], -cells.shape[1] % window[1]
    return F.pad(cells, (0, right, 0, below), value=PADDING)
