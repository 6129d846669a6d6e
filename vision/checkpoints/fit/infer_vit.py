"""The config of a ViT: from the shapes of its weights, then from what is written beside them."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from vision.checkpoints.fit.position_table import position_table
from vision.checkpoints.fit.stored_windows import square_window
from vision.checkpoints.layouts.rules import (
    Asked,
    Converted,
    count,
    mlp_ratio,
    need,
    patch_weight,
    square,
)
from vision.checkpoints.metadata import StoredWeights
from vision.config import ConfigError
from vision.models.layers import Grid

PLAIN = {
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "drop_path": 0.0,
    "drop_path_schedule": "linear",
    "checkpoint_activations": False,
}
"""Settings of a model that weights have nothing to do with."""
HEADS_OF_WIDTH = {64 * heads: heads for heads in (3, 4, 5, 6, 8, 10, 12, 13, 14, 16)} | {
    1152: 16,
    1280: 16,
    1408: 16,
    1536: 24,
    1664: 16,
    1792: 16,
    4096: 32,
}
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
    projection = patch_weight(tensors)
    width, patch = projection.shape[0], (projection.shape[2], projection.shape[3])
    bias = "patch" if "patch_embed.proj.bias" in tensors else "patch_no_bias"
    relative = "block" if "blocks.0.relative.table" in tensors else "none"
    return {
        "patch_size": square(patch),
        "stem": "patch_normed" if "patch_embed.norm_before.weight" in tensors else bias,
        "width": width,
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
        **_mlp(tensors, width),
    }


def _qkv_bias(tensors: Mapping[str, Tensor]) -> str:
    if "blocks.0.attn.qkv.bias" in tensors:
        return "qkv"
    return "qv" if "blocks.0.attn.q_bias" in tensors else "none"


def _mlp(tensors: Mapping[str, Tensor], width: int) -> dict[str, Any]:
    """Ratio and kind of the MLP. A gated one has twice the channels before its gate."""
    before, after = (need(tensors, f"blocks.0.mlp.{layer}.weight", 2) for layer in ("fc1", "fc2"))
    ratio = mlp_ratio(after.shape[1], width)
    if before.shape[0] == 2 * after.shape[1]:
        return {"mlp": "gated", "activation": "silu", "mlp_ratio": ratio}
    return {"mlp": "plain", "mlp_ratio": ratio}


def _pooling(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What lies between the last block and the head."""
    width = patch_weight(tensors).shape[0]
    values: dict[str, Any] = {
        "pool": "class_token" if "cls_token" in tensors else "mean",
        "pool_norm": "before" if "norm.weight" in tensors else "none",
        "pool_heads": None,
        "pool_mlp_ratio": None,
        "representation": None,
        "projection": None,
    }
    if "representation.weight" in tensors:
        values["representation"] = need(tensors, "representation.weight", 2).shape[0]
    if "projection.weight" in tensors:
        values["projection"] = need(tensors, "projection.weight", 2).shape[0]
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
        questions = " ".join(converted.asked[name].question for name in missing)
        names = " and ".join(f"model.{name}" for name in missing)
        raise ConfigError(f"{names} cannot be inferred from the weights. {questions}")
    for name, value in said.items():
        open_setting = converted.asked.get(name) or converted.usual.get(name)
        if open_setting and open_setting.allowed and value not in open_setting.allowed:
            words = (
                open_setting.question if isinstance(open_setting, Asked) else open_setting.reason
            )
            raise ConfigError(f"model.{name}={value} is not possible for these weights. {words}")


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
    for name in ("blocks.0.relative.table", "relative.table"):
        if name in tensors:
            return need(tensors, name, 2).shape[1]
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
    patch = patch_weight(tensors).shape[-2:]
    turns = "rotary.frequencies" in tensors or "rotary.periods" in tensors
    if "rotary.frequencies" in tensors and "rotary" not in said:
        values["rotary"] = "mixed"
    if "positions.table" in tensors:
        rows = said.get("class_token_position")
        table = position_table(tensors, (patch[0], patch[1]), size, [known.image_size], rows)
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
    size = size or known.image_size or _relative_size(tensors, (patch[0], patch[1]))
    if size is None:
        assumed.append("images of 224 × 224 pixels: without a table of positions any size will do")
    return size or (224, 224)


def _relative_size(tensors: Mapping[str, Tensor], patch: Grid) -> Grid | None:
    """The size of square images whose patches have a table of relative positions."""
    for name in ("blocks.0.relative.table", "relative.table"):
        if name in tensors:
            side = square_window(need(tensors, name, 2).shape[0] - 3)
            return None if side is None else (side * patch[0], side * patch[1])
    return None


def _without_table(source: StoredWeights, values: Mapping[str, Any], assumed: list[str]) -> str:
    if "positions.proj.weight" in source.converted.tensors:
        return "fourier"
    kind = "sincos2d" if source.layout == "Google npz" else "none"
    if values["relative_bias"] == "none":
        assumed.append(f"positions={kind}: the weights have no table of positions")
    return kind
