"""Window order: where Swin's tokens are, and how they move between windows, shifts and stages.

LayerNorm, MLP and residuals act on each token alone, so a stage keeps its tokens in **window
order**: all tokens of the first window, then all of the second, and so on. Going from one block's
windows to the next block's shifted ones (roll back, partition, roll) is then a single gather by an
index that depends on the geometry only, and so is the merging of patches between two stages.

The grid of a stage is padded to whole windows *before* it is shifted. Padding is a region of its
own, and so is the part that a shift wraps around an edge; tokens attend within their own window and
region only. With `padding=attend` padding is not a region: it takes part in attention as zero
tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from vision.config import ConfigError, Window, pair, parse, per_stage
from vision.models.configs import AnySwinConfig, SwinV2Config
from vision.models.layers import Grid, ceil_div


class StageShape(NamedTuple):
    """The geometry of one stage."""

    grid: Grid
    """Rows and columns of tokens, without padding."""
    window: Grid
    shift: Grid
    """Shift of the windows of every second block; (0, 0) where they are not shifted."""
    ends_shifted: bool
    """Whether the last block leaves the tokens in shifted window order."""
    attended: bool
    """Whether padding takes part in attention."""
    previous: "StageShape | None"
    """The stage whose tokens are merged into those of this one."""

    @property
    def padded(self) -> Grid:
        """The grid in whole windows."""
        (y, x), (h, w) = self.grid, self.window
        return ceil_div(y, h) * h, ceil_div(x, w) * w


class BlockWindows(NamedTuple):
    """The windows of a block, plain or shifted; `None` where there is nothing to do."""

    mask: Tensor | None
    """Added to the scores, 0 or -inf: (windows 1 t t)."""
    tokens: Tensor | None
    """False on padding that takes part in attention: (n 1)."""

    def zero_padding(self, x: Tensor) -> Tensor:
        """Tokens (b n c) with zeros in place of padding that takes part in attention."""
        return x if self.tokens is None else x * self.tokens


class StageWindows(NamedTuple):
    """The indices and masks of one stage; `None` where there is nothing to do."""

    plain_mask: Tensor | None
    plain_tokens: Tensor | None
    shifted_mask: Tensor | None
    shifted_tokens: Tensor | None
    to_shifted: Tensor | None
    """Index from plain to shifted window order: (n)."""
    to_plain: Tensor | None
    neighbours: Tensor | None
    """Index of the four tokens of the previous stage that are merged into each token: (4·n)."""
    neighbours_inverse: Tensor | None
    """Its inverse where it is a permutation."""
    neighbours_inside: Tensor | None
    """False for neighbours outside the grid of the previous stage, which count as zero: (4·n 1)."""

    def of_block(self, number: int) -> BlockWindows:
        """The windows of a block of the stage, counted from 0."""
        if number % 2 and self.to_shifted is not None:
            return BlockWindows(self.shifted_mask, self.shifted_tokens)
        return BlockWindows(self.plain_mask, self.plain_tokens)

    def shift(self, x: Tensor) -> Tensor:
        """Tokens (b n c) from plain to shifted windows."""
        return _gather(x, self.to_shifted, self.to_plain)

    def shift_back(self, x: Tensor) -> Tensor:
        """Tokens (b n c) from shifted to plain windows."""
        return _gather(x, self.to_plain, self.to_shifted)

    def merge_neighbours(self, x: Tensor) -> Tensor:
        """Tokens of the previous stage, as its last block leaves them, to the plain windows of this
        one: 2 x 2 neighbours side by side, (b n 4·c).
        """
        x = _gather(x, self.neighbours, self.neighbours_inverse, self.neighbours_inside)
        return rearrange(x, "b (n four) c -> b n (four c)", four=4)


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
    shapes: list[StageShape] = []
    grids = stage_grids(grid, len(windows))
    for cells, window, depth in zip(grids, windows, config.depths, strict=True):
        y, x = (w // 2 if config.shift and g > w else 0 for g, w in zip(cells, window, strict=True))
        previous = shapes[-1] if shapes else None
        attended = config.padding == "attend"
        shapes.append(StageShape(cells, window, (y, x), depth % 2 == 0, attended, previous))
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


def stage_tensors(shape: StageShape, device: torch.device) -> StageWindows:
    """All indices and masks of a stage."""
    plain = _order(shape, (0, 0), device)
    merging = _merging(shape, shape.previous, plain)
    unshifted = _mask(shape, plain, (0, 0)), _tokens(shape, plain)
    if not any(shape.shift):
        return StageWindows(*unshifted, None, None, None, None, *merging)
    shifted = _order(shape, shape.shift, device)
    return StageWindows(
        *unshifted,
        _mask(shape, shifted, shape.shift),
        _tokens(shape, shifted),
        _invert(plain)[shifted],
        _invert(shifted)[plain],
        *merging,
    )


def row_order(shape: StageShape, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Index of the tokens row by row, without padding, after the last block of a stage: (y·x); and
    its inverse where it is a permutation.
    """
    if shape.padded == shape.grid == shape.window:
        return None, None  # a single window is in that order already
    y, x = _raster(shape.grid, device)
    index = _invert(_last_order(shape, device))[(y * shape.padded[1] + x).flatten()]
    return index, _invert(index) if shape.padded == shape.grid else None


def partition(x: Tensor, window: Grid) -> Tensor:
    """A grid of whole windows (b c y x) to tokens in plain window order: (b w·t c)."""
    return rearrange(x, "b c (wy h) (wx w) -> b (wy wx h w) c", h=window[0], w=window[1])


def to_rows(x: Tensor, index: Tensor | None, inverse: Tensor | None) -> Tensor:
    """Tokens (b n c) in the order of `row_order`: (b y·x c)."""
    return _gather(x, index, inverse)


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
        return _Permute.apply(grad, inverse, index), None, None


def _gather(
    x: Tensor, index: Tensor | None, inverse: Tensor | None, inside: Tensor | None = None
) -> Tensor:
    """Tokens (b n c) in the order of an index, zero where not `inside`."""
    if index is None:
        return x
    if inverse is not None:
        return _Permute.apply(x, index, inverse)
    x = x.index_select(1, index)
    return x if inside is None else x * inside


def _raster(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    axes = [torch.arange(cells, device=device) for cells in grid]
    y, x = torch.meshgrid(*axes, indexing="ij")
    return y, x


def _order(shape: StageShape, shift: Grid, device: torch.device) -> Tensor:
    """The raster position on the padded grid of every token in window order: (n)."""
    y, x = _raster(shape.padded, device)
    position = (y * shape.padded[1] + x).roll((-shift[0], -shift[1]), (0, 1))
    return partition(position[None, None], shape.window).flatten()


def _last_order(shape: StageShape, device: torch.device) -> Tensor:
    return _order(shape, shape.shift if shape.ends_shifted else (0, 0), device)


def _invert(order: Tensor) -> Tensor:
    return torch.argsort(order)


def _mask(shape: StageShape, order: Tensor, shift: Grid) -> Tensor | None:
    """0 within a region of a window, -inf across; None where every window is a single region."""
    apart_from_padding = shape.padded != shape.grid and not shape.attended
    if not apart_from_padding and not any(shift):
        return None
    region = torch.zeros(shape.padded, dtype=torch.int64, device=order.device)
    # A shift wraps the first rows and columns around to the far side of the grid.
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
    """False on padding in this window order: (n 1); None unless padding is attended to."""
    if not shape.attended or shape.padded == shape.grid:
        return None
    y, x = order // shape.padded[1], order % shape.padded[1]
    return ((y < shape.grid[0]) & (x < shape.grid[1]))[:, None]


def _merging(
    shape: StageShape, previous: StageShape | None, plain: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Index of the 2 x 2 neighbours of the previous stage for each token of this one."""
    if previous is None:
        return None, None, None
    y, x = plain // shape.padded[1] * 2, plain % shape.padded[1] * 2
    # Neighbours come column by column: upper left, lower left, upper right, lower right.
    y = torch.stack([y, y + 1, y, y + 1], dim=1).flatten()
    x = torch.stack([x, x, x + 1, x + 1], dim=1).flatten()
    inside = (y < previous.grid[0]) & (x < previous.grid[1])
    position = (y * previous.padded[1] + x) * inside  # any position will do for those outside
    index = _invert(_last_order(previous, plain.device))[position]
    whole = previous.padded == previous.grid and shape.padded == shape.grid
    if whole and previous.grid == (2 * shape.grid[0], 2 * shape.grid[1]):
        return index, _invert(index), None
    return index, None, inside[:, None]
