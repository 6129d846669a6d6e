"""timm's layout (0.9 and later), from which this project's own differs in a few names, and what
files in it leave open.

`VisionTransformer`, `Eva`, `Beit` and `NaFlexVit` share most names; what only some of them have is
in tables of its own. Much else that is published for ViT has timm's names too; see meta.py.

Settings that a file without a config.json does not show are those of the family with exactly such
tensors. Where the architecture is known, `timm_models.py` reads everything off timm's own
definition and nothing here is asked.
"""

import math
from collections.abc import Mapping

from einops import rearrange
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import (
    BUFFERS,
    IMAGENET,
    Asked,
    Change,
    Converted,
    NameTable,
    Rule,
    Usual,
    gated_mlp,
    same,
    split_qkv,
    within,
)

BLOCK = (
    *("norm1.*", "attn.qkv.*", "attn.q_norm.*", "attn.k_norm.*", "attn.norm.*", "attn.proj.*"),
    *("ls1.gamma", "norm2.*", "mlp.fc1.*", "mlp.norm.*", "mlp.fc2.*", "ls2.gamma"),
)
PREPROCESS = {
    "mean": "mean",
    "std": "std",
    "interpolation": "interpolation",
    "crop_pct": "crop_ratio",
}
"""Values of the preprocessing there and here."""
POOLS = {"token": "class_token", "avg": "mean", "map": "attention"}
"""Kinds of pooling there and here."""
ROTATIONS = {"axial": (100.0, "xy"), "eva": (10_000.0, "ij"), "pe": (10_000.0, "xy")}
"""Temperature and order of the axes of rotations by the numbers of cells."""
POOLING = ("latent", "q.*", "kv.*", "proj.*", "norm.*", "mlp.fc1.*", "mlp.fc2.*")
VIT = (
    *same("patch_embed.proj.*", "cls_token", "dist_token", "reg_token", "norm_pre.*", "norm.*"),
    Rule("positions.table", "pos_embed"),
    *within("blocks.{i}", "blocks.{i}", BLOCK),
    *within("pooling", "attn_pool", POOLING),
    Rule("representation.*", "pre_logits.fc.*"),  # until 0.6; a tanh follows
    Rule("representation.*", "head.pre_logits.fc.*"),
    *same("head.*", "head_dist.*"),
)
NORM_AFTER_POOL = Rule("norm.*", "fc_norm.*")
LAYER_SCALE = within("blocks.{i}", "blocks.{i}", {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"})
"""As Eva, Beit and the original DeiT name it."""
SPLIT_GATE = Rule("blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.{fc1_g|fc1_x}.*")
EVA = (
    *LAYER_SCALE,
    *same("blocks.{i}.attn.q_bias", "blocks.{i}.attn.v_bias"),
    Rule("blocks.{i}.relative.table", "blocks.{i}.attn.relative_position_bias_table"),
    Rule("relative.table", "rel_pos_bias.relative_position_bias_table"),
    Rule("rotary.frequencies", "rope.freqs"),
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
FLAT_GRID = Change(
    lambda table: rearrange(table, "one y x c -> one (y x) c"),
    lambda table: rearrange(table, "one (y x) c -> one y x c", y=round(table.shape[1] ** 0.5)),
)
NAFLEX = (
    Rule("cls_token", "embeds.cls_token"),
    Rule("reg_token", "embeds.reg_token"),
    Rule("positions.table", "embeds.pos_embed", FLAT_GRID),
    Rule("patch_embed.proj.*", "embeds.proj.*"),
)
"""Square grids and patches only: the tensors of a NaFlexVit do not show any other."""
ATTENTION_POOL = (
    "Tensors do not show whether the attention pooling of timm's VisionTransformer sees the class "
    "token. If it does, and no registers (pool_include_prefix=True), give model.pool=attention; "
    "else use it as a baseline: model=timm model.name=… (timm's name)."
)
EVA02: dict[str, object] = {"rotary": "eva", "rotary_grid": 16}
"""Rotation of EVA-02, scaled to the cells along the grid of its pretraining."""
STAGE_BLOCK = "layers.{s}.blocks.{b}"
SWIN_BLOCK = (
    *("norm1.*", "attn.qkv.*", "attn.q_bias", "attn.v_bias", "attn.logit_scale"),
    *("attn.cpb_mlp.{j}.*", "attn.relative_position_bias_table", "attn.proj.*"),
    *("norm2.*", "mlp.fc1.*", "mlp.fc2.*"),
)
"""The parts of a block of either Swin, which most projects name alike."""
SWIN = (
    Rule("patch_norm.*", "patch_embed.norm.*"),
    *within(STAGE_BLOCK, STAGE_BLOCK, SWIN_BLOCK),
    # A stage starts with its merging, as here.
    *same("layers.{s}.downsample.norm.*", "layers.{s}.downsample.reduction.*"),
    *same("patch_embed.proj.*", "norm.*"),
    Rule("head.*", "head.fc.*"),
)
OFFICIAL_SWIN = (
    *same("patch_embed.proj.*", "absolute_pos_embed", "norm.*", "head.*"),
    Rule("patch_norm.*", "patch_embed.norm.*"),
    *within(STAGE_BLOCK, STAGE_BLOCK, SWIN_BLOCK),
    *within("layers.{s}.downsample", "layers.{s-1}.downsample", ("norm.*", "reduction.*")),
)
"""The official Swin and Swin V2 code, and timm until 0.6: a merging belongs to the end of the stage
before it.
"""
swin_to_ours = NameTable(SWIN, BUFFERS)
official_to_ours = NameTable(
    OFFICIAL_SWIN, BUFFERS, IMAGENET | {"interpolation": "bicubic", "crop_ratio": 0.875}
)


def vit_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A ViT as timm stores it; a last norm after the pooling has another name there."""
    keys = "blocks.0.attn.k_proj.bias" in tensors
    split = split_qkv("blocks.{i}.attn", PROJECTIONS, keys)
    table = (*VIT, NORM_AFTER_POOL, *EVA, *split, SPLIT_GATE, *NAFLEX)
    result = rules.to_ours(table, BUFFERS, tensors)
    _refuse_other_norms(tensors)
    _unflatten_patches(result)
    if "fc_norm.weight" in tensors:
        result.facts |= {"pool_norm": "after", "pool": "mean"}
    if (
        "attn_pool.latent" in tensors
        and "cls_token" in tensors
        and "norm_pre.weight" not in tensors
    ):
        result.asked["pool"] = Asked(ATTENTION_POOL, ("attention",))
    result.usual = _usual_settings(
        result.tensors,
        layer_scale="blocks.0.gamma_1" in tensors,
        naflex="embeds.proj.weight" in tensors,
    )
    return result


def _refuse_other_norms(tensors: Mapping[str, Tensor]) -> None:
    stem, block = "patch_embed.norm.weight", "blocks.0.norm1.weight"
    biased = "blocks.0.norm1.bias" in tensors
    name = stem if stem in tensors else block if block in tensors and not biased else None
    if name is not None:
        raise CheckpointError(
            f"'{name}' has no counterpart in a ViT of this project: a norm in the stem, or an "
            f"RMSNorm. timm runs the model as a baseline: model=timm model.name=… (timm's name)."
        )


def square_patch(numbers: int) -> tuple[int, int]:
    """Side and channels of a square patch that is stored as a vector: three channels, or else the
    most usual number that fits.
    """
    for channels in (3, 1, 4, 2):
        side = math.isqrt(numbers // channels)
        if side * side * channels == numbers:
            return side, channels
    raise CheckpointError(
        f"A patch has {numbers} numbers, which are not a square patch of one to four channels. "
        f"Store the weights of the projection as those of a convolution instead, and see rename."
    )


def _unflatten_patches(result: Converted) -> None:
    """NaFlexVit's linear map of square patches, whose channels come last, as a convolution."""
    name = "patch_embed.proj.weight"
    weight = result.tensors.get(name)
    if weight is None or weight.ndim != 2:
        return
    side, _ = square_patch(weight.shape[1])
    pattern = "c (y x channels) -> c channels y x"
    result.tensors[name] = rearrange(weight, pattern, y=side, x=side).contiguous()
    result.changed[name] = "laid out anew"


def _usual_settings(
    tensors: Mapping[str, Tensor], layer_scale: bool, naflex: bool
) -> dict[str, Usual]:
    """Settings of the family that has such tensors; `layer_scale`: it is named as in timm's Eva;
    `naflex`: the names are those of a NaFlexVit.
    """
    if "patch_embed.proj.weight" not in tensors or "rotary.frequencies" in tensors:
        return {}
    relative = "relative.table" in tensors or "blocks.0.relative.table" in tensors
    if "positions.table" not in tensors:
        return _without_table(tensors) if layer_scale and not relative else {}
    return _with_table(tensors, naflex)


def _as_in(family: str, **settings: object) -> dict[str, Usual]:
    reason = f"as in {family}, which has such tensors"
    return {name: Usual(value, reason) for name, value in settings.items()}


def _without_table(tensors: Mapping[str, Tensor]) -> dict[str, Usual]:
    if "reg_token" in tensors and "cls_token" in tensors:
        width = tensors["patch_embed.proj.weight"].shape[0]
        heads = 32 if width == 4096 else width // 64
        settings = {"positions": "rotary", "rotary": "dinov3", "norm_eps": 1e-5}
        return _as_in("DINOv3", **settings, **({"heads": heads} if heads else {}), pool="mean")
    if "reg_token" in tensors:
        return _as_in("timm's vit_*_rope_reg*_gap", positions="rotary", **EVA02)
    if "cls_token" in tensors and "blocks.0.attn.qkv.bias" in tensors:
        return _as_in("RoPE-ViT (vit_*_rope)", positions="rotary", rotary="axial")
    return {}


def _with_table(tensors: Mapping[str, Tensor], naflex: bool) -> dict[str, Usual]:
    width, pooled = tensors["patch_embed.proj.weight"].shape[0], "pooling.latent" in tensors
    if "norm_pre.weight" in tensors:
        return _clip(tensors, width, pooled)
    qv = "blocks.0.attn.q_bias" in tensors
    if qv and gated_mlp(tensors):
        return _as_in("EVA-02", positions="learned_rotary", **EVA02)
    if qv and width == 1792:
        return _as_in("EVA-02-CLIP-E", block_norm="after", heads=16)
    if "blocks.0.attn.norm.weight" in tensors and not qv:
        return _as_in("BEiT-3", norm_eps=1e-5)
    tokens = "cls_token" in tensors or "reg_token" in tensors
    scaled = "blocks.0.ls1.gamma" in tensors
    plain = "blocks.0.attn.qkv.bias" in tensors and "norm.weight" in tensors
    if plain and not tokens and not scaled:
        return _siglip(tensors, width, pooled, naflex)
    return {}


def _clip(tensors: Mapping[str, Tensor], width: int, pooled: bool) -> dict[str, Usual]:
    """CLIP and, with its stem but more around it, Perception Encoder."""
    if not pooled and "norm.weight" in tensors:
        return _as_in("CLIP", norm_eps=1e-5, activation="gelu")
    cells = tensors["positions.table"].shape[1] - int("cls_token" in tensors)
    settings: dict[str, object] = {"pool": "attention" if pooled else "mean"}
    settings |= {"pool_heads": 8} if pooled else {}
    settings |= {"heads": 16} if width == 1536 else {}
    turned = {"positions": "learned_rotary", "rotary": "pe", "rotary_grid": math.isqrt(cells)}
    return _as_in("Perception Encoder", **turned, norm_eps=1e-5, **settings)


def _siglip(
    tensors: Mapping[str, Tensor], width: int, pooled: bool, naflex: bool
) -> dict[str, Usual]:
    """SigLIP and SigLIP 2. timm runs the first with the exact GELU, the second as it was trained;
    some sizes exist in the second only.
    """
    patch = tensors["patch_embed.proj.weight"].shape[-1]
    side = math.isqrt(tensors["positions.table"].shape[1])
    second = {(768, 32, 8), (1024, 16, 32), (1152, 16, side), (1536, 16, side)}
    if naflex or (width, patch, side) in second:
        heads = {"heads": 16} if width == 1536 else {}
        return _as_in("SigLIP 2", activation="gelu_tanh", **heads)
    return _as_in("SigLIP", activation="gelu") if pooled else {}
