"""The config of a ViT from the shapes of its weights."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vision.checkpoints.geometry import PLAIN, count, mlp_ratio, need, patch_weight, position_table
from vision.checkpoints.source import Source
from vision.config import ConfigError
from vision.models.layers import Grid

HEADS_OF_WIDTH = {64 * heads: heads for heads in (3, 4, 5, 6, 8, 10, 12, 16)} | {
    1152: 16,
    1280: 16,
    1408: 16,
    1536: 24,
    1664: 16,
}
"""Heads of published ViTs by their width: 64 channels per head up to ViT-L, more in larger ones."""


def vit_values(
    source: Source, size: Grid | None, given: Mapping[str, Any], assumed: list[str]
) -> tuple[dict[str, Any], Grid]:
    tensors, known = source.converted.tensors, source.metadata
    projection = patch_weight(tensors)
    width, patch = projection.shape[0], (projection.shape[2], projection.shape[3])
    values: dict[str, Any] = {
        "kind": "vit",
        "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "width": width,
        "depth": count(tensors, r"blocks\.(\d+)\..*"),
        "class_token": "cls_token" in tensors,
        "registers": need(tensors, "reg_token", 3).shape[1] if "reg_token" in tensors else 0,
        "distillation_token": "dist_token" in tensors,
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in tensors else None,
        "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
        "initialization": "trunc_normal",
        "norm_eps": 1e-6,
        **_mlp(tensors, width),
        **PLAIN,
    }
    values["pool"] = "class_token" if values["class_token"] else "mean"
    values["pool_norm"] = "before"
    values |= {k: v for k, v in known.model.items() if k in ("heads", "norm_eps", "pool")}
    values |= source.converted.facts
    head = need(tensors, "head.weight", 2) if "head.weight" in tensors else None
    if head is not None and head.shape[1] == 2 * width and values["class_token"]:
        values["pool"] = "class_token_and_mean"
    if "heads" not in values and "heads" not in given:
        values["heads"] = _heads(tensors, width, assumed)
    if "positions.table" in tensors:
        table = position_table(tensors, patch, size, known.image_size)
        values |= {"positions": "learned", "class_token_position": table.rows > 0}
        assumed += [table.assumed] if table.assumed else []
        return values, (table.grid[0] * patch[0], table.grid[1] * patch[1])
    values |= {"class_token_position": False, "positions": _without_table(source, given, assumed)}
    size = size or known.image_size
    if size is None:
        assumed.append("pictures of 224 × 224 pixels: without a table of positions any will do")
    return values, size or (224, 224)


def _without_table(source: Source, given: Mapping[str, Any], assumed: list[str]) -> str:
    if "positions.proj.weight" in source.converted.tensors:
        return "fourier"
    kind = "sincos2d" if source.layout == "Google npz" else "none"
    if "positions" not in given:
        assumed.append(f"positions={kind}: the weights have no table of positions")
    return kind


def _mlp(tensors: Mapping[str, Tensor], width: int) -> dict[str, Any]:
    """Ratio and kind of the MLP. A gated one has twice the channels before its gate."""
    before, after = (need(tensors, f"blocks.0.mlp.{layer}.weight", 2) for layer in ("fc1", "fc2"))
    gated = before.shape[0] == 2 * after.shape[1]
    return {"mlp": "swiglu" if gated else "gelu", "mlp_ratio": mlp_ratio(after.shape[1], width)}


def _heads(tensors: Mapping[str, Tensor], width: int, assumed: list[str]) -> int:
    if "blocks.0.attn.q_norm.weight" in tensors:
        return width // need(tensors, "blocks.0.attn.q_norm.weight", 1).shape[0]
    if width not in HEADS_OF_WIDTH:
        raise ConfigError(
            f"The weights do not tell how many heads a ViT of width {width} has. "
            f"Give it: heads=… (model.heads=… for train.py and eval.py)."
        )
    heads = HEADS_OF_WIDTH[width]
    assumed.append(f"heads={heads}: as in published ViTs of width {width}")
    return heads
