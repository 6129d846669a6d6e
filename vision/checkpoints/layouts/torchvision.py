"""torchvision's layout of ViT, Swin and Swin V2.

Stages and mergings of a Swin are numbered in one row: `features.1` is the first stage, `features.2`
the merging after it. V2 stores a bias for queries, keys and values, whose middle third it sets to
zero whenever it runs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from vision.checkpoints.layouts import biases, rules
from vision.checkpoints.layouts.rules import (
    BUFFERS,
    IMAGENET,
    Converted,
    NameTable,
    Rule,
    same,
    within,
)
from vision.checkpoints.layouts.timm.timm_names import STAGE_BLOCK, SWIN_BLOCK

_LAYER = "encoder.layers.encoder_layer_{i}"
BLOCK = {
    "norm1.*": "ln_1.*",
    "attn.qkv.*": "self_attention.in_proj_*",
    "attn.proj.*": "self_attention.out_proj.*",
    "norm2.*": "ln_2.*",
    "mlp.fc1.*": "mlp.0.*",
    "mlp.fc2.*": "mlp.3.*",
}
VIT = (
    Rule("cls_token", "class_token"),
    Rule("positions.table", "encoder.pos_embedding"),
    Rule("patch_embed.proj.*", "conv_proj.*"),
    *within("blocks.{i}", _LAYER, BLOCK),
    Rule("norm.*", "encoder.ln.*"),
    Rule("representation.*", "heads.pre_logits.*"),  # a tanh follows
    Rule("head.*", "heads.head.*"),
)
VIT_OLD = within("blocks.{i}.mlp", f"{_LAYER}.mlp", {"fc1.*": "linear_1.*", "fc2.*": "linear_2.*"})
"""Names of the first versions."""
STAGE = "features.{2s+1}.{b}"
SWIN_NAMES = {name: name for name in SWIN_BLOCK} | {"mlp.fc1.*": "mlp.0.*", "mlp.fc2.*": "mlp.3.*"}
SWIN = (
    Rule("patch_embed.proj.*", "features.0.0.*"),
    Rule("patch_norm.*", "features.0.2.*"),
    *within(STAGE_BLOCK, STAGE, SWIN_NAMES),
    *within("layers.{s}.downsample", "features.{2s}", ("norm.*", "reduction.*")),
    *same("norm.*", "head.*"),
    # Buffers, which are written but not read.
    *within(STAGE_BLOCK, STAGE, ("attn.relative_position_index", "attn.relative_coords_table")),
)
vit_to_ours = NameTable((*VIT, *VIT_OLD), preprocess=IMAGENET)


def swin_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A Swin of either version."""
    result = rules.to_ours(SWIN, BUFFERS, tensors)
    for name in [n for n in result.tensors if n.endswith(".attn.logit_scale")]:
        biased = name.removesuffix("logit_scale") + "qkv.bias"
        if biased in result.tensors:
            bias = result.tensors.pop(biased)
            biases.split_bias(result, biased, bias, "a third of qkv.bias")
    result.preprocess |= IMAGENET | {"interpolation": "bicubic"}
    return result


def swin_from_ours(
    tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Our Swin of either version with torchvision's names; `buffers` have our names."""
    own = {**tensors, **buffers}
    for name in [n for n in own if n.endswith(".attn.q_bias")]:
        place = name.removesuffix("q_bias")
        queries, values = own.pop(name), own.pop(f"{place}v_bias")
        own[f"{place}qkv.bias"] = torch.cat([queries, torch.zeros_like(queries), values])
    return rules.from_ours(SWIN, own)
