"""timm's layout (0.9 and later), from which this project's own differs in a few names.

`VisionTransformer`, `Eva`, `Beit` and `NaFlexVit` share most names; what only some of them have is
in tables of its own. Much else that is published for ViT has timm's names too; see deit.py,
dino.py, dinov3.py and mae.py.
"""

from collections.abc import Mapping

from einops import rearrange
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import (
    BUFFERS,
    Asked,
    Change,
    Converted,
    NameTable,
    Rule,
    same,
    split_qkv,
    within,
)
from vision.checkpoints.layouts.timm.timm_families import usual_settings

BLOCK = (
    *("norm1.*", "attn.qkv.*", "attn.q_norm.*", "attn.k_norm.*", "attn.norm.*", "attn.proj.*"),
    *("ls1.gamma", "norm2.*", "mlp.fc1.*", "mlp.norm.*", "mlp.fc2.*", "ls2.gamma"),
)
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
    # A stage starts with its merging, as here. Until 0.6 a stage ended with it: official.py.
    *same("layers.{s}.downsample.norm.*", "layers.{s}.downsample.reduction.*"),
    *same("patch_embed.proj.*", "norm.*"),
    Rule("head.*", "head.fc.*"),
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
    result.usual = usual_settings(
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


def _unflatten_patches(result: Converted) -> None:
    """NaFlexVit's linear map of square patches, whose channels come last, as a convolution."""
    name = "patch_embed.proj.weight"
    weight = result.tensors.get(name)
    if weight is None or weight.ndim != 2:
        return
    side, _ = rules.square_patch(weight.shape[1])
    pattern = "c (y x channels) -> c channels y x"
    result.tensors[name] = rearrange(weight, pattern, y=side, x=side).contiguous()
    result.changed[name] = "laid out anew"


swin_to_ours = NameTable(SWIN, BUFFERS)
