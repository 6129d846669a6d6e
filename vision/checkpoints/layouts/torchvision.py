"""torchvision's layout of ViT, Swin and Swin V2.

Stages and mergings of a Swin are numbered in one row: `features.1` is the first stage, `features.2`
the merging after it. V2 stores a bias for queries, keys and values, whose middle third it sets to
zero whenever it runs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import BUFFERS, IMAGENET, Converted, Rule

VIT = (
    Rule("cls_token", "class_token"),
    Rule("positions.table", "encoder.pos_embedding"),
    Rule("patch_embed.proj.*", "conv_proj.*"),
    Rule("blocks.{i}.norm1.*", "encoder.layers.encoder_layer_{i}.ln_1.*"),
    Rule("blocks.{i}.attn.qkv.*", "encoder.layers.encoder_layer_{i}.self_attention.in_proj_*"),
    Rule("blocks.{i}.attn.proj.*", "encoder.layers.encoder_layer_{i}.self_attention.out_proj.*"),
    Rule("blocks.{i}.norm2.*", "encoder.layers.encoder_layer_{i}.ln_2.*"),
    Rule("blocks.{i}.mlp.fc1.*", "encoder.layers.encoder_layer_{i}.mlp.0.*"),
    Rule("blocks.{i}.mlp.fc2.*", "encoder.layers.encoder_layer_{i}.mlp.3.*"),
    Rule("norm.*", "encoder.ln.*"),
    Rule("representation.*", "heads.pre_logits.*"),  # a tanh follows
    Rule("head.*", "heads.head.*"),
)
VIT_OLD = (
    Rule("blocks.{i}.mlp.fc1.*", "encoder.layers.encoder_layer_{i}.mlp.linear_1.*"),
    Rule("blocks.{i}.mlp.fc2.*", "encoder.layers.encoder_layer_{i}.mlp.linear_2.*"),
)
"""Names of the first versions."""
SWIN = (
    Rule("patch_embed.proj.*", "features.0.0.*"),
    Rule("patch_norm.*", "features.0.2.*"),
    Rule("layers.{s}.blocks.{b}.norm1.*", "features.{2s+1}.{b}.norm1.*"),
    Rule("layers.{s}.blocks.{b}.attn.qkv.*", "features.{2s+1}.{b}.attn.qkv.*"),
    Rule("layers.{s}.blocks.{b}.attn.logit_scale", "features.{2s+1}.{b}.attn.logit_scale"),
    Rule("layers.{s}.blocks.{b}.attn.cpb_mlp.{j}.*", "features.{2s+1}.{b}.attn.cpb_mlp.{j}.*"),
    Rule(
        "layers.{s}.blocks.{b}.attn.relative_position_bias_table",
        "features.{2s+1}.{b}.attn.relative_position_bias_table",
    ),
    Rule("layers.{s}.blocks.{b}.attn.proj.*", "features.{2s+1}.{b}.attn.proj.*"),
    Rule("layers.{s}.blocks.{b}.norm2.*", "features.{2s+1}.{b}.norm2.*"),
    Rule("layers.{s}.blocks.{b}.mlp.fc1.*", "features.{2s+1}.{b}.mlp.0.*"),
    Rule("layers.{s}.blocks.{b}.mlp.fc2.*", "features.{2s+1}.{b}.mlp.3.*"),
    Rule("layers.{s}.downsample.norm.*", "features.{2s}.norm.*"),
    Rule("layers.{s}.downsample.reduction.*", "features.{2s}.reduction.*"),
    Rule("norm.*", "norm.*"),
    Rule("head.*", "head.*"),
)


def vit_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A ViT, also of torchvision's first versions."""
    result = rules.to_ours((*VIT, *VIT_OLD), (), tensors)
    result.preprocess |= IMAGENET
    return result


def swin_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A Swin of either version."""
    result = rules.to_ours(SWIN, BUFFERS, tensors)
    for name in [n for n in result.tensors if n.endswith(".attn.logit_scale")]:
        place = name.removesuffix("logit_scale")
        bias = result.tensors.pop(f"{place}qkv.bias", None)
        if bias is not None:
            queries, _, values = bias.chunk(3)
            result.tensors |= {f"{place}q_bias": queries, f"{place}v_bias": values}
            result.changed |= dict.fromkeys(
                (f"{place}q_bias", f"{place}v_bias"), "a third of qkv.bias"
            )
    result.preprocess |= IMAGENET | {"interpolation": "bicubic"}
    return result


def vit_from_ours(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our ViT with torchvision's names."""
    return rules.from_ours(VIT, tensors)


def swin_from_ours(
    tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Our Swin of either version with torchvision's names; `buffers` have our names."""
    own = dict(tensors)
    for name in [n for n in own if n.endswith(".attn.q_bias")]:
        place = name.removesuffix("q_bias")
        queries, values = own.pop(name), own.pop(f"{place}v_bias")
        own[f"{place}qkv.bias"] = torch.cat([queries, torch.zeros_like(queries), values])
    result = rules.from_ours(SWIN, own)
    place_of = Rule(
        "layers.{s}.blocks.{b}.attn.relative_position_index",
        "features.{2s+1}.{b}.attn.relative_position_index",
    )
    table_of = Rule(
        "layers.{s}.blocks.{b}.attn.relative_coords_table",
        "features.{2s+1}.{b}.attn.relative_coords_table",
    )
    return result | rules.from_ours((place_of, table_of), buffers)
