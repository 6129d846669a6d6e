"""timm's layout (0.9 and later), from which this project's own differs in a few names.

Much else that is published for ViT has timm's names too; see deit.py, dino.py and mae.py.
"""

from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.formats import rules
from vision.checkpoints.formats.rules import BUFFERS, Converted, Ignored, Rule

BLOCK = (
    Rule("blocks.{i}.norm1.*", "blocks.{i}.norm1.*"),
    Rule("blocks.{i}.attn.qkv.*", "blocks.{i}.attn.qkv.*"),
    Rule("blocks.{i}.attn.q_norm.*", "blocks.{i}.attn.q_norm.*"),
    Rule("blocks.{i}.attn.k_norm.*", "blocks.{i}.attn.k_norm.*"),
    Rule("blocks.{i}.attn.proj.*", "blocks.{i}.attn.proj.*"),
    Rule("blocks.{i}.ls1.gamma", "blocks.{i}.ls1.gamma"),
    Rule("blocks.{i}.norm2.*", "blocks.{i}.norm2.*"),
    Rule("blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.fc1.*"),
    Rule("blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.fc2.*"),
    Rule("blocks.{i}.ls2.gamma", "blocks.{i}.ls2.gamma"),
)
VIT = (
    Rule("patch_embed.proj.*", "patch_embed.proj.*"),
    Rule("cls_token", "cls_token"),
    Rule("dist_token", "dist_token"),
    Rule("reg_token", "reg_token"),
    Rule("positions.table", "pos_embed"),
    *BLOCK,
    Rule("norm.*", "norm.*"),
    Rule("head.*", "head.*"),
    Rule("head_dist.*", "head_dist.*"),
)
NORM_AFTER_POOL = Rule("norm.*", "fc_norm.*")
VIT_IGNORED = (
    Ignored(r"pre_logits\..*", "a hidden layer of pretraining, not used by fine-tuned heads"),
)
SWIN_BLOCK = (
    Rule("layers.{s}.blocks.{b}.norm1.*", "layers.{s}.blocks.{b}.norm1.*"),
    Rule("layers.{s}.blocks.{b}.attn.qkv.*", "layers.{s}.blocks.{b}.attn.qkv.*"),
    Rule("layers.{s}.blocks.{b}.attn.q_bias", "layers.{s}.blocks.{b}.attn.q_bias"),
    Rule("layers.{s}.blocks.{b}.attn.v_bias", "layers.{s}.blocks.{b}.attn.v_bias"),
    Rule("layers.{s}.blocks.{b}.attn.logit_scale", "layers.{s}.blocks.{b}.attn.logit_scale"),
    Rule("layers.{s}.blocks.{b}.attn.cpb_mlp.{j}.*", "layers.{s}.blocks.{b}.attn.cpb_mlp.{j}.*"),
    Rule(
        "layers.{s}.blocks.{b}.attn.relative_position_bias_table",
        "layers.{s}.blocks.{b}.attn.relative_position_bias_table",
    ),
    Rule("layers.{s}.blocks.{b}.attn.proj.*", "layers.{s}.blocks.{b}.attn.proj.*"),
    Rule("layers.{s}.blocks.{b}.norm2.*", "layers.{s}.blocks.{b}.norm2.*"),
    Rule("layers.{s}.blocks.{b}.mlp.fc1.*", "layers.{s}.blocks.{b}.mlp.fc1.*"),
    Rule("layers.{s}.blocks.{b}.mlp.fc2.*", "layers.{s}.blocks.{b}.mlp.fc2.*"),
)
SWIN = (
    Rule("patch_embed.proj.*", "patch_embed.proj.*"),
    Rule("patch_norm.*", "patch_embed.norm.*"),
    *SWIN_BLOCK,
    # A stage starts with its merging, as here. Until 0.6 a stage ended with it: official.py.
    Rule("layers.{s}.downsample.norm.*", "layers.{s}.downsample.norm.*"),
    Rule("layers.{s}.downsample.reduction.*", "layers.{s}.downsample.reduction.*"),
    Rule("norm.*", "norm.*"),
    Rule("head.*", "head.fc.*"),
)


def vit_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A ViT as timm stores it; a last norm after the pooling has another name there."""
    result = rules.to_ours((*VIT, NORM_AFTER_POOL), VIT_IGNORED, tensors)
    if "fc_norm.weight" in tensors:
        result.facts |= {"pool_norm": "after", "pool": "mean"}
    return result


def swin_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A Swin of either version as timm stores it since 0.9."""
    return rules.to_ours(SWIN, BUFFERS, tensors)


def vit_from_ours(tensors: Mapping[str, Tensor], norm_after_pool: bool) -> dict[str, Tensor]:
    """Our ViT with timm's names."""
    if norm_after_pool:
        return rules.from_ours((NORM_AFTER_POOL, *VIT), tensors)
    return rules.from_ours(VIT, tensors)


def swin_from_ours(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our Swin of either version with timm's names."""
    return rules.from_ours(SWIN, tensors)
