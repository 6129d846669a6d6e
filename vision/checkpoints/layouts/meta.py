"""DINOv3 as Meta stores it: DINO's names, with registers called storage tokens.

Keys have a bias in the file that a mask takes away whenever the model runs. The periods of the
rotation are stored in fewer bits than they are computed with, and must be used as they are.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import Converted, Ignored, Rule
from vision.checkpoints.layouts.timm.timm_names import VIT

DINOV3 = (
    Rule("reg_token", "storage_tokens"),
    Rule("rotary.periods", "rope_embed.periods"),
    Rule("blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.{w1|w2}.*"),
    Rule("blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.w3.*"),
    *VIT,
)
IGNORED = (
    Ignored(r"mask_token", "stands for hidden patches in pretraining"),
    Ignored(r"blocks\.\d+\.attn\.qkv\.bias_mask", "applied: keys have no bias"),
    Ignored(r"local_cls_norm\..*", "for the local crops of pretraining alone"),
    Ignored(r"(dino_|ibot_)?head\.(mlp|last_layer)\..*", "the head of pretraining"),
)
FACTS: dict[str, object] = {
    "positions": "rotary",
    "rotary": "dinov3",
    "norm_eps": 1e-5,
    "pool": "class_token",
}


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A DINOv3 of any size."""
    if "cls_norm.weight" in tensors:
        raise CheckpointError(
            "the weights norm the class token and the patches separately ('cls_norm.weight', "
            "untie_cls_and_patch_norms=True); here one norm serves all tokens. Export the model "
            "with untie_cls_and_patch_norms=False, or run it in Meta's own code."
        )
    result = rules.to_ours(DINOV3, IGNORED, tensors)
    if "rotary.periods" not in result.tensors:
        raise CheckpointError("the weights are not complete: 'rope_embed.periods' is missing.")
    for name in [n for n in result.tensors if n.endswith(".attn.qkv.bias")]:
        mask = tensors.get(f"{name}_mask")
        if mask is None:
            continue  # a model that was built without the mask has a bias of keys
        # A mask of NaN was never set: Meta's code starts with it and sets it to one, zero and one.
        bias = result.tensors.pop(name)
        bias = bias * torch.nan_to_num(mask.to(bias.dtype), nan=1.0)
        rules.split_bias(result, name, bias, "a third of qkv.bias, masked")
    result.facts |= FACTS
    return result
