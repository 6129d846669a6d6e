"""Hugging Face's layout: ViT, DeiT, MAE, BEiT (and Data2Vec, which has its architecture), Swin and
Swin V2 here; DINO, CLIP and SigLIP in modules of their own.

What its files hold (versions 4 and 5 alike) differs from what version 5 has in memory, where a
state dict may come from; the tables know both, files first. Names start with the model's type,
except in a file of a model without head.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vision.checkpoints.layouts import biases, rules
from vision.checkpoints.layouts.huggingface import huggingface_dino, huggingface_towers
from vision.checkpoints.layouts.huggingface.huggingface_dino import (
    EMBEDDING,
    HEAD,
    IN_FILES,
    IN_MEMORY,
    PROJECTION,
)
from vision.checkpoints.layouts.meta import BEIT_IGNORED, BEIT_POOL
from vision.checkpoints.layouts.recognise import TYPES
from vision.checkpoints.layouts.rules import (
    BUFFERS,
    DECODER,
    MASK_TOKEN,
    Converted,
    Ignored,
    Rule,
    Usual,
    split_qkv,
    within,
)
from vision.checkpoints.layouts.timm.timm_names import STAGE_BLOCK

BLOCK = {
    "norm1.*": "layernorm_before.*",
    "attn.proj.*": "attention.output.dense.*",
    "norm2.*": "layernorm_after.*",
    "mlp.fc1.*": "intermediate.dense.*",
    "mlp.fc2.*": "output.dense.*",
}
BLOCK_IN_MEMORY = BLOCK | PROJECTION | {"mlp.fc1.*": "mlp.fc1.*", "mlp.fc2.*": "mlp.fc2.*"}
SCALES = {"ls1.gamma": "lambda_1", "ls2.gamma": "lambda_2"}
_TABLE = "relative_position_bias.relative_position_bias_table"
_LAYER = "encoder.layer.{i}"


def _vit(key_bias: bool) -> tuple[Rule, ...]:
    """ViT and DeiT, or without a bias of keys BEiT."""
    return (
        *EMBEDDING,
        Rule("relative.table", f"encoder.{_TABLE}"),
        *within("blocks.{i}", _LAYER, BLOCK | SCALES),
        *split_qkv(f"{_LAYER}.attention.attention", IN_FILES, key_bias),
        Rule("blocks.{i}.relative.table", f"{_LAYER}.attention.attention.{_TABLE}"),
        *HEAD,
        Rule("relative.table", "shared_position_bias.relative_position_bias_table"),
        *within("blocks.{i}", "layers.{i}", BLOCK_IN_MEMORY | SCALES),
        *split_qkv("layers.{i}.attention", IN_MEMORY, key_bias),
        Rule("blocks.{i}.relative.table", f"layers.{{i}}.{_TABLE}"),
    )


VIT, BEIT = _vit(key_bias=True), _vit(key_bias=False)
POOLED = Rule("norm.*", "pooler.layernorm.*")
"""The last norm of a BEiT that follows the mean of the patches."""
DISTILLED_HEAD = (
    Rule("head.*", "cls_classifier.*"),
    Rule("head_dist.*", "distillation_classifier.*"),
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
    *split_qkv(f"{_THEIRS}.attention.self", IN_FILES, True, f"{STAGE_BLOCK}.attn"),
    *within(f"{STAGE_BLOCK}.attn", f"{_THEIRS}.attention.self", ("relative_position_bias_table",)),
)
SWIN_V2 = (
    *SWIN_SHARED,
    *split_qkv(f"{_THEIRS}.attention.self", IN_FILES, False, f"{STAGE_BLOCK}.attn"),
    *within(
        f"{STAGE_BLOCK}.attn",
        f"{_THEIRS}.attention.self",
        {
            "logit_scale": "logit_scale",
            "cpb_mlp.{j}.*": "continuous_position_bias_mlp.{j}.*",
        },
    ),
)
SWIN_IN_MEMORY = (
    *within(STAGE_BLOCK, _THEIRS, BLOCK_IN_MEMORY),
    *split_qkv(f"{_THEIRS}.attention", IN_MEMORY, True, f"{STAGE_BLOCK}.attn"),
    Rule(
        f"{STAGE_BLOCK}.attn.relative_position_bias_table",
        f"{_THEIRS}.attention.relative_position_bias.relative_position_bias_table",
    ),
)
IGNORED = (
    Ignored(r"pooler\..*", "a hidden layer of pretraining, which the classifier does not use"),
    MASK_TOKEN,
    Ignored(r"decoder\..*", DECODER),
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
        return biases.with_zero_biases(rules.to_ours(huggingface_dino.DINOV2_ALL, IGNORED, plain))
    if _is_beit(plain):
        return _beit_to_ours(plain)
    result = rules.to_ours((*VIT, *DISTILLED_HEAD), IGNORED, plain)
    result.usual["norm_eps"] = Usual(1e-12, "the default of transformers")
    if "dist_token" in result.tensors and "classifier.weight" in plain:
        _as_register(result)
    return result


def _is_beit(tensors: Mapping[str, Tensor]) -> bool:
    """Whether queries have a bias and keys have none."""
    names = "\n".join(tensors)
    return any(
        f".{query}.bias" in names and f".{key}.bias" not in names
        for query, key in (("query", "key"), ("q_proj", "k_proj"))
    )


def _beit_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A BEiT or Data2Vec without its type in front of the names."""
    result = rules.to_ours((*BEIT, POOLED), BEIT_IGNORED, tensors)
    result.usual["norm_eps"] = Usual(1e-12, "the default of transformers")
    if "pooler.layernorm.weight" in tensors:
        result.facts |= {"pool": "mean", "pool_norm": "after"}
    elif "lm_head.weight" in tensors:
        result.usual["pool"] = BEIT_POOL
    _add_shared(result)
    return result


def _add_shared(result: Converted) -> None:
    """Of a model with a table in every block and one for all of them, both are added to the scores:
    here every block has the sum.
    """
    own = result.tensors
    if "relative.table" not in own or "blocks.0.relative.table" not in own:
        return
    shared = own.pop("relative.table")
    for name in [name for name in own if name.endswith(".relative.table")]:
        own[name] = own[name] + shared
        result.changed[name] = "the table that all blocks share was added"


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
            table = (POOLED, *BEIT) if norm_after_pool else BEIT
            return _prefixed(rules.from_ours(table, tensors), kind)
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
