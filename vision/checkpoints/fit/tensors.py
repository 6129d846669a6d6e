"""Fit weights under our names to a model: tokens, positions, patches, windows and head.

Each function changes `Fitting.tensors` and notes what it did. Nothing is dropped without a reason.
Projects resize position tables in five ways that give different numbers; each has a name here, so
that what another project would compute can be had. The default is timm's.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.fit.infer_vit import PositionTable, position_table
from vision.checkpoints.fit.stored_windows import square_window
from vision.checkpoints.layouts.recognise import PositionMethod
from vision.checkpoints.layouts.rules import need, stem_shape
from vision.config import ConfigError
from vision.models.layers import Classifier, Grid, full_precision
from vision.models.positions.added import LearnedPositions
from vision.models.positions.relative import WindowMethod, resize_relative
from vision.models.positions.rotary import CentredRotary, dinov3_periods
from vision.models.stems import PatchEmbed, Stem
from vision.models.swin import Stage, Swin
from vision.models.vit import ViT

Sizes = tuple[Grid | None, Grid | None]
"""The size of the images that weights were trained with: as given, and as written beside them."""
NewHead = Literal["auto", "always", "other_classes", "never"]
"""auto: where the number of classes differs; other_classes: as always, since these have other
names."""
_INTERPOLATION: dict[PositionMethod, dict[str, Any]] = {
    "bicubic_antialias": {"mode": "bicubic", "antialias": True},
    "bicubic": {"mode": "bicubic"},
    "bicubic_corners": {"mode": "bicubic", "align_corners": True},
    "dino": {"mode": "bicubic"},
    "bilinear_corners": {"mode": "bilinear", "align_corners": True},
}


@dataclass
class Fitting:
    """Tensors on their way into a model, and what has been done to them."""

    tensors: dict[str, Tensor]
    resized: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def drop(self, name: str, reason: str) -> None:
        """Leave a tensor out."""
        if self.tensors.pop(name, None) is not None:
            self.ignored[name] = reason


def fit_vit(
    model: ViT,
    fitting: Fitting,
    sizes: Sizes,
    method: PositionMethod,
    windows: WindowMethod = "geometric",
) -> None:
    """Tokens, positions and patches of a ViT."""
    tensors = fitting.tensors
    positions = model.positions
    if isinstance(positions, LearnedPositions) and "positions.table" in tensors:
        _fit_positions(model, positions, fitting, sizes, method)
    for name, parameter in _tokens(model).items():
        if parameter is None and name in tensors:
            fitting.drop(name, "the model has no such token")
            fitting.warnings.append(
                f"The weights were trained with a token that the model does not have ({name})."
            )
    if model.head_dist is None:
        for name in ("head_dist.weight", "head_dist.bias"):
            fitting.drop(name, "the model has no distillation token")
    for name in [n for n in tensors if n.endswith("relative.table")]:
        _fit_relative(name, fitting, model.grid, windows)
    if isinstance(model.rotary, CentredRotary) and model.rotary.periods is not None:
        # timm computes what Meta stores.
        tensors.setdefault("rotary.periods", dinov3_periods(model.rotary.pairs))
    _fit_patches(fitting, model.patch_embed)


def _tokens(model: ViT) -> dict[str, Tensor | None]:
    """Tokens that may have a row in the table of positions, in its order."""
    return {"cls_token": model.cls_token, "dist_token": model.dist_token}


def _fit_relative(name: str, fitting: Fitting, grid: Grid, method: WindowMethod) -> None:
    """A table of relative positions of patches, whose last three rows belong to the class token."""
    table = fitting.tensors[name]
    side = square_window(table.shape[0] - 3)
    if side is not None and (side, side) != grid:
        cells = resize_relative(table[:-3], (side, side), grid, method)
        fitting.tensors[name] = torch.cat([cells, table[-3:]])
        fitting.resized[name] = f"{side} × {side} → {_grid(grid)} cells, {method}"


def _fit_positions(
    model: ViT,
    positions: LearnedPositions,
    fitting: Fitting,
    sizes: Sizes,
    method: PositionMethod,
) -> None:
    """The table at the model's grid, with a row for each token that has one in the model."""
    tensors, name = fitting.tensors, "positions.table"
    same_rows = tensors[name].shape[1] == positions.table.shape[1]
    try:
        size, hint = sizes
        own = model.grid[0] * model.patch_embed.patch[0], model.grid[1] * model.patch_embed.patch[1]
        table = position_table(tensors, stem_shape(tensors).patch, size, [hint, own])
    except (CheckpointError, ConfigError):
        if not same_rows:
            raise
        return  # not square, but exactly what the model has
    table = _fold_register_rows(tensors, table)
    cells = tensors[name][:, table.rows :]
    tokens = _tokens(model)
    rows = {n: tensors[name][:, i : i + 1] for i, n in enumerate(list(tokens)[: table.rows])}
    wanted = [n for n, token in tokens.items() if token is not None and positions.class_rows]
    for token, row in rows.items():
        if token not in wanted and token in tensors:
            tensors[token] = tensors[token] + row
    if list(rows) != wanted:
        fitting.resized[name] = f"rows for tokens: {_named(list(rows))} → {_named(wanted)}"
        zero = torch.zeros_like(cells[:, :1])
        tensors[name] = torch.cat([*(rows.get(token, zero) for token in wanted), cells], dim=1)
    if table.grid != positions.grid:
        fitting.resized[name] = f"{_grid(table.grid)} → {_grid(positions.grid)} cells, {method}"
        tensors[name] = resize_positions(
            tensors[name], len(wanted), table.grid, positions.grid, method
        )


def _fold_register_rows(tensors: dict[str, Tensor], table: PositionTable) -> PositionTable:
    """Give registers that have positions (timm, where the class token has one) their sum, since
    here they have none. Changes `tensors`.
    """
    tokens = sum(name in tensors for name in ("cls_token", "dist_token"))
    if table.rows <= tokens:
        return table
    first, own, cells = tensors["positions.table"].tensor_split((tokens, table.rows), dim=1)
    tensors["reg_token"] = tensors["reg_token"] + own
    tensors["positions.table"] = torch.cat([first, cells], dim=1)
    return table._replace(rows=tokens)


def _fit_patches(fitting: Fitting, stem: Stem) -> None:
    """The projection of patches; the convolutions of another stem fit as they are, or not."""
    name = "patch_embed.proj.weight"
    if not isinstance(stem, PatchEmbed):
        return
    weight, wanted = need(fitting.tensors, name, 4), stem.proj.weight.shape
    if weight.shape[2:] != wanted[2:] and weight.shape[0] == wanted[0]:
        sizes = f"{_grid(weight.shape[2:])} → {_grid(wanted[2:])} pixels, pseudo-inverse"
        fitting.resized[name] = sizes
        weight = resize_patches(weight, (wanted[2], wanted[3]))
    if weight.shape[1] != wanted[1] and weight.shape[0] == wanted[0]:
        note = f"{weight.shape[1]} → {wanted[1]} channels"
        fitting.resized[name] = "; ".join(filter(None, (fitting.resized.get(name), note)))
        weight = change_channels(weight, wanted[1])
    fitting.tensors[name] = weight


def fit_swin(
    model: Swin,
    fitting: Fitting,
    sizes: Sizes,
    positions: PositionMethod,
    windows: WindowMethod,
) -> None:
    """Patches and position tables of a Swin. The position network of V2 fits any window."""
    trained_patch = stem_shape(fitting.tensors).patch
    _fit_patches(fitting, model.patch_embed)
    for s, stage in enumerate(model.layers):
        assert isinstance(stage, Stage)
        for b in range(len(stage.blocks)):
            name = f"layers.{s}.blocks.{b}.attn.relative_position_bias_table"
            if name in fitting.tensors:
                _fit_window(name, fitting, model.windows[s], windows)
    if model.absolute_pos_embed is not None and "absolute_pos_embed" in fitting.tensors:
        table = {"positions.table": fitting.tensors["absolute_pos_embed"]}
        size, hint = sizes
        found = position_table(table, trained_patch, size, [hint])
        if found.grid != model.grid:
            resized = resize_positions(
                table["positions.table"], 0, found.grid, model.grid, positions
            )
            fitting.tensors["absolute_pos_embed"] = resized
            note = f"{_grid(found.grid)} → {_grid(model.grid)} cells, {positions}"
            fitting.resized["absolute_pos_embed"] = note


def _fit_window(name: str, fitting: Fitting, window: Grid, method: WindowMethod) -> None:
    table = fitting.tensors[name]
    if table.shape[0] == (2 * window[0] - 1) * (2 * window[1] - 1):
        return
    side = square_window(table.shape[0])
    if side is None:
        raise CheckpointError(
            f"'{name}' has {table.shape[0]} rows, which is not a square window; it cannot be "
            f"resized to the model's window of {_grid(window)}. Give the model the window that the "
            f"weights were trained with."
        )
    fitting.tensors[name] = resize_relative(table, (side, side), window, method)
    fitting.resized[name] = f"window {side} × {side} → {_grid(window)}, {method}"


def fit_head(model: Classifier, fitting: Fitting, new_head: NewHead) -> None:
    """The heads: those of the file where they fit, else those that the model was drawn with."""
    own = model.state_dict()
    heads = [n for n, m in model.named_modules() if any(m is head for head in model.heads())]
    for name in heads:
        parts = [part for part in own if part.startswith(f"{name}.")]
        if not parts:
            for part in ("weight", "bias"):
                fitting.drop(f"{name}.{part}", "the model has no head")
            continue
        differing = [p for p in parts if p in fitting.tensors]
        differing = [p for p in differing if fitting.tensors[p].shape != own[p].shape]
        if any(part not in fitting.tensors for part in parts):
            reason = "the weights have no head"
        elif differing:
            shapes = fitting.tensors[differing[0]].shape, own[differing[0]].shape
            reason = f"the head of the weights is {_grid(shapes[0])}, not {_grid(shapes[1])}"
        elif new_head == "always":
            reason = "a new head was asked for"
        elif new_head == "other_classes":
            reason = "the head of the weights is for other classes"
        else:
            continue
        if new_head == "never":
            raise CheckpointError(f"{reason}, and a new head is not wanted here.")
        for part in parts:
            fitting.drop(part, reason)
            fitting.new[part] = reason


def _grid(sizes: Grid | torch.Size) -> str:
    return " × ".join(map(str, sizes))


def _named(tokens: list[str]) -> str:
    return " and ".join(tokens) or "none"


def resize_positions(
    table: Tensor, rows: int, old: Grid, new: Grid, method: PositionMethod
) -> Tensor:
    """A table (1, rows + y·x, c) of one grid for another; the first rows belong to tokens without a
    place and stay.
    """
    if old == new:
        return table
    first, cells = table[:, :rows], full_precision(table[:, rows:])
    cells = rearrange(cells, "one (y x) c -> one c y x", y=old[0])
    # DINO adds a tenth against rounding, and by it the sampled points move a little.
    scale = [(n + 0.1) / o for n, o in zip(new, old, strict=True)]
    to = {"scale_factor": scale} if method == "dino" else {"size": new}
    cells = F.interpolate(cells, **to, **_INTERPOLATION[method])
    assert tuple(cells.shape[-2:]) == new
    resized = rearrange(cells, "one c y x -> one (y x) c").to(table.dtype)
    return torch.cat([first, resized], dim=1)


def resize_patches(weight: Tensor, new: Grid) -> Tensor:
    """A patch embedding (c channels h w) for another patch size, by the pseudo-inverse of the
    resizing of images (FlexiViT, Beyer et al., CVPR 2023): a resized patch gives the same token
    as far as that is possible.
    """
    height, width = weight.shape[-2:]
    if (height, width) == new:
        return weight
    basis = torch.eye(height * width, dtype=torch.float64).view(-1, 1, height, width)
    resized = F.interpolate(basis, new, mode="bicubic", antialias=True)
    matrix = rearrange(resized, "old one h w -> (h w) (one old)")
    flat = rearrange(weight.double().cpu(), "c i h w -> c i (h w)") @ torch.linalg.pinv(matrix)
    return rearrange(flat, "c i (h w) -> c i h w", h=new[0]).to(weight)


def change_channels(weight: Tensor, channels: int) -> Tensor:
    """A patch embedding for images of other channels: their sum for one; else repeated in turn
    and scaled so that the sum over channels keeps its size.
    """
    old = weight.shape[1]
    if channels == old:
        return weight
    if channels == 1:
        return full_precision(weight).sum(dim=1, keepdim=True).to(weight.dtype)
    turns = -(-channels // old)
    tiled = repeat(full_precision(weight), "c i h w -> c (turns i) h w", turns=turns)[:, :channels]
    return (tiled * (old / channels)).to(weight.dtype)
