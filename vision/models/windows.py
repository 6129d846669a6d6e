"""Where Swin's tokens are: the index arithmetic of windows, shifts, padding and patch merging.

LayerNorm, MLP and residuals act on each token alone, so a stage keeps its tokens in **window
order**: all tokens of the first window, then all of the second, and so on. Going from one block's
windows to the next block's shifted ones (roll back, partition, roll) is then a single gather by an
index that depends on the geometry only, and so is the merging of patches at the end of a stage.

The grid of a stage is padded to whole windows *before* it is shifted. Padding takes a region of its
own, and so does what a shift wraps around an edge; tokens attend within their own window and region
only. With `padding=attend` padding has no such region: it takes part in attention as zero tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from vision.config import ConfigError, pair, parse
from vision.models.configs import AnySwinConfig, SwinV2Config, Window, per_stage
from vision.models.layers import Grid, ceil_div


class StageShape(NamedTuple):
    """The geometry of one stage."""

    grid: Grid
    """Rows and columns of real tokens."""
    window: Grid
    shift: Grid
    """How far the windows of every second block are shifted; (0, 0) where they are not."""
    attended: bool
    """Whether padding takes part in attention."""

    @property
    def padded(self) -> Grid:
        """The grid in whole windows."""
        (y, x), (h, w) = self.grid, self.window
        return ceil_div(y, h) * h, ceil_div(x, w) * w

    @property
    def slots(self) -> int:
        """Tokens in window order, padding included."""
        return self.padded[0] * self.padded[1]


class BlockWindows(NamedTuple):
    """What a block needs to know of its windows; `None` where there is nothing to do."""

    mask: Tensor | None
    """What is added to the scores, 0 or -inf: (windows 1 t t)."""
    tokens: Tensor | None
    """False on padding that takes part in attention: (slots 1)."""

    def zero_padding(self, x: Tensor) -> Tensor:
        """Tokens (b slots c) with zeros in place of padding that takes part in attention."""
        return x if self.tokens is None else x * self.tokens


class StageIndex(NamedTuple):
    """The gathers and masks of one stage; `None` where there is nothing to do."""

    shift: Tensor | None
    """From plain to shifted window order: (slots)."""
    unshift: Tensor | None
    """And back."""
    plain_mask: Tensor | None
    """The mask of unshifted windows."""
    plain_tokens: Tensor | None
    """Where unshifted windows hold tokens, not padding."""
    shifted_mask: Tensor | None
    shifted_tokens: Tensor | None
    leave: Tensor | None
    """How tokens leave the stage: to the four parts of every token of the next stage, (4 · its
    slots), or, from the last stage, row by row without padding: (y · x).
    """
    enter: Tensor | None
    """The inverse of `leave` where that is a permutation."""
    keep: Tensor | None
    """False for what leaves the stage but lies outside its grid and counts as zero: (4 · slots, 1).
    """

    def windows(self, shifted: bool) -> BlockWindows:
        """The windows of a plain or a shifted block; a stage of one window shifts nothing."""
        if shifted and self.shift is not None:
            return BlockWindows(self.shifted_mask, self.shifted_tokens)
        return BlockWindows(self.plain_mask, self.plain_tokens)


def stage_grids(grid: Grid, stages: int) -> list[Grid]:
    """The grid of every stage for a first grid: each merging halves it, rounding up."""
    scales = [2**stage for stage in range(stages)]
    return [(ceil_div(grid[0], scale), ceil_div(grid[1], scale)) for scale in scales]


def clip_windows(window: Window, grids: Sequence[Grid]) -> list[Grid]:
    """The window of every stage: as given per stage, or one for all, clipped to each grid."""
    if per_stage(window):
        return list(window)
    h, w = pair(window)  # type: ignore[arg-type]
    return [(min(h, y), min(w, x)) for y, x in grids]


def stage_windows(config: AnySwinConfig, image_size: Grid) -> list[Grid]:
    """The window of every stage of a model that is configured for images of this size."""
    patch = pair(config.patch_size)
    grid = ceil_div(image_size[0], patch[0]), ceil_div(image_size[1], patch[1])
    return clip_windows(config.window, stage_grids(grid, len(config.depths)))


def stage_shapes(config: AnySwinConfig, windows: Sequence[Grid], grid: Grid) -> list[StageShape]:
    """The geometry of every stage for a first grid. Windows are shifted by half along each axis
    that has more than one of them.
    """
    shapes = []
    for cells, window in zip(stage_grids(grid, len(windows)), windows, strict=True):
        y, x = (w // 2 if config.shift and g > w else 0 for g, w in zip(cells, window, strict=True))
        shapes.append(StageShape(cells, window, (y, x), config.padding == "attend"))
    return shapes


def pin_windows(config: AnySwinConfig, trained: Grid, size: Grid) -> AnySwinConfig:
    """The config with which a model trained on images of one size keeps its windows at another.

    Each stage's window is listed where one window for all would be clipped differently; a position
    network of V2 then keeps measuring offsets in the windows that it was trained with.
    """
    windows = stage_windows(config, trained)
    if windows == stage_windows(config, size):
        return config
    return config.model_copy(update={"window": tuple(windows)})


def change_window(config: AnySwinConfig, window: Window, trained: Grid) -> AnySwinConfig:
    """The config with another window for a model trained on images of one size. A position network
    of V2 keeps measuring offsets in the windows that it was trained with.
    """
    values = config.model_dump(mode="json") | {"window": window}
    if isinstance(config, SwinV2Config) and config.pretrained_window is None:
        windows = stage_windows(config, trained)
        if any(height != width for height, width in windows):
            raise ConfigError(
                f"window: the position networks were trained with windows {windows}, which are not "
                f"square; pretrained_window cannot express them. Keep the window of training."
            )
        values["pretrained_window"] = [height for height, _ in windows]
    return parse(type(config), values)


class StageGeometry(NamedTuple):
    """What the indices of a stage follow from."""

    shape: StageShape
    following: StageShape | None
    """The next stage's."""
    ends_shifted: bool
    """Whether the last block leaves the tokens in shifted window order."""


def stage_index(geometry: StageGeometry, device: torch.device) -> StageIndex:
    """All indices and masks of a stage."""
    shape, following, ends_shifted = geometry
    plain = _order(shape, (0, 0), device)
    shifted = _order(shape, shape.shift, device) if any(shape.shift) else None
    last = shifted if ends_shifted and shifted is not None else plain
    leave, enter, keep = (
        _to_raster(shape, last) if following is None else _merge(shape, following, last)
    )
    return StageIndex(
        shift=None if shifted is None else _invert(plain)[shifted],
        unshift=None if shifted is None else _invert(shifted)[plain],
        plain_mask=_mask(shape, plain, (0, 0)),
        plain_tokens=_tokens(shape, plain),
        shifted_mask=None if shifted is None else _mask(shape, shifted, shape.shift),
        shifted_tokens=None if shifted is None else _tokens(shape, shifted),
        leave=leave,
        enter=enter,
        keep=keep,
    )


def relative_index(window: Grid, device: torch.device) -> tuple[Tensor]:
    """Row of the bias table for every pair of tokens of a window: (t·t).

    The row is (Δy + h - 1)(2w - 1) + (Δx + w - 1) with Δ = query - key, as in every Swin.
    """
    y, x = (axis.flatten() for axis in _raster(window, device))
    rows = (y[:, None] - y[None]) + window[0] - 1
    columns = (x[:, None] - x[None]) + window[1] - 1
    return ((rows * (2 * window[1] - 1) + columns).flatten(),)


class _Permute(torch.autograd.Function):
    """Tokens in another order; the gradient goes back through the inverse gather, not a scatter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(1, index)

    @staticmethod
    def setup_context(
        ctx: torch.autograd.function.FunctionCtx, inputs: object, output: object
    ) -> None:
        _, index, inverse = inputs  # type: ignore[misc]
        ctx.save_for_backward(index, inverse)  # type: ignore[has-type]

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors  # type: ignore[attr-defined]
        return permute(grad, inverse, index), None, None


def permute(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Tokens (b n c) taken in the order of `index`, whose inverse is known."""
    return _Permute.apply(x, index, inverse)


def shift_windows(x: Tensor, index: StageIndex) -> Tensor:
    """Tokens (b n c) from plain to shifted window order."""
    if index.shift is None or index.unshift is None:
        return x
    return permute(x, index.shift, index.unshift)


def unshift_windows(x: Tensor, index: StageIndex) -> Tensor:
    """Tokens (b n c) from shifted to plain window order."""
    if index.shift is None or index.unshift is None:
        return x
    return permute(x, index.unshift, index.shift)


def leave_stage(x: Tensor, index: StageIndex) -> Tensor:
    """Tokens (b n c) of a stage as the next one takes them: (b m c)."""
    if index.leave is None:
        return x
    if index.enter is not None:
        return permute(x, index.leave, index.enter)
    x = x.index_select(1, index.leave)
    return x if index.keep is None else x * index.keep


def _raster(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    axes = [torch.arange(cells, device=device) for cells in grid]
    y, x = torch.meshgrid(*axes, indexing="ij")
    return y, x


def _order(shape: StageShape, shift: Grid, device: torch.device) -> Tensor:
    """For every slot of the window order, the raster position on the padded grid of its token."""
    y, x = _raster(shape.padded, device)
    position = y * shape.padded[1] + x
    return _partition(position.roll((-shift[0], -shift[1]), (0, 1)), shape.window).flatten()


def _partition(grid: Tensor, window: Grid) -> Tensor:
    h, w = window
    return rearrange(grid, "(wy h) (wx w) -> (wy wx) (h w)", h=h, w=w)


def _invert(order: Tensor) -> Tensor:
    return torch.argsort(order)


def _mask(shape: StageShape, order: Tensor, shift: Grid) -> Tensor | None:
    """0 within a region of a window, -inf across; None where every window is one region."""
    apart_from_padding = shape.padded != shape.grid and not shape.attended
    if not apart_from_padding and not any(shift):
        return None
    region = torch.zeros(shape.padded, dtype=torch.int64, device=order.device)
    # What a shift wraps to the far side of the grid are its first rows and columns.
    region[: shift[0]] += 1
    region[:, : shift[1]] += 2
    if apart_from_padding:
        region[shape.grid[0] :] = 4
        region[:, shape.grid[1] :] = 4
    tokens = shape.window[0] * shape.window[1]
    region = region.flatten()[order].view(-1, tokens)
    apart = region[:, None, :, None] != region[:, None, None, :]
    return torch.zeros(apart.shape, device=order.device).masked_fill(apart, -torch.inf)


def _tokens(shape: StageShape, order: Tensor) -> Tensor | None:
    """False on padding in this window order: (slots 1); None unless padding is attended to."""
    if not shape.attended or shape.padded == shape.grid:
        return None
    y, x = _raster(shape.padded, order.device)
    inside = (y < shape.grid[0]) & (x < shape.grid[1])
    return inside.flatten()[order][:, None]


def _to_raster(shape: StageShape, last: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """Slots of the real tokens, row by row."""
    if shape.padded == shape.grid == shape.window:
        return None, None, None  # a single window is in that order already
    y, x = _raster(shape.grid, last.device)
    leave = _invert(last)[(y * shape.padded[1] + x).flatten()]
    return leave, _invert(leave) if shape.padded == shape.grid else None, None


def _merge(
    shape: StageShape, following: StageShape, last: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Slots of the 2 x 2 parts of each token of the next stage, in its plain window order."""
    order = _order(following, (0, 0), last.device)
    y, x = order // following.padded[1] * 2, order % following.padded[1] * 2
    # The parts come column by column: upper left, lower left, upper right, lower right.
    y = torch.stack([y, y + 1, y, y + 1], dim=1).flatten()
    x = torch.stack([x, x, x + 1, x + 1], dim=1).flatten()
    inside = (y < shape.grid[0]) & (x < shape.grid[1])
    position = (y * shape.padded[1] + x) * inside  # anywhere will do for what is outside
    leave = _invert(last)[position]
    whole = shape.padded == shape.grid and following.padded == following.grid
    if whole and shape.grid == (2 * following.grid[0], 2 * following.grid[1]):
        return leave, _invert(leave), None
    return leave, None, inside[:, None]
