"""mmpretrain's (before: mmcls') layout of ViT, Swin and Swin V2.

A merging takes its four tokens channel by channel (`nn.Unfold`: all four parts of the first
channel, row by row), not part by part, and belongs to the end of a stage.
"""

import re
from collections.abc import Mapping

from einops import rearrange
from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import BUFFERS, Change, Converted, Rule, same, within
from vision.checkpoints.layouts.timm.timm_names import STAGE_BLOCK, SWIN_BLOCK

VIT = (
    *same("cls_token", "dist_token"),
    Rule("positions.table", "pos_embed"),
    Rule("patch_embed.proj.*", "patch_embed.projection.*"),
    *within("blocks.{i}.attn", "layers.{i}.attn", ("qkv.*", "proj.*")),
    Rule("blocks.{i}.norm1.*", "layers.{i}.ln1.*"),
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


UNFOLD = Change(_part_by_part)
SWIN_NAMES = {name: name.replace("attn.", "attn.w_msa.") for name in SWIN_BLOCK}
SWIN_NAMES |= {"mlp.fc1.*": "ffn.layers.0.0.*", "mlp.fc2.*": "ffn.layers.1.*"}
SWIN = (
    Rule("patch_embed.proj.*", "patch_embed.projection.*"),
    Rule("patch_norm.*", "patch_embed.norm.*"),
    *within(STAGE_BLOCK, "stages.{s}.blocks.{b}", SWIN_NAMES),
    Rule("layers.{s}.downsample.reduction.*", "stages.{s-1}.downsample.reduction.*", UNFOLD),
    Rule("norm.*", "norm{n}.*"),  # n is the last stage
    Rule("head.*", "head.fc.*"),
)
MERGING_NORM = Rule("layers.{s}.downsample.norm.*", "stages.{s-1}.downsample.norm.*", UNFOLD)
MERGING_NORM_V2 = MERGING_NORM._replace(change=None)
"""V2 norms after the reduction, where the four parts are already joined."""


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
