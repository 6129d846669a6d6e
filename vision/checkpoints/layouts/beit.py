"""The official pretraining of BEiT and BEiT v2 (microsoft/unilm): one table of relative positions
for all blocks, and parts that only pretraining needs.

Fine-tuned models have the names of timm's `Beit`.
"""

from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import BUFFERS, MASK_TOKEN, Converted, Ignored, Usual
from vision.checkpoints.layouts.timm.timm_names import EVA, VIT

IGNORED = (
    MASK_TOKEN,
    Ignored(r"lm_head\..*|cls_pt_layers\..*", "the head of pretraining"),
    *BUFFERS,
)


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """The network behind the head of pretraining."""
    result = rules.to_ours((*EVA, *VIT), IGNORED, tensors)
    result.facts |= {"norm_eps": 1e-6, "activation": "gelu"}
    result.usual["pool"] = Usual("mean", "pretraining has no pooling; BEiT fine-tunes with it")
    return result
