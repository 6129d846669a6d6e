"""The windows of a Swin, measured in its file: by the tables of relative positions, and by the
buffers that some projects store although they follow from the geometry.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts.rules import need
from vision.config import square
from vision.models.layers import Grid
from vision.models.windows import clip_windows


def square_window(rows: int) -> int | None:
    """The side of the square window whose table of relative positions has this number of rows."""
    side = math.isqrt(rows)
    return (side + 1) // 2 if side * side == rows and side % 2 else None


def window_setting(windows: Sequence[Grid], grids: Sequence[Grid]) -> int | list[Any]:
    """The simplest `window` with which a Swin of these grids has these windows."""
    largest = max(h for h, _ in windows), max(w for _, w in windows)
    if clip_windows(largest, grids) != list(windows):
        return [list(window) for window in windows]
    return square(largest)


class Offsets(NamedTuple):
    """Windows of one stage of a Swin V2 by its stored `relative_coords_table`."""

    window: Grid
    unit: Grid
    """The window that the position network was trained with."""

    @property
    def trained(self) -> int:
        """The entry of `pretrained_window`."""
        return max(self.unit)


@dataclass
class StoredStage:
    """What a file stores about the windows of one stage."""

    rows: int | None = None
    """Rows of the tables of relative positions."""
    offsets: Offsets | None = None
    tokens: int | None = None
    """Tokens of a window, by the stored mask or index of pairs."""
    mask: Tensor | None = None
    """The mask of shifted windows (windows t t), -100 across their regions."""

    def fits(self, window: Grid) -> bool:
        """Whether the stage can have this window."""
        h, w = window
        return (
            self.rows in (None, (2 * h - 1) * (2 * w - 1))
            and self.tokens in (None, h * w)
            and (self.offsets is None or self.offsets.window == window)
        )

    def window(self) -> Grid | None:
        """The window, if the offsets show it or it is square."""
        if self.offsets is not None:
            found = self.offsets.window
        elif self.rows is not None:
            side = square_window(self.rows) or 0
            found = side, side
        else:
            side = math.isqrt(self.tokens or 0)
            found = side, side
        return found if 0 not in found and self.fits(found) else None

    def counts(self) -> Grid | None:
        """The number of windows down and across the grid, by the mask of a square window.

        A shift along an axis parts the first token of the last windows from the last along it.
        """
        window = self.window()
        if self.mask is None or window is None or min(window) < 2:
            return None
        h, w = window
        parted = (self.mask[:, 0, w - 1] != 0, self.mask[:, 0, (h - 1) * w] != 0)
        last_column, last_row = (int(windows.sum()) for windows in parted)
        if not last_column and not last_row:
            return None
        down = last_column or len(self.mask)  # without a shift across there is one column
        return None if len(self.mask) % down else (down, len(self.mask) // down)

    def evidence(self) -> str:
        """What the file stores, for an error."""
        window = self.window()
        shape = "" if window is None else f" (a window of {window[0]} × {window[1]})"
        if self.offsets is not None:
            rows, columns = (2 * side - 1 for side in self.offsets.window)
            return f"relative_coords_table has {rows} × {columns} offsets{shape}"
        if self.rows is not None:
            return f"relative_position_bias_table has {self.rows} rows{shape}"
        return f"attn_mask or relative_position_index has {self.tokens} tokens per window{shape}"


def stored_stages(
    tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], stages: int
) -> list[StoredStage]:
    """Every stage of a Swin, from the tensors of a file under its own names and under ours."""
    found = [StoredStage() for _ in range(stages)]
    offsets = _offsets(tensors)
    for s, stage in enumerate(found):
        name = f"layers.{s}.blocks.0.attn.relative_position_bias_table"
        stage.rows = need(own, name, 2).shape[0] if name in own else None
        stage.offsets = offsets.get(s)
    for s, name, tensor in _buffers(tensors):
        if s >= stages:
            continue
        if name == "relative_position_index" and found[s].tokens is None:
            found[s].tokens = math.isqrt(tensor.numel())  # of all pairs, flat in torchvision
        elif name == "attn_mask" and tensor.ndim == 3 and tensor.shape[1] == tensor.shape[2]:
            found[s].mask, found[s].tokens = tensor, tensor.shape[1]
    return found


def stored_offsets(tensors: Mapping[str, Tensor]) -> list[Offsets]:
    """Window and pretrained window of each stage of a Swin V2, from the tables that some store."""
    found = _offsets(tensors)
    return [found[stage] for stage in sorted(found)]


def _offsets(tensors: Mapping[str, Tensor]) -> dict[int, Offsets]:
    """By stage. A table (1, 2h-1, 2w-1, 2) ends with log₂(1 + 8 (h - 1) / (t - 1)) / 3, where t is
    the window of pretraining; likewise for w.
    """
    found: dict[int, Offsets] = {}
    for stage, name, table in _buffers(tensors):
        shape = tuple(table.shape)
        if name != "relative_coords_table" or len(shape) != 4 or 0 in shape or shape[3] != 2:
            continue
        window = (shape[1] + 1) // 2, (shape[2] + 1) // 2
        units = [_unit(window[axis], float(table[0, -1, -1, axis])) for axis in (0, 1)]
        known = [unit for unit in units if unit is not None] or [1]
        y, x = (known[0] if unit is None else unit for unit in units)
        if y != x and (y, x) != window:
            raise CheckpointError(
                f"relative_coords_table of stage {stage + 1} measures offsets in windows of "
                f"{y} × {x}; pretrained_window is square."
            )
        found.setdefault(stage, Offsets(window, (y, x)))
    return found


def _unit(side: int, last: float) -> int | None:
    """The side of pretraining's window by the last offset; None for a window of one token."""
    return round(8 * (side - 1) / (2 ** (3 * last) - 1) + 1) if 0 < last < 10 else None


def _buffers(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    """Stage and last part of the name of what follows from the geometry, in any layout."""
    pattern = re.compile(
        r"(?:.*\.)?(features|layers|stages)\.(\d+)\..*"
        r"(relative_coords_table|relative_position_index|attn_mask)"
    )
    for name, tensor in tensors.items():
        if (match := pattern.fullmatch(name)) is not None:
            number = int(match[2])
            # torchvision numbers stages and the mergings between them in one row.
            yield number // 2 if match[1] == "features" else number, match[3], tensor
