"""Families of ViTs in timm's names: settings that a file without a config.json leaves open.

Tensors under our names in, the family with exactly such tensors out. Where the architecture is
known, `timm_models.py` reads everything off timm's own definition and nothing here is asked.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from vision.checkpoints.layouts.rules import Usual, gated_mlp

EVA02_GRID = 16
"""Cells along the grid of EVA-02's pretraining, to which its rotation is scaled."""


class Family(NamedTuple):
    """Published models, and settings that their tensors do not show."""

    name: str
    settings: dict[str, object]


def usual_settings(
    tensors: Mapping[str, Tensor], layer_scale: bool, naflex: bool
) -> dict[str, Usual]:
    """Settings of the family that has such tensors; `layer_scale`: it is named as in timm's Eva;
    `naflex`: the names are those of a NaFlexVit.
    """
    found = _family(tensors, layer_scale, naflex)
    if found is None:
        return {}
    reason = f"as in {found.name}, which has such tensors"
    return {name: Usual(value, reason) for name, value in found.settings.items()}


def _family(tensors: Mapping[str, Tensor], layer_scale: bool, naflex: bool) -> Family | None:
    if "patch_embed.proj.weight" not in tensors or "rotary.frequencies" in tensors:
        return None
    relative = "relative.table" in tensors or "blocks.0.relative.table" in tensors
    if "positions.table" not in tensors:
        return _without_table(tensors) if layer_scale and not relative else None
    return _with_table(tensors, naflex)


def _without_table(tensors: Mapping[str, Tensor]) -> Family | None:
    turned: dict[str, object] = {"positions": "rotary"}
    if "reg_token" in tensors and "cls_token" in tensors:
        return Family("DINOv3", turned | _dinov3(tensors) | {"pool": "mean"})
    if "reg_token" in tensors:
        angles = {"rotary": "eva", "rotary_grid": EVA02_GRID}
        return Family("timm's vit_*_rope_reg*_gap", turned | angles)
    if "cls_token" in tensors and "blocks.0.attn.qkv.bias" in tensors:
        return Family("RoPE-ViT (vit_*_rope)", turned | {"rotary": "axial"})
    return None


def _dinov3(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    width = tensors["patch_embed.proj.weight"].shape[0]
    heads = 32 if width == 4096 else width // 64
    return {"rotary": "dinov3", "norm_eps": 1e-5} | ({"heads": heads} if heads else {})


def _with_table(tensors: Mapping[str, Tensor], naflex: bool) -> Family | None:
    width, pooled = tensors["patch_embed.proj.weight"].shape[0], "pooling.latent" in tensors
    if "norm_pre.weight" in tensors:
        return _clip(tensors, width, pooled)
    qv = "blocks.0.attn.q_bias" in tensors
    if qv and gated_mlp(tensors):
        angles = {"rotary": "eva", "rotary_grid": EVA02_GRID}
        return Family("EVA-02", {"positions": "learned_rotary"} | angles)
    if qv and width == 1792:
        return Family("EVA-02-CLIP-E", {"block_norm": "after", "heads": 16})
    if "blocks.0.attn.norm.weight" in tensors and not qv:
        return Family("BEiT-3", {"norm_eps": 1e-5})
    tokens = "cls_token" in tensors or "reg_token" in tensors
    scaled = "blocks.0.ls1.gamma" in tensors
    plain = "blocks.0.attn.qkv.bias" in tensors and "norm.weight" in tensors
    if plain and not tokens and not scaled:
        return _siglip(tensors, width, pooled, naflex)
    return None


def _clip(tensors: Mapping[str, Tensor], width: int, pooled: bool) -> Family:
    """CLIP and, with its stem but more around it, Perception Encoder."""
    if not pooled and "norm.weight" in tensors:
        return Family("CLIP", {"norm_eps": 1e-5, "activation": "gelu"})
    cells = tensors["positions.table"].shape[1] - int("cls_token" in tensors)
    settings: dict[str, object] = {
        "positions": "learned_rotary",
        "rotary": "pe",
        "rotary_grid": math.isqrt(cells),
        "norm_eps": 1e-5,
        "pool": "attention" if pooled else "mean",
    }
    settings |= {"pool_heads": 8} if pooled else {}
    settings |= {"heads": 16} if width == 1536 else {}
    return Family("Perception Encoder", settings)


def _siglip(tensors: Mapping[str, Tensor], width: int, pooled: bool, naflex: bool) -> Family | None:
    """SigLIP and SigLIP 2. timm runs the first with the exact GELU, the second as it was trained;
    some sizes exist in the second only.
    """
    patch = tensors["patch_embed.proj.weight"].shape[-1]
    side = math.isqrt(tensors["positions.table"].shape[1])
    second = {(768, 32, 8), (1024, 16, 32), (1152, 16, side), (1536, 16, side)}
    if naflex or (width, patch, side) in second:
        heads: dict[str, object] = {"heads": 16} if width == 1536 else {}
        return Family("SigLIP 2", {"activation": "gelu_tanh", **heads})
    return Family("SigLIP", {"activation": "gelu"}) if pooled else None
