"""Architectures of timm that may compute what a ViT of this project does, with their arguments.

timm drops arguments that are None, so each class is reached through architectures that set nothing
beyond what is replaced here; 0.0 turns layer scale off where a class allows it. Whether a candidate
is the same model is asked of timm's own definition: see `timm_models.describe`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vision.checkpoints.layouts.rules import Rule
from vision.checkpoints.layouts.timm.timm_names import EVA, POOLS, ROTATIONS, SPLIT_GATE
from vision.config import pair
from vision.models.configs import ViTConfig
from vision.models.layers import Grid

EVAS = ("eva_giant_patch14_224", "vit_base_patch16_dinov3", "vit_pe_core_base_patch16_224")
"""Architectures without settings of their own; the first has an eps of 1e-6, the others of 1e-5."""


class Candidate(NamedTuple):
    """An architecture with arguments, and the names that its class alone has."""

    architecture: str
    arguments: dict[str, Any]
    rules: tuple[Rule, ...] = ()


def candidates(config: ViTConfig, image_size: Grid) -> Iterator[Candidate]:
    """timm's classes from the most to the least usual."""
    shared = {
        "img_size": list(image_size),
        "patch_size": list(pair(config.patch_size)),
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "global_pool": next(theirs for theirs, ours in POOLS.items() if ours == config.pool),
    }
    if config.relative_bias != "none":
        yield _beit(config, shared)
        return
    if config.distillation_token:
        arguments = {
            "init_values": config.layer_scale or 0.0,
            "mlp_ratio": config.mlp_ratio,
            "act_layer": config.activation,
            "qk_norm": config.qk_norm,
        }
        yield Candidate("deit_base_distilled_patch16_224", shared | arguments)
        return
    if not config.turns:
        yield _vision_transformer(config, shared)
    yield from _eva(config, shared)


def _vision_transformer(config: ViTConfig, shared: dict[str, Any]) -> Candidate:
    gated = config.mlp == "gated"
    name = "vit_base_patch16_clip_224" if config.norm_eps == 1e-5 else "vit_base_patch16_224"
    arguments = {
        "init_values": config.layer_scale or 0.0,
        "mlp_ratio": config.mlp_ratio * (2 if gated else 1),  # gate and gated together
        "act_layer": config.activation,
        "qkv_bias": config.qkv_bias == "qkv",
        "qk_norm": config.qk_norm,
        "scale_attn_norm": config.attention_norm,
        "scale_mlp_norm": config.mlp_norm,
        "pos_embed": "none" if config.positions == "none" else "learn",
        "class_token": config.class_token,
        "no_embed_class": not class_row(config),
        "reg_tokens": config.registers,
        "pre_norm": config.embedding_norm,
        "final_norm": config.pool_norm != "none",
        "fc_norm": normed_after(config),
    }
    return Candidate("vit_giant_patch14_dinov2" if gated else name, shared | arguments)


def _eva(config: ViTConfig, shared: dict[str, Any]) -> Iterator[Candidate]:
    gated = config.mlp == "gated"
    arguments = {
        "mlp_ratio": config.mlp_ratio,
        # Of its two kinds of attention one has a bias of keys, the other has none.
        "attn_type": "rope" if config.qkv_bias == "qkv" else "eva",
        "qkv_bias": config.qkv_bias != "none",
        "qkv_fused": True,
        "qk_norm": config.qk_norm,
        "scale_attn_inner": config.attention_norm,
        "swiglu_mlp": gated,
        "swiglu_align_to": 0,
        "scale_mlp": config.mlp_norm,
        "use_abs_pos_emb": config.positions not in ("rotary", "none"),
        "no_embed_class": not class_row(config),
        "class_token": config.class_token,
        "num_reg_tokens": config.registers,
        "use_post_norm": config.block_norm == "after",
        "use_pre_transformer_norm": config.embedding_norm,
        "use_post_transformer_norm": config.pool_norm != "none" and not normed_after(config),
        "use_fc_norm": normed_after(config),
        "attn_pool_num_heads": config.pool_heads or config.heads,
        "attn_pool_mlp_ratio": config.pool_mlp_ratio or config.mlp_ratio,
        "dynamic_img_size": False,
        **_rotation(config),
    }
    arguments |= {} if config.layer_scale is None else {"init_values": config.layer_scale}
    own = (*EVA, SPLIT_GATE) if gated and config.mlp_norm else EVA
    for name in EVAS:
        yield Candidate(name, shared | arguments, own)


def class_row(config: ViTConfig) -> bool:
    """Whether the table that is written has a row for the class token."""
    learned = config.positions in ("learned", "learned_rotary")
    return learned and config.class_token and config.class_token_position


def normed_after(config: ViTConfig) -> bool:
    """Whether a norm follows the pooling; that of a class token is the same before it is picked."""
    return config.pool_norm == "after" and config.pool == "mean"


def _rotation(config: ViTConfig) -> dict[str, Any]:
    if not config.turns:
        return {"use_rot_pos_emb": False}
    centred, mixed = config.rotary in ("dinov3", "dinov3_hf"), config.rotary == "mixed"
    arguments: dict[str, Any] = {
        "use_rot_pos_emb": True,
        "rope_grid_offset": float(config.rotary == "pe" and config.class_token),
        "rope_rotate_half": centred,
    }
    if centred:
        shift, stretch, rescale = config.rotary_jitter
        arguments |= {"rope_type": "dinov3", "rope_temperature": 100.0}
        arguments |= {"rope_shift_coords": shift} if shift else {}
        arguments |= {"rope_jitter_coords": stretch} if stretch > 1 else {}
        return arguments | ({"rope_rescale_coords": rescale} if rescale > 1 else {})
    temperature, order = (10.0, "xy") if mixed else ROTATIONS[config.rotary]
    arguments |= {"rope_type": "mixed" if mixed else "cat"}
    arguments |= {"rope_temperature": temperature, "rope_grid_indexing": order}
    if config.rotary in ("eva", "pe") and config.rotary_grid is not None:
        arguments["ref_feat_shape"] = list(pair(config.rotary_grid))
    return arguments


def _beit(config: ViTConfig, shared: dict[str, Any]) -> Candidate:
    gated = config.mlp == "gated"
    arguments = {
        "init_values": config.layer_scale or 0.0,
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias == "qv",
        "swiglu_mlp": gated,
        "scale_mlp": config.mlp_norm,
        "use_abs_pos_emb": config.positions != "none",
        "use_rel_pos_bias": config.relative_bias == "block",
        "use_shared_rel_pos_bias": config.relative_bias == "shared",
    }
    own = (*EVA, SPLIT_GATE) if gated else EVA
    return Candidate("beit_base_patch16_224", shared | arguments, own)


def differences(settings: Mapping[str, Any], config: ViTConfig) -> dict[str, str]:
    """The settings of an architecture that are not the config's: what it has instead."""
    wanted, found = _normal(config.model_dump(mode="json")), _normal(dict(settings))
    return {
        name: f"{name}={value} instead of {wanted[name]}"
        for name, value in found.items()
        if value != wanted[name]
    }


def _normal(values: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that make no difference."""
    values["layer_scale"] = values["layer_scale"] is not None
    if values["rotary"] == "dinov3_hf":  # another rounding of the same angles
        values["rotary"] = "dinov3"
    if values["positions"] not in ("learned", "learned_rotary") or not values["class_token"]:
        values["class_token_position"] = False
    if values["positions"] in ("sincos2d", "fourier"):
        values["positions"] = "learned"  # they become a table
    if values["positions"] not in ("rotary", "learned_rotary"):
        values |= {"rotary": None, "rotary_grid": None, "rotary_jitter": None}
    if values["pool"] == "class_token" and values["pool_norm"] == "after":
        values["pool_norm"] = "before"
    own = {"pool_heads": values["heads"], "pool_mlp_ratio": values["mlp_ratio"]}
    for name, usual in own.items():
        values[name] = values[name] or usual if values["pool"] == "attention" else None
    for name in ("patch_size", "rotary_grid"):
        if values[name] is not None:
            size = values[name]
            values[name] = [size, size] if isinstance(size, int) else list(size)
    values.pop("initialization", None)
    return values
