"""What the shapes of weights tell of grids and windows."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.models.layers import Grid, ceil_div

PLAIN = {
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "drop_path": 0.0,
    "drop_path_schedule": "linear",
    "checkpoint_activations": False,
}
"""Settings of a model that weights have nothing to do with."""


def need(tensors: Mapping[str, Tensor], name: str, axes: int) -> Tensor:
    """A tensor with so many axes, or an error."""
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"the weights are not complete: '{name}' is missing.")
    if tensor.ndim != axes or 0 in tensor.shape:
        raise CheckpointError(
            f"'{name}' has the shape {tuple(tensor.shape)}; expected {axes} axes, none of length 0."
        )
    return tensor


def patch_weight(tensors: Mapping[str, Tensor]) -> Tensor:
    """The patch embedding: width, channels, and height and width of a patch."""
    return need(tensors, "patch_embed.proj.weight", 4)


def count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """How many numbers, from 0 on without a gap, a part of the names has."""
    found = {int(match[1]) for name in tensors if (match := re.fullmatch(pattern, name))}
    if found != set(range(len(found))):
        gap = min(set(range(max(found))) - found)
        raise CheckpointError(f"block or stage {gap} is missing among the weights.")
    return len(found)


def mlp_ratio(hidden: int, width: int) -> float:
    """A ratio that gives back this number of channels when it is multiplied and rounded down."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


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
    hint: Grid | None = None,
) -> PositionTable:
    """The layout of `positions.table`: by the size of the pictures that is given, by the one that
    is written beside the weights if it fits, else as the only square grid that leaves a sensible
    number of rows in front.
    """
    rows = need(tensors, "positions.table", 3).shape[1]
    tokens = [need(tensors, n, 3).shape[1] for n in ("cls_token", "dist_token") if n in tensors]
    registers = need(tensors, "reg_token", 3).shape[1] if "reg_token" in tensors else 0
    choices = dict.fromkeys([sum(tokens), 0, sum(tokens) + registers])
    for size in filter(None, (trained_size, hint)):
        grid = ceil_div(size[0], patch[0]), ceil_div(size[1], patch[1])
        front = rows - grid[0] * grid[1]
        if front in choices:
            return PositionTable(front, grid, None)
        if size == hint:
            continue
        raise CheckpointError(
            f"The table of positions has {rows} rows, but pictures of {size[0]} × "
            f"{size[1]} pixels make {grid[0]} × {grid[1]} patches and {sum(tokens)} tokens "
            f"in front. Give the size that the weights were trained at as trained_size=[h, w]."
        )
    for front in choices:
        side = math.isqrt(max(rows - front, 0))
        if side and side * side == rows - front:
            size = side * patch[0], side * patch[1]
            note = f"pictures of {size[0]} × {size[1]} pixels: the grid of positions is square"
            return PositionTable(front, (side, side), note)
    raise CheckpointError(
        f"The table of positions has {rows} rows, which is no square grid with {sum(tokens)} "
        f"tokens in front. Give the size of the pictures: trained_size=[height, width]."
    )


def square_window(rows: int) -> int | None:
    """The side of the square window whose table of relative positions has so many rows."""
    side = math.isqrt(rows)
    return (side + 1) // 2 if side * side == rows and side % 2 else None


def stage_windows(tensors: Mapping[str, Tensor]) -> list[int | None]:
    """The window of each stage by the tables of a first Swin; None where it is not square."""
    windows: list[int | None] = []
    while (name := f"layers.{len(windows)}.blocks.0.attn.relative_position_bias_table") in tensors:
        windows.append(square_window(tensors[name].shape[0]))
    return windows


class Offsets(NamedTuple):
    """What a stored `relative_coords_table` of Swin V2 tells of its stage."""

    window: int
    trained: int
    """The window that the position network was trained with."""


def stored_offsets(tensors: Mapping[str, Tensor]) -> list[Offsets]:
    """Window and pretrained window of each stage of a Swin V2, from the tables that some store.

    A table (1, 2w-1, 2w-1, 2) ends with log₂(1 + 8 (w - 1) / (t - 1)) / 3, where t is the window of
    pretraining.
    """
    found: dict[str, Offsets] = {}
    for name, table in tensors.items():
        if not name.endswith("attn.relative_coords_table") or table.ndim != 4:
            continue
        stage = name.split(".")[1]
        window = (table.shape[1] + 1) // 2
        last = float(table[0, -1, -1, 0])
        reach = 2 ** (3 * last) - 1
        trained = round(8 * (window - 1) / reach + 1) if math.isfinite(reach) and reach > 0 else 1
        found.setdefault(stage, Offsets(window, trained))
    return [found[stage] for stage in sorted(found, key=int)]


def stored_windows_of_a_picture(tensors: Mapping[str, Tensor]) -> int | None:
    """Windows along a side of the first grid, by the mask that the official code stores."""
    for name, mask in tensors.items():
        if name.startswith("layers.0.") and name.endswith(".attn_mask") and mask.ndim == 3:
            side = math.isqrt(mask.shape[0])
            return side if side * side == mask.shape[0] else None
    return None


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
