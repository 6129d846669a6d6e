"""ViTs of Meta's projects: DeiT, MAE, DINO, DINOv2 and DINOv3; and the official pretraining of BEiT
and BEiT v2 (microsoft/unilm). Their names are timm's, with a few of their own and parts that only
pretraining needs.

The table of positions of DeiT-III has no row for the class token; that of a distilled DeiT has one
for the class token and one for the distillation token. Both show in its shape. timm's RoPE-ViT with
a table (vit_*_rope_ape) has exactly DeiT-III's tensors: `infer_vit.py` asks which of them it is.

A fine-tuned MAE has no decoder and is timm's layout (`fc_norm` where it pools the mean).

Registers of DINO stand between class token and patches and have no position, as here; DINOv3 calls
them storage tokens. A linear head of DINOv2 sees the class token and the mean of the patches side
by side. DINOv3 stores a bias of keys that a mask takes away whenever the model runs, and the
periods of its rotation in fewer bits than they are computed with: they must be used as they are.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts import biases, rules
from vision.checkpoints.layouts.rules import (
    BUFFERS,
    DECODER,
    IMAGENET,
    MASK_TOKEN,
    Converted,
    Ignored,
    NameTable,
    Rule,
    Usual,
    same,
    within,
)
from vision.checkpoints.layouts.timm.timm_names import BLOCK, EVA, LAYER_SCALE, VIT

_BICUBIC = IMAGENET | {"interpolation": "bicubic"}
_CROPPED = _BICUBIC | {"crop_ratio": 0.875}
_HEAD = Ignored(r"(dino_|ibot_)?head\.(mlp|last_layer)\..*", "the head of pretraining")
_SECOND_LAYER = Rule("blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.w3.*")
DINO = (
    Rule("reg_token", "register_tokens"),
    Rule("blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.w12.*"),
    _SECOND_LAYER,
    Rule("head.*", "linear_head.*"),
    *VIT,
)
DINOV3 = (
    Rule("reg_token", "storage_tokens"),
    Rule("rotary.periods", "rope_embed.periods"),
    Rule("blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.{w1|w2}.*"),
    _SECOND_LAYER,
    *VIT,
)
DINOV3_IGNORED = (
    MASK_TOKEN,
    Ignored(r"blocks\.\d+\.attn\.qkv\.bias_mask", "applied: keys have no bias"),
    Ignored(r"local_cls_norm\..*", "for the local crops of pretraining alone"),
    _HEAD,
)
DINOV3_FACTS: dict[str, object] = {
    "positions": "rotary",
    "rotary": "dinov3",
    "norm_eps": 1e-5,
    "pool": "class_token",
}
deit_to_ours = NameTable((*LAYER_SCALE, *VIT), preprocess=_BICUBIC)
_MAE_ENCODER = NameTable(VIT, (Ignored(r"decoder_.*|mask_token", DECODER),), _CROPPED)
MAE_DECODER = (
    *same("mask_token"),
    Rule("embed.*", "decoder_embed.*"),
    Rule("positions.table", "decoder_pos_embed"),
    *within("decoder.{i}", "decoder_blocks.{i}", BLOCK),
    Rule("norm.*", "decoder_norm.*"),
    Rule("pred.*", "decoder_pred.*"),
)
dino_to_ours = NameTable(DINO, (MASK_TOKEN, _HEAD), _CROPPED)
BEIT_IGNORED = (
    MASK_TOKEN,
    Ignored(r"lm_head\..*|cls_pt_layers\..*", "the head of pretraining"),
    *BUFFERS,
)
"""Of pretraining, which no classifier needs, also by transformers' names."""
BEIT_POOL = Usual("mean", "pretraining has no pooling; BEiT fine-tunes with it")


def mae_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """The encoder of a pretrained MAE; its decoder is set apart."""
    result = _MAE_ENCODER(tensors)
    decoder = {name: tensors[name] for name in result.ignored}
    result.decoder = rules.to_ours(MAE_DECODER, (), decoder).tensors
    return result


def dinov3_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A DINOv3 of any size."""
    if "cls_norm.weight" in tensors:
        raise CheckpointError(
            "the weights norm the class token and the patches separately ('cls_norm.weight', "
            "untie_cls_and_patch_norms=True); here one norm serves all tokens. Export the model "
            "with untie_cls_and_patch_norms=False, or run it in Meta's own code."
        )
    result = rules.to_ours(DINOV3, DINOV3_IGNORED, tensors)
    if "rotary.periods" not in result.tensors:
        raise CheckpointError("the weights are not complete: 'rope_embed.periods' is missing.")
    for name in [n for n in result.tensors if n.endswith(".attn.qkv.bias")]:
        mask = tensors.get(f"{name}_mask")
        if mask is None:
            continue  # a model that was built without the mask has a bias of keys
        # A mask of NaN was never set: Meta's code starts with it and sets it to one, zero and one.
        bias = result.tensors.pop(name)
        bias = bias * torch.nan_to_num(mask.to(bias.dtype), nan=1.0)
        biases.split_bias(result, name, bias, "a third of qkv.bias, masked")
    result.facts |= DINOV3_FACTS
    return result


def beit_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """The network behind BEiT's head of pretraining. Fine-tuned models have timm's names."""
    result = rules.to_ours((*EVA, *VIT), BEIT_IGNORED, tensors)
    result.facts |= {"norm_eps": 1e-6, "activation": "gelu"}
    result.usual["pool"] = BEIT_POOL
    return result
