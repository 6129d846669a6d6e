"""The config of a ViT: from the shapes of its weights, then from what is written beside them."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from vision.checkpoints.fit.stored_windows import square_window
from vision.checkpoints.layouts.rules import (
    Converted,
    count,
    gated_mlp,
    mlp_ratio,
    need,
    stem_shape,
)
from vision.checkpoints.metadata import StoredWeights
from vision.config import ConfigError, square
from vision.models.layers import Grid, ceil_div

PLAIN = {
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "drop_path": 0.0,
    "drop_path_schedule": "linear",
    "checkpoint_activations": False,
}
"""Settings of a model that weights have nothing to do with."""
HEADS_OF_WIDTH = {192: 3, 256: 4, 320: 5, 384: 6, 512: 8, 640: 10, 768: 12, 832: 13, 896: 14}
HEADS_OF_WIDTH |= {1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16, 1792: 16, 4096: 32}
"""Heads of published ViTs by their width: 64 channels per head up to ViT-L, more in larger ones."""
UNSEEN = {
    "activation": "gelu",
    "norm_eps": 1e-6,
    "block_norm": "before",
    "rotary": "axial",
    "rotary_grid": None,
    "rotary_jitter": [0.0, 1.0, 1.0],
    "initialization": "trunc_normal",
}
"""Settings that leave no trace in the weights, with their usual values."""


def vit_values(
    source: StoredWeights, size: Grid | None, given: Mapping[str, Any], assumed: list[str]
) -> tuple[dict[str, Any], Grid]:
    """Settings of the model, and the size of the images that it was trained on.

    Shapes come first; what a layout or a config.json says replaces them; what is `given` replaces
    both. What none of them says is added to `assumed`.
    """
    converted = source.converted
    tensors, said = converted.tensors, converted.facts | source.metadata.model | dict(given)
    _check_open(converted, said)
    said |= _deit_or_rope(source, said, assumed)
    values = {"kind": "vit", **UNSEEN, **PLAIN, **_shapes(tensors), **_pooling(tensors)}
    usual = {name: value for name, value in converted.usual.items() if name not in said}
    for reason in dict.fromkeys(value.reason for value in usual.values()):
        settings = [f"{n}={u.value}" for n, u in usual.items() if u.reason == reason]
        assumed.append(f"{', '.join(settings)}: {reason}")
    said |= {name: value.value for name, value in usual.items()}
    assumed += _unseen(values, said)
    values |= said
    if "heads" not in values:
        values["heads"] = _heads(tensors, values["width"], assumed)
    inner = need(tensors, "blocks.0.attn.qkv.weight", 2).shape[0] // 3
    if inner != values["width"]:
        values["head_width"] = inner // values["heads"]
    trained = _positions(source, values, size, said, assumed)
    return values, trained


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the tensors show: sizes, and which parts there are."""
    stem = stem_shape(tensors)
    relative = "block" if "blocks.0.relative.table" in tensors else "none"
    return {
        "patch_size": square(stem.patch),
        "stem": stem.kind,
        "width": stem.width,
        "depth": count(tensors, r"blocks\.(\d+)\..*"),
        "head_width": None,
        "class_token": "cls_token" in tensors,
        "registers": need(tensors, "reg_token", 3).shape[1] if "reg_token" in tensors else 0,
        "distillation_token": "dist_token" in tensors,
        "relative_bias": "shared" if "relative.table" in tensors else relative,
        "embedding_norm": "norm_pre.weight" in tensors,
        "qkv_bias": _qkv_bias(tensors),
        "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
        "attention_norm": "blocks.0.attn.norm.weight" in tensors,
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in tensors else None,
        "mlp_norm": "blocks.0.mlp.norm.weight" in tensors,
        **_mlp(tensors, stem.width),
    }


def _qkv_bias(tensors: Mapping[str, Tensor]) -> str:
    if "blocks.0.attn.qkv.bias" in tensors:
        return "qkv"
    return "qv" if "blocks.0.attn.q_bias" in tensors else "none"


def _mlp(tensors: Mapping[str, Tensor], width: int) -> dict[str, Any]:
    """Ratio and kind of the MLP."""
    hidden = need(tensors, "blocks.0.mlp.fc2.weight", 2).shape[1]
    kind = {"mlp": "gated", "activation": "silu"} if gated_mlp(tensors) else {"mlp": "plain"}
    return kind | {"mlp_ratio": mlp_ratio(hidden, width)}


def _pooling(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What lies between the last block and the head."""
    width = stem_shape(tensors).width
    values: dict[str, Any] = {
        "pool": "class_token" if "cls_token" in tensors else "mean",
        "pool_norm": "before" if "norm.weight" in tensors else "none",
        "pool_heads": None,
        "pool_mlp_ratio": None,
        "representation": None,
        "projection": None,
    }
    for name in ("representation", "projection"):
        if f"{name}.weight" in tensors:
            values[name] = need(tensors, f"{name}.weight", 2).shape[0]
    if "pooling.latent" in tensors:
        hidden = need(tensors, "pooling.mlp.fc1.weight", 2).shape[0]
        own = need(tensors, "blocks.0.mlp.fc2.weight", 2).shape[1]
        ratio = None if hidden == own else mlp_ratio(hidden, width)
        return values | {"pool": "attention", "pool_mlp_ratio": ratio}
    first = next((n for n in ("representation", "head") if f"{n}.weight" in tensors), None)
    inputs = None if first is None else need(tensors, f"{first}.weight", 2).shape[1]
    if inputs == 2 * width and "cls_token" in tensors:
        values["pool"] = "class_token_and_mean"
    return values


def _check_open(converted: Converted, said: Mapping[str, Any]) -> None:
    """Raise an error for settings that must be given, or that have a value without a model here."""
    missing = [name for name in converted.asked if name not in said]
    if missing:
        questions = " ".join(converted.asked[name].reason for name in missing)
        names = " and ".join(f"model.{name}" for name in missing)
        raise ConfigError(f"{names} cannot be inferred from the weights. {questions}")
    for name, value in said.items():
        open_setting = converted.asked.get(name) or converted.usual.get(name)
        if open_setting and open_setting.allowed and value not in open_setting.allowed:
            raise ConfigError(
                f"model.{name}={value} is not possible for these weights. {open_setting.reason}"
            )


def _deit_or_rope(
    source: StoredWeights, said: Mapping[str, Any], assumed: list[str]
) -> dict[str, object]:
    """Which of two models with the same tensors it is: DeiT-III, which is published inside
    {"model": …}, or timm's vit_*_rope_ape, which also turns queries and keys.
    """
    if source.layout != "DeiT" or "positions" in said:
        return {}
    rows = need(source.converted.tensors, "positions.table", 3).shape[1]
    if math.isqrt(rows) ** 2 != rows:
        return {}  # a row for the class token, which RoPE-ViT does not have
    if not source.path_taken:
        raise ConfigError(
            "the weights are those of DeiT-III or of timm's vit_*_rope_ape, whose tensors have the "
            "same names and shapes. Give model.positions=learned for DeiT-III, or "
            "model.positions=learned_rotary model.rotary=axial for vit_*_rope_ape."
        )
    assumed.append("positions=learned: as in DeiT-III, which is published in such files")
    return {"positions": "learned"}


def _unseen(values: Mapping[str, Any], said: Collection[str]) -> list[str]:
    """What weights do not show and nothing beside them says."""
    names = [name for name in ("activation", "norm_eps", "block_norm") if name not in said]
    if values["mlp"] == "gated" and "activation" in names:
        names.remove("activation")
    pools = values["class_token"] and values["pool"] == "class_token"
    if pools and not values["distillation_token"] and "pool" not in said:
        names.append("pool")
    if not names:
        return []
    listed = ", ".join(f"{name}={values[name]}" for name in names)
    return [f"{listed}: as usual, since weights do not show it"]


def _heads(tensors: Mapping[str, Tensor], width: int, assumed: list[str]) -> int:
    relative = _relative_table(tensors)
    if relative is not None:
        return relative.shape[1]
    if "rotary.frequencies" in tensors:
        return need(tensors, "rotary.frequencies", 4).shape[2]
    inner = need(tensors, "blocks.0.attn.qkv.weight", 2).shape[0] // 3
    if "blocks.0.attn.q_norm.weight" in tensors:
        return inner // need(tensors, "blocks.0.attn.q_norm.weight", 1).shape[0]
    if "rotary.periods" in tensors:
        return inner // (4 * need(tensors, "rotary.periods", 1).shape[0])
    if width not in HEADS_OF_WIDTH or inner != width:
        raise ConfigError(
            f"the number of heads of a ViT of width {width} cannot be inferred from its weights; "
            f"give model.heads=… (in Python heads=…)."
        )
    heads = HEADS_OF_WIDTH[width]
    assumed.append(f"heads={heads}: as in published ViTs of width {width}")
    return heads


def _positions(
    source: StoredWeights,
    values: dict[str, Any],
    size: Grid | None,
    said: Mapping[str, Any],
    assumed: list[str],
) -> Grid:
    """Complete the settings of positions; the size of the images in training."""
    tensors, known = source.converted.tensors, source.metadata
    patch = stem_shape(tensors).patch
    turns = "rotary.frequencies" in tensors or "rotary.periods" in tensors
    if "rotary.frequencies" in tensors and "rotary" not in said:
        values["rotary"] = "mixed"
    if "positions.table" in tensors:
        rows = said.get("class_token_position")
        table = position_table(tensors, patch, size, [known.image_size], rows)
        values["class_token_position"] = table.rows > 0
        if "positions" not in said:
            values["positions"] = "learned_rotary" if turns else "learned"
        assumed += [table.assumed] if table.assumed else []
        if "embeds.pos_embed" in source.tensors and not known.model:
            assumed.append(
                "positions of other aspect ratios are resized along each axis: timm's "
                "naflexvit_*_par_* keep the aspect ratio, which tensors do not show"
            )
        return table.grid[0] * patch[0], table.grid[1] * patch[1]
    values.setdefault("class_token_position", False)
    if "positions" not in said:
        values["positions"] = "rotary" if turns else _without_table(source, values, assumed)
    size = size or known.image_size or _relative_size(tensors, patch)
    if size is None:
        assumed.append("images of 224 × 224 pixels: without a table of positions any size will do")
    return size or (224, 224)


def _relative_table(tensors: Mapping[str, Tensor]) -> Tensor | None:
    names = ("blocks.0.relative.table", "relative.table")
    return next((need(tensors, name, 2) for name in names if name in tensors), None)


def _relative_size(tensors: Mapping[str, Tensor], patch: Grid) -> Grid | None:
    """The size of square images whose patches have a table of relative positions."""
    table = _relative_table(tensors)
    side = None if table is None else square_window(table.shape[0] - 3)
    return None if side is None else (side * patch[0], side * patch[1])


def _without_table(source: StoredWeights, values: Mapping[str, Any], assumed: list[str]) -> str:
    if "positions.proj.weight" in source.converted.tensors:
        return "fourier"
    kind = "sincos2d" if source.layout == "Google npz" else "none"
    if values["relative_bias"] == "none":
        assumed.append(f"positions={kind}: the weights have no table of positions")
    return kind


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
