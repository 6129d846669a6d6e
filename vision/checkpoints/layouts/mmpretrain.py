"""mmpretrain's (before: mmcls') layout of ViT, Swin and Swin V2.

A merging takes its four tokens channel by channel (`nn.Unfold`: all four parts of the first
channel, row by row), not part by part, and belongs to the end of a stage.
"""

import re
from collections.abc import Mapping

from einops import rearrange
from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import BUFFERS, Change, Converted, Rule

VIT = (
    Rule("cls_token", "cls_token"),
    Rule("dist_token", "dist_token"),
    Rule("positions.table", "pos_embed"),
    Rule("patch_embed.proj.*", "patch_embed.projection.*"),
    Rule("blocks.{i}.norm1.*", "layers.{i}.ln1.*"),
    Rule("blocks.{i}.attn.qkv.*", "layers.{i}.attn.qkv.*"),
    Rule("blocks.{i}.attn.proj.*", "layers.{i}.attn.proj.*"),
    Rule("blocks.{i}.ls1.gamma", "layers.{i}.attn.gamma1.weight"),
    Rule("blocks.{i}.norm2.*", "layers.{i}.ln2.*"),
    Rule("blocks.{i}.mlp.fc1.*", "layers.{i}.ffn.layers.0.0.*"),
    Rule("blocks.{i}.mlp.fc2.*", "layers.{i}.ffn.layers.1.*"),
    Rule("blocks.{i}.ls2.gamma", "layers.{i}.ffn.gamma2.weight"),
    Rule("norm.*", "ln1.*"),
    Rule("norm.*", "ln2.*"),  # after pooling the mean
    Rule("representation.*", "head.layers.pre_logits.*"),  # a tanh follows
    Rule("head.*", "head.layers.head.*"),
    Rule("head.*", "head.fc.*"),
    Rule("head_dist.*", "head.layers.head_dist.*"),
)


def _part_by_part(tensor: Tensor) -> Tensor:
    """(… channels·4) with parts row by row → (… 4·channels) with parts column by column."""
    return rearrange(tensor, "... (c row column) -> ... (column row c)", row=2, column=2).clone()


def _channel_by_channel(tensor: Tensor) -> Tensor:
    return rearrange(tensor, "... (column row c) -> ... (c row column)", row=2, column=2).clone()


UNFOLD = Change(_part_by_part, _channel_by_channel)
_OURS, _THEIRS = "layers.{s}.blocks.{b}", "stages.{s}.blocks.{b}"
SWIN = (
    Rule("patch_embed.proj.*", "patch_embed.projection.*"),
    Rule("patch_norm.*", "patch_embed.norm.*"),
    Rule(f"{_OURS}.norm1.*", f"{_THEIRS}.norm1.*"),
    Rule(f"{_OURS}.attn.qkv.*", f"{_THEIRS}.attn.w_msa.qkv.*"),
    Rule(f"{_OURS}.attn.proj.*", f"{_THEIRS}.attn.w_msa.proj.*"),
    Rule(
        f"{_OURS}.attn.relative_position_bias_table",
        f"{_THEIRS}.attn.w_msa.relative_position_bias_table",
    ),
    Rule(f"{_OURS}.attn.q_bias", f"{_THEIRS}.attn.w_msa.q_bias"),
    Rule(f"{_OURS}.attn.v_bias", f"{_THEIRS}.attn.w_msa.v_bias"),
    Rule(f"{_OURS}.attn.logit_scale", f"{_THEIRS}.attn.w_msa.logit_scale"),
    Rule(f"{_OURS}.attn.cpb_mlp.{{j}}.*", f"{_THEIRS}.attn.w_msa.cpb_mlp.{{j}}.*"),
    Rule(f"{_OURS}.norm2.*", f"{_THEIRS}.norm2.*"),
    Rule(f"{_OURS}.mlp.fc1.*", f"{_THEIRS}.ffn.layers.0.0.*"),
    Rule(f"{_OURS}.mlp.fc2.*", f"{_THEIRS}.ffn.layers.1.*"),
    Rule("layers.{s}.downsample.reduction.*", "stages.{s-1}.downsample.reduction.*", UNFOLD),
    Rule("norm.*", "norm{n}.*"),  # n is the last stage
    Rule("head.*", "head.fc.*"),
)
MERGING_NORM = Rule("layers.{s}.downsample.norm.*", "stages.{s-1}.downsample.norm.*", UNFOLD)
MERGING_NORM_V2 = MERGING_NORM._replace(change=None)
"""V2 norms after the reduction, when parts are no more."""


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """Any of the three, with or without `backbone.` in front of the names."""
    plain = {re.sub(r"^backbone\.", "", name): tensor for name, tensor in tensors.items()}
    if any(name.startswith("stages.") for name in plain):
        second = any(name.endswith(".logit_scale") for name in plain)
        merging = MERGING_NORM_V2 if second else MERGING_NORM
        return rules.to_ours((*SWIN, merging), BUFFERS, plain)
    result = rules.to_ours(VIT, (), plain)
    if "ln2.weight" in plain:
        result.facts |= {"pool": "mean", "pool_norm": "after"}
    return result
