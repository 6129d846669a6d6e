"""The official pretraining of BEiT and BEiT v2 (microsoft/unilm): one table of relative positions
for all blocks, and parts that only pretraining needs.

Fine-tuned models have the names of timm's `Beit`.
"""

from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import BUFFERS, Converted, Ignored, Rule, Usual
from vision.checkpoints.layouts.timm.timm_names import VIT

BEIT = (
    Rule("relative.table", "rel_pos_bias.relative_position_bias_table"),
    Rule("blocks.{i}.relative.table", "blocks.{i}.attn.relative_position_bias_table"),
    Rule("blocks.{i}.attn.q_bias", "blocks.{i}.attn.q_bias"),
    Rule("blocks.{i}.attn.v_bias", "blocks.{i}.attn.v_bias"),
    Rule("blocks.{i}.ls1.gamma", "blocks.{i}.gamma_1"),
    Rule("blocks.{i}.ls2.gamma", "blocks.{i}.gamma_2"),
    *VIT,
)
IGNORED = (
    Ignored(r"mask_token", "stands for hidden patches in pretraining"),
    Ignored(r"lm_head\..*|cls_pt_layers\..*", "the head of pretraining"),
    *BUFFERS,
)


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """The network behind the head of pretraining."""
    result = rules.to_ours(BEIT, IGNORED, tensors)
    result.facts |= {"norm_eps": 1e-6, "activation": "gelu"}
    result.usual["pool"] = Usual("mean", "pretraining has no pooling; BEiT fine-tunes with it")
    return result
