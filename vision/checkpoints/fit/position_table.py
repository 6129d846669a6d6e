"""The rows of a ViT's table of positions: which belong to tokens, and the grid of the others."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vision.checkpoints.layouts.rules import need
from vision.config import ConfigError
from vision.models.layers import Grid, ceil_div


class PositionTable(NamedTuple):
    """How the rows of a ViT's table of positions are used."""

    rows: int
    """Rows in front, for tokens without a place."""
    grid: Grid
    assumed: str | None
    """What was assumed about the grid."""


def position_table(
    tensors: Mapping[str, Tensor],
    patch: Grid,
    trained_size: Grid | None,
    hints: Sequence[Grid | None] = (),
    class_rows: bool | None = None,
) -> PositionTable:
    """The layout of `positions.table`: by the size of the images that is given, by the first of the
    `hints` that fits, else as the only square grid that leaves a sensible number of rows for other
    tokens. `class_rows` says whether these have rows, where that is known.
    """
    rows = need(tensors, "positions.table", 3).shape[1]
    tokens = [need(tensors, n, 3).shape[1] for n in ("cls_token", "dist_token") if n in tensors]
    registers = need(tensors, "reg_token", 3).shape[1] if "reg_token" in tensors else 0
    every = [0] if class_rows is False else [sum(tokens), 0, sum(tokens) + registers]
    choices = dict.fromkeys(every)
    for size in filter(None, (trained_size, *hints)):
        grid = ceil_div(size[0], patch[0]), ceil_div(size[1], patch[1])
        front = rows - grid[0] * grid[1]
        if front in choices:
            return PositionTable(front, grid, None)
        if size != trained_size:
            continue
        raise ConfigError(
            f"model.trained_size={list(size)}: the table of positions has {rows} rows, but images "
            f"of {size[0]} × {size[1]} pixels make {grid[0]} × {grid[1]} patches and "
            f"{sum(tokens)} tokens before them. Give the size that the weights were trained at."
        )
    for front in choices:
        side = math.isqrt(max(rows - front, 0))
        if side and side * side == rows - front:
            if not front and sum(tokens) == 1 and not registers and class_rows is None:
                _check_rows(tensors, side, patch)
            size = side * patch[0], side * patch[1]
            note = f"images of {size[0]} × {size[1]} pixels: the grid of positions is square"
            return PositionTable(front, (side, side), note)
    raise ConfigError(
        f"the table of positions has {rows} rows, which is not a square grid after {sum(tokens)} "
        f"tokens; give the size of the images in training: model.trained_size=[height,width]."
    )


def _check_rows(tensors: Mapping[str, Tensor], side: int, patch: Grid) -> None:
    """Refuse a table that fits two models: (n + 1)² rows are a square grid without a row for the
    class token, or n × (n + 2) cells and one. DeiT-III, which has layer scale, is the former.
    """
    if "blocks.0.ls1.gamma" in tensors or side < 2:
        return
    square = f"[{side * patch[0]},{side * patch[1]}]"
    wide = f"[{(side - 1) * patch[0]},{(side + 1) * patch[1]}]"
    raise ConfigError(
        f"the table of positions has {side * side} rows: {side} × {side} patches without a row "
        f"for the class token, or {side - 1} × {side + 1} patches with one. Give the size of the "
        f"images in training, such as model.trained_size={square} or model.trained_size={wide}."
    )


def fold_register_rows(tensors: dict[str, Tensor], table: PositionTable) -> PositionTable:
    """Give registers that have positions (timm, where the class token has one) their sum, since
    here they have none. Changes `tensors`.
    """
    tokens = sum(name in tensors for name in ("cls_token", "dist_token"))
    if table.rows <= tokens:
        return table
    positions = tensors["positions.table"]
    tensors["reg_token"] = tensors["reg_token"] + positions[:, tokens : table.rows]
    kept = [positions[:, :tokens], positions[:, table.rows :]]
    tensors["positions.table"] = torch.cat(kept, dim=1)
    return table._replace(rows=tokens)
