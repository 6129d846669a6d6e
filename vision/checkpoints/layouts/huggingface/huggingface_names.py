"""Hugging Face's layout: ViT, DeiT, MAE, Swin and Swin V2 here; DINO, BEiT, CLIP and SigLIP in
modules of their own.

What its files hold (versions 4 and 5 alike) differs from what version 5 has in memory, where a
state dict may come from; the tables know both, files first. Names start with the model's type,
except in a file of a model without head.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.huggingface import (
    huggingface_beit,
    huggingface_dino,
    huggingface_towers,
)
from vision.checkpoints.layouts.huggingface.huggingface_dino import (
    BLOCK,
    BLOCK_IN_MEMORY,
    EMBEDDING,
    HEAD,
)
from vision.checkpoints.layouts.recognise import TYPES
from vision.checkpoints.layouts.rules import BUFFERS, Converted, Ignored, Rule, Usual, within
from vision.checkpoints.layouts.timm.timm_names import STAGE_BLOCK

DISTILLED_HEAD = (
    Rule("head.*", "cls_classifier.*"),
    Rule("head_dist.*", "distillation_classifier.*"),
)
VIT = (
    *EMBEDDING,
    *within("blocks.{i}", "encoder.layer.{i}", BLOCK),
    Rule("blocks.{i}.attn.qkv.*", "encoder.layer.{i}.attention.attention.{query|key|value}.*"),
    *HEAD,
)
VIT_IN_MEMORY = (
    *within("blocks.{i}", "layers.{i}", BLOCK_IN_MEMORY),
    Rule("blocks.{i}.attn.qkv.*", "layers.{i}.attention.{q_proj|k_proj|v_proj}.*"),
)
_THEIRS = "encoder.layers.{s}.blocks.{b}"
SWIN_SHARED = (
    Rule("patch_embed.proj.*", "embeddings.patch_embeddings.projection.*"),
    Rule("patch_norm.*", "embeddings.norm.*"),
    *within(STAGE_BLOCK, _THEIRS, BLOCK),
    # The merging between two stages belongs to the end of the first.
    *within("layers.{s}.downsample", "encoder.layers.{s-1}.downsample", ("norm.*", "reduction.*")),
    *HEAD,
)
SWIN = (
    *SWIN_SHARED,
    Rule(f"{STAGE_BLOCK}.attn.qkv.*", f"{_THEIRS}.attention.self.{{query|key|value}}.*"),
    *within(f"{STAGE_BLOCK}.attn", f"{_THEIRS}.attention.self", ("relative_position_bias_table",)),
)
SWIN_V2 = (
    *SWIN_SHARED,
    *within(
        f"{STAGE_BLOCK}.attn",
        f"{_THEIRS}.attention.self",
        {
            "qkv.weight": "{query|key|value}.weight",
            "q_bias": "query.bias",
            "v_bias": "value.bias",
            "logit_scale": "logit_scale",
            "cpb_mlp.{j}.*": "continuous_position_bias_mlp.{j}.*",
        },
    ),
)
SWIN_IN_MEMORY = (
    *within(STAGE_BLOCK, _THEIRS, BLOCK_IN_MEMORY),
    Rule(f"{STAGE_BLOCK}.attn.qkv.*", f"{_THEIRS}.attention.{{q_proj|k_proj|v_proj}}.*"),
    Rule(
        f"{STAGE_BLOCK}.attn.relative_position_bias_table",
        f"{_THEIRS}.attention.relative_position_bias.relative_position_bias_table",
    ),
)
IGNORED = (
    Ignored(r"pooler\..*", "a hidden layer of pretraining, which the classifier does not use"),
    Ignored(r"embeddings\.mask_token", "stands for hidden patches in pretraining"),
    Ignored(r"decoder\..*", "the decoder of pretraining"),
    *BUFFERS,
)


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """Any of the models, with or without the model's type in front of the names."""
    plain = {re.sub(rf"^{TYPES}\.(?=\w)", "", name): tensor for name, tensor in tensors.items()}
    if "embeddings.patch_embedding.weight" in plain:
        return huggingface_towers.to_ours(plain)
    if "embeddings.patch_embeddings.weight" in plain:
        return huggingface_dino.dinov3_to_ours(plain)
    if any(name.endswith(".logit_scale") for name in plain):
        return rules.to_ours(SWIN_V2, IGNORED, plain)
    if any(".blocks." in name for name in plain):
        return rules.to_ours((*SWIN, *SWIN_IN_MEMORY), IGNORED, plain)
    if any(".norm1." in name for name in plain):
        return rules.with_zero_biases(rules.to_ours(huggingface_dino.DINOV2_ALL, IGNORED, plain))
    if huggingface_beit.is_beit(plain):
        return huggingface_beit.to_ours(plain)
    result = rules.to_ours((*VIT, *VIT_IN_MEMORY, *DISTILLED_HEAD), IGNORED, plain)
    result.usual["norm_eps"] = Usual(1e-12, "the default of transformers")
    if "dist_token" in result.tensors and "classifier.weight" in plain:
        _as_register(result)
    return result


def _as_register(result: Converted) -> None:
    """A distilled DeiT with one head: the second token is not read, and so acts as a register."""
    own = result.tensors
    token, positions = own.pop("dist_token"), own["positions.table"]
    own["reg_token"] = token + positions[:, 1:2]
    own["positions.table"] = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
    result.changed["reg_token"] = "the distillation token, which this head does not read"
    result.changed["positions.table"] = "the distillation token's row is now part of the token"


def vit_from_ours(
    tensors: Mapping[str, Tensor], kind: str, norm_after_pool: bool = False
) -> dict[str, Tensor]:
    """Our ViT with the names of files of this type, as `model_type` in config.json has it."""
    match kind:
        case "clip" | "clip_vision_model" | "siglip" | "siglip_vision_model":
            return huggingface_towers.from_ours(tensors)
        case "dinov3_vit":
            return huggingface_dino.dinov3_from_ours(tensors)
        case "beit":
            return _prefixed(huggingface_beit.from_ours(tensors, norm_after_pool), kind)
        case "vit":
            return _prefixed(rules.from_ours(VIT, tensors), kind)
        case "deit":
            return _prefixed(rules.from_ours((*DISTILLED_HEAD, *VIT), tensors), kind)
        case _:
            return _prefixed(huggingface_dino.dinov2_from_ours(tensors), kind)


def swin_from_ours(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Our Swin with the names of files of this type: swin, swinv2."""
    return _prefixed(rules.from_ours(SWIN if kind == "swin" else SWIN_V2, tensors), kind)


def _prefixed(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {
        name if "classifier." in name else f"{kind}.{name}": tensor
        for name, tensor in tensors.items()
    }
