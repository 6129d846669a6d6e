"""Settings of our ViT, read off timm's VisionTransformer, Eva, Beit and NaFlexVit."""

from typing import Any

from timm.layers import (  # type: ignore[attr-defined]
    Attention,
    AttentionPoolLatent,
    AttentionRope,
    GluMlp,
    LayerScale,
    Mlp,
    PatchEmbed,
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    SwiGLU,
)
from timm.models import beit
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import nn

from vision.checkpoints.layouts.rules import mlp_ratio
from vision.checkpoints.layouts.timm.timm_models import (
    Described,
    activation,
    norm_eps,
    normed,
    patch_size,
    require,
    same,
    unlike,
)
from vision.checkpoints.layouts.timm.timm_names import POOLS, ROTATIONS
from vision.config import square

MODELS = (VisionTransformer, VisionTransformerDistilled, Eva, Beit, NaFlexVit)
BLOCKS = {
    Block: "before",
    EvaBlock: "before",
    beit.Block: "before",
    ResPostBlock: "after",
    EvaBlockPostNorm: "after",
}
"""Where a block has its norms."""
ATTENTIONS = (Attention, AttentionRope, EvaAttention, beit.Attention)


def vit(model: Any) -> Described:
    """Settings of one of timm's ViTs, all that change its function."""
    require(type(model) in MODELS, f"it is a {type(model).__name__}")
    blocks = same([_block(b, model) for b in model.blocks], "its blocks differ from each other")
    settings = {
        "kind": "vit",
        "depth": len(model.blocks),
        "norm_eps": norm_eps(model),
        "embedding_norm": hasattr(model, "norm_pre") and normed(model.norm_pre),
        "initialization": "trunc_normal",
        **_stem(model),
        **_tokens(model),
        **_positions(model),
        **blocks,
        **_pooling(model, blocks),
    }
    return Described(settings, tuple(_notes(model)))


def _stem(model: Any) -> dict[str, Any]:
    if isinstance(model, NaFlexVit):
        stem, size = model.embeds, model.embeds.patch_size
        require(stem.norm_input is None and not normed(stem.norm), "its stem has norms")
        require(not stem.is_linear or stem.channels_last, "its patches have their channels first")
        require(not stem.is_linear or size[0] == size[1], "its patches are not square")
        size = square(size) if stem.is_linear else patch_size(stem, stem.proj)
    else:
        stem = model.patch_embed
        require(type(stem) is PatchEmbed, f"its stem is a {type(stem).__name__}")
        require(not normed(stem.norm), "its stem has a norm")
        size = patch_size(stem, stem.proj)
    kind = "patch_no_bias" if stem.proj.bias is None else "patch"
    return {"patch_size": size, "stem": kind, "width": model.embed_dim}


def _tokens(model: Any) -> dict[str, Any]:
    place = model.embeds if isinstance(model, NaFlexVit) else model
    registers = getattr(place, "reg_token", None)
    return {
        "class_token": place.cls_token is not None,
        "registers": 0 if registers is None else registers.shape[1],
        "distillation_token": isinstance(model, VisionTransformerDistilled),
    }


def _positions(model: Any) -> dict[str, Any]:
    if isinstance(model, NaFlexVit):
        table, rows = model.embeds.pos_embed, 0
        learned = model.embeds.pos_embed_type in ("learned", "none")
        require(learned, f"its positions are {model.embeds.pos_embed_type}")
    else:
        table = model.pos_embed
        rows = 0 if table is None else table.shape[1] - model.patch_embed.num_patches
    rope = getattr(model, "rope", None)
    if rope is None:
        added = "none" if table is None else "learned"
        turned = {"rotary": "axial", "rotary_grid": None, "rotary_jitter": [0.0, 1.0, 1.0]}
    else:
        added = "rotary" if table is None else "learned_rotary"
        turned = _rotation(model, rope)
    own = [getattr(b.attn, "relative_position_bias_table", None) is not None for b in model.blocks]
    shared = getattr(model, "rel_pos_bias", None) is not None
    require(not (shared and any(own)), "it has relative biases of each block and shared ones")
    return {
        "positions": added,
        "class_token_position": rows > 0,
        "relative_bias": "shared" if shared else "block" if any(own) else "none",
        **turned,
    }


def _rotation(model: Any, rope: Any) -> dict[str, Any]:
    """Our name of the angles, by everything that they depend on."""
    halves = same([bool(b.attn.rotate_half) for b in model.blocks], "its rotations differ")
    prefix = same([b.attn.num_prefix_tokens for b in model.blocks], "its rotations differ")
    require(prefix == model.num_prefix_tokens, "its rotation includes tokens before the patches")
    settings = {"rotary_grid": None, "rotary_jitter": [0.0, 1.0, 1.0]}
    match rope:
        case RotaryEmbeddingDinoV3():
            return settings | _centred(rope, halves)
        case RotaryEmbeddingMixed():
            require(rope.grid_indexing == "xy" and not halves, "its rotation is not RoPE-ViT's")
            return settings | {"rotary": "mixed"}
        case RotaryEmbeddingCat():
            plain = not (halves or rope.rotate_half or rope.in_pixels or rope.linear_bands)
            require(plain, "its rotation pairs channels or counts pixels in another way")
            return settings | _axial(model, rope)
    return unlike(f"its rotation is a {type(rope).__name__}")


def _centred(rope: Any, halves: bool) -> dict[str, Any]:
    plain = rope.rotate_half and halves and rope.normalize_coords == "separate"
    periods = rope.temperature == 100 and rope.min_period is None and rope.max_period is None
    require(plain and periods and not rope.grid_offset, "its rotation is not DINOv3's")
    stretch, rescale = rope.jitter_coords or 1.0, rope.rescale_coords or 1.0
    return {"rotary": "dinov3", "rotary_jitter": [rope.shift_coords or 0.0, stretch, rescale]}


def _axial(model: Any, rope: Any) -> dict[str, Any]:
    """Angles of cells along each axis: temperature, order of the axes and number of the first."""
    reference = None if rope.ref_feat_shape is None else square(rope.ref_feat_shape)
    found = (rope.temperature, rope.grid_indexing)
    kind = next((name for name, angles in ROTATIONS.items() if angles == found), None)
    first = int(kind == "pe" and _tokens(model)["class_token"])
    if kind is None or rope.grid_offset != first or (kind == "axial" and reference is not None):
        unlike(f"its rotation has the temperature, order and offset {(*found, rope.grid_offset)}")
    return {"rotary": kind, "rotary_grid": reference}


def _block(block: Any, model: Any) -> dict[str, Any]:
    """Settings of a block; `model` knows the width."""
    kind = type(block)
    require(kind in BLOCKS, f"its blocks are {kind.__name__}")
    require(normed(block.norm1) and normed(block.norm2), "its blocks lack norms")
    scales = [_scaled(block, branch) for branch in (1, 2)]
    require(scales[0] == scales[1], "layer scale is on one branch of its blocks only")
    return {
        "block_norm": BLOCKS[kind],
        "layer_scale": 1e-5 if scales[0] else None,
        **_attention(block.attn, model.embed_dim),
        **_mlp(block.mlp, model.embed_dim),
    }


def _scaled(block: Any, branch: int) -> bool:
    scale = getattr(block, f"ls{branch}", None)
    if scale is None or type(scale) is nn.Identity:
        return getattr(block, f"gamma_{branch}", None) is not None
    require(type(scale) is LayerScale, f"its scales are {type(scale).__name__}")
    return True


def _attention(attn: Any, width: int) -> dict[str, Any]:
    kind = type(attn)
    require(kind in ATTENTIONS, f"its attention is {kind.__name__}")
    require(getattr(attn, "gate", None) is None, "its attention is gated")
    heads = attn.num_heads
    require(getattr(attn, "num_kv_heads", heads) == heads, "its queries share keys and values")
    require(attn.proj.bias is not None, "its attention lacks a bias behind the values")
    inner = attn.proj.in_features
    require(attn.scale == (inner // heads) ** -0.5, "its attention is scaled otherwise")
    norms = [normed(getattr(attn, n, nn.Identity())) for n in ("q_norm", "k_norm")]
    return {
        "heads": heads,
        "head_width": None if inner == width else inner // heads,
        "qkv_bias": _qkv_bias(attn),
        "qk_norm": same(norms, "it norms queries or keys alone"),
        "attention_norm": normed(getattr(attn, "norm", nn.Identity())),
    }


def _qkv_bias(attn: Any) -> str:
    if attn.qkv is None:
        biases = [layer.bias is not None for layer in (attn.q_proj, attn.k_proj, attn.v_proj)]
    elif attn.qkv.bias is not None:
        biases = [True, True, True]
    else:  # k_bias is a buffer of zeros
        queries, values = (getattr(attn, f"{n}_bias", None) is not None for n in ("q", "v"))
        biases = [queries, False, values]
    match biases:
        case [True, True, True]:
            return "qkv"
        case [True, False, True]:
            return "qv"
        case [False, False, False]:
            return "none"
    return unlike(f"of queries, keys and values {biases} have a bias")


def _mlp(mlp: Any, width: int) -> dict[str, Any]:
    require(type(mlp) in (Mlp, GluMlp, SwiGLU), f"its MLP is a {type(mlp).__name__}")
    layers = [m for m in mlp.modules() if isinstance(m, nn.Linear)]
    biased = all(layer.bias is not None for layer in layers)
    require(biased and bool(layers), "its MLPs lack biases or are convolutions")
    require(not getattr(mlp, "gate_last", False), "its MLPs have the gate last")
    return {
        "mlp": "plain" if type(mlp) is Mlp else "gated",
        "activation": activation(mlp.act),
        "mlp_norm": normed(mlp.norm),
        "mlp_ratio": mlp_ratio(mlp.fc2.in_features, width),
    }


def _pooling(model: Any, blocks: dict[str, Any]) -> dict[str, Any]:
    kind = POOLS.get(model.global_pool)
    if kind is None:
        unlike(f"its pooling is '{model.global_pool}'")
    before, after = normed(model.norm), normed(model.fc_norm)
    require(not (before and after), "it has a norm before and one after the pooling")
    prefix, included = model.num_prefix_tokens, getattr(model, "pool_include_prefix", False)
    require(kind != "mean" or not (prefix and included), "it pools the tokens before the patches")
    settings = {
        "pool": kind,
        "pool_norm": "after" if after else "before" if before else "none",
        "pool_heads": None,
        "pool_mlp_ratio": None,
    }
    pool = getattr(model, "attn_pool", None)
    require((pool is not None) == (kind == "attention"), "it pools in two ways")
    if pool is None:
        return settings
    tokens = _tokens(model)
    if isinstance(model, Eva) or included:
        require(not tokens["registers"], "its attention pooling sees registers")
    else:
        require(not tokens["class_token"], "its attention pooling leaves out the class token")
    require(not after, "it has a norm after its attention pooling")
    return settings | _attention_pool(pool, model.embed_dim, blocks)


def _attention_pool(pool: Any, width: int, blocks: dict[str, Any]) -> dict[str, Any]:
    require(type(pool) is AttentionPoolLatent, f"its pooling is a {type(pool).__name__}")
    linear = [pool.q, pool.kv, pool.proj]
    plain = all(isinstance(layer, nn.Linear) and layer.bias is not None for layer in linear)
    plain &= pool.latent_len == 1 and pool.latent_dim == width and pool.pool == "token"
    plain &= pool.pos_embed is None and pool.out_features == width and pool.mlp is not None
    require(plain and normed(pool.norm), "its attention pooling has other parts")
    require(not normed(pool.q_norm) and not normed(pool.k_norm), "its pooling norms queries")
    mlp = _mlp(pool.mlp, width)
    alike = mlp["mlp"] == "plain" and not mlp["mlp_norm"]
    alike &= mlp["activation"] == blocks["activation"]
    require(alike, "the MLP of its pooling has another activation than its blocks")
    return {"pool_heads": pool.num_heads, "pool_mlp_ratio": mlp["mlp_ratio"]}


def _notes(model: Any) -> list[str]:
    """What differs away from the size in training."""
    if not isinstance(model, NaFlexVit) or model.embeds.pos_embed is None:
        return []
    notes = []
    if model.embeds.pos_embed_interp_mode != "bicubic":
        mode = model.embeds.pos_embed_interp_mode
        notes.append(f"timm resizes the positions of this NaFlexVit by {mode} interpolation.")
    if model.embeds.pos_embed_ar_preserving:
        notes.append("timm keeps the aspect ratio when it resizes positions of this NaFlexVit.")
    return notes
