"""Where the tokens of a layer lie in the image.

Axes: b batch · h heads · w windows · t, s slots of a window (queries, keys) · n, m tokens (prefix
tokens first, then cells row by row) · y, x rows and columns of the cell grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from vision.models.layers import Grid

Cell = tuple[int, int]
"""Row and column."""
Place = str | Cell
"""The name of a prefix token, or a cell."""
Box = tuple[int, int, int, int]
"""Top, left, bottom, right; the last two are outside."""

PADDING = -1
"""In an index of slots: no cell of the image."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The tokens of one layer.

    In a global layer (no `index`) every token attends to every token: weights are (b h n n). In a
    layer of windows slots attend within their window: weights are (b w h t t).
    """

    prefix: tuple[str, ...]
    """Names of the tokens before the cells: "class", "distillation", "register 1", …"""
    grid: Grid
    stride: Grid
    """Pixels from one cell to the next, per axis."""
    image_size: Grid
    window: Grid | None = None
    shift: Grid | None = None
    index: Tensor | None = None
    """The cell in each slot, row by row, or `PADDING`: (w t)."""
    allowed: Tensor | None = None
    """True where a query slot may attend to a key slot: (w t s). None: everywhere."""
    margins: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Pixels that the token of a cell sees beyond the cell, through the convolutions of a stem:
    above, left, below, right."""

    @property
    def cells(self) -> int:
        """Number of cells."""
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        """Number of prefix tokens and cells."""
        return len(self.prefix) + self.cells

    def identity(self) -> tuple[Any, ...]:
        """A key that is equal for equal layouts."""
        contents = (
            None if tensor is None else tensor.cpu().numpy().tobytes()
            for tensor in (self.index, self.allowed)
        )
        return self.prefix, self.grid, self.stride, self.window, self.shift, *contents

    def query(self, place: Place) -> int:
        """The token of a prefix name or a cell."""
        if isinstance(place, str):
            if place not in self.prefix:
                has = ", ".join(self.prefix) or "none"
                raise ValueError(
                    f"Unknown token '{place}'. Prefix tokens of this model: {has}. "
                    "A cell is given as (row, column)."
                )
            return self.prefix.index(place)
        y, x = place
        rows, columns = self.grid
        if not (-rows <= y < rows and -columns <= x < columns):
            raise ValueError(f"Cell {place} is outside the grid of {rows} rows, {columns} columns.")
        return len(self.prefix) + y % rows * columns + x % columns

    def place(self, token: int) -> Place:
        """The prefix name or the cell of a token: the inverse of `query`."""
        if token < len(self.prefix):
            return self.prefix[token]
        return divmod(token - len(self.prefix), self.grid[1])

    def cell_at(self, pixel: tuple[int, int]) -> Cell:
        """The cell that a pixel (row, column) lies in."""
        if not all(0 <= p < size for p, size in zip(pixel, self.image_size, strict=True)):
            raise ValueError(f"Pixel {pixel} is outside the image of {self.image_size}.")
        return (
            min(pixel[0] // self.stride[0], self.grid[0] - 1),
            min(pixel[1] // self.stride[1], self.grid[1] - 1),
        )

    def box(self, cell: Cell) -> Box:
        """The pixels of a cell, cut at the edge of the image."""
        y, x = cell
        height, width = self.image_size
        top, left = y * self.stride[0], x * self.stride[1]
        return top, left, min(top + self.stride[0], height), min(left + self.stride[1], width)

    def field(self, cell: Cell) -> Box:
        """The pixels that the token of a cell sees before the first block, cut at the edge."""
        top, left, bottom, right = self.box(cell)
        above, before, below, after = self.margins
        height, width = self.image_size
        return (
            max(0, top - above),
            max(0, left - before),
            min(height, bottom + below),
            min(width, right + after),
        )

    def to_grid(self, values: Tensor) -> Tensor:
        """The cells of values by token (… n): (… y x)."""
        self._check_tokens(values)
        return rearrange(values[..., len(self.prefix) :], "... (y x) -> ... y x", y=self.grid[0])

    def prefix_values(self, values: Tensor) -> dict[str, Tensor]:
        """The prefix tokens of values by token (… n), by name."""
        self._check_tokens(values)
        return {name: values[..., i] for i, name in enumerate(self.prefix)}

    def _check_tokens(self, values: Tensor) -> None:
        if values.shape[-1] != self.tokens:
            raise ValueError(
                f"Expected values of {self.tokens} tokens ({len(self.prefix)} prefix tokens and "
                f"{self.grid[0]} x {self.grid[1]} cells), found {values.shape[-1]}."
            )

    def row(self, weights: Tensor, place: Place) -> Tensor:
        """Where a token looks: (b h n), zero for cells outside its window."""
        token = self.query(place)
        if self.index is None:
            return weights[:, :, token]
        window, slot = self.slot(token)
        return self._scatter(weights[:, window, :, slot], window)

    def slot(self, token: int) -> tuple[int, int]:
        """Window and slot of a token of a windowed layer."""
        return divmod(int(self.slots[token]), self._windows().shape[1])

    @cached_property
    def slots(self) -> Tensor:
        """The slot of every cell, numbered through all windows: (y·x)."""
        index = self._windows().flatten()
        slots = index.new_empty(self.cells + 1)
        slots[index] = torch.arange(len(index), device=index.device)  # `PADDING` is the last one
        return slots[:-1]

    def by_cell(self, values: Tensor) -> Tensor:
        """Values by slot (… w t) as values by cell (… y·x), padding left out."""
        return values.flatten(-2)[..., self.slots]

    def padding(self) -> Tensor:
        """True for slots without a cell: (w t)."""
        return self._windows() < 0

    def masked(self, place: Place) -> Tensor:
        """The cells that share the query's window but are masked from it: (y x)."""
        if self.allowed is None:
            return torch.zeros(self.grid, dtype=torch.bool)
        return self.to_grid(self.row(~self.allowed[None, :, None], place))[0, 0]

    def keys(self, place: Place) -> int:
        """The number of keys that a query can attend to; padding counts where nothing masks it."""
        token = self.query(place)
        if self.index is None:
            return self.tokens
        window, slot = self.slot(token)
        if self.allowed is None:
            return self.index.shape[1]
        return int(self.allowed[window, slot].sum())

    def outlines(self) -> list[Box]:
        """The windows in the image, in cells; a window that a shift wraps comes in pieces.

        Cells of a window that the mask keeps apart are in different pieces.
        """
        if self.index is None:
            return [(0, 0, *self.grid)]
        pieces: list[Box] = []
        for window, cells in enumerate(self.index):
            free = cells >= 0
            while bool(free.any()):
                first = int(free.nonzero()[0])
                together = free if self.allowed is None else free & self.allowed[window, first]
                pieces += _rectangles(cells[together].tolist(), self.grid[1])
                free = free & ~together
        return pieces

    def _windows(self) -> Tensor:
        if self.index is None:
            raise ValueError("This layer is global: it has no windows.")
        return self.index

    def _scatter(self, values: Tensor, window: int) -> Tensor:
        """Values by slot of one window (… t), in the cells of the whole grid (… y·x)."""
        cells = self._windows()[window]
        real = cells >= 0
        out = values.new_zeros(*values.shape[:-1], self.cells)
        out[..., cells[real]] = values[..., real]
        return out


def _rectangles(cells: Sequence[int], columns: int) -> list[Box]:
    """The cells of a window that attend to each other, as rectangles.

    They are all combinations of some rows and some columns, each in one run or, where a shift
    wraps them around an edge, in two.
    """
    rows = _runs(sorted({cell // columns for cell in cells}))
    across = _runs(sorted({cell % columns for cell in cells}))
    return [(top, left, bottom, right) for top, bottom in rows for left, right in across]


def _runs(xs: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for x in xs:
        if runs and runs[-1][1] == x:
            runs[-1] = (runs[-1][0], x + 1)
        else:
            runs.append((x, x + 1))
    return runs
