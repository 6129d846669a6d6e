"""Hugging Face's layout of ViT, DeiT, MAE, DINOv2 (with registers), Swin and Swin V2.

What its files hold (versions 4 and 5 alike) differs from what version 5 has in memory, where a
state dict may come from; the tables know both, files first. Names start with the model's type,
except in a file of a model without head.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vision.checkpoints.formats import rules
from vision.checkpoints.formats.rules import BUFFERS, Converted, Ignored, Rule

EMBEDDING = (
    Rule("cls_token", "embeddings.cls_token"),
    Rule("dist_token", "embeddings.distillation_token"),
    Rule("reg_token", "embeddings.register_tokens"),
    Rule("positions.table", "embeddings.position_embeddings"),
    Rule("patch_embed.proj.*", "embeddings.patch_embeddings.projection.*"),
)
VIT_HEAD = (
    Rule("norm.*", "layernorm.*"),
    Rule("head.*", "classifier.*"),
)
DISTILLED_HEAD = (
    Rule("head.*", "cls_classifier.*"),
    Rule("head_dist.*", "distillation_classifier.*"),
)
VIT = (
    *EMBEDDING,
    Rule("blocks.{i}.norm1.*", "encoder.layer.{i}.layernorm_before.*"),
    Rule("blocks.{i}.attn.qkv.*", "encoder.layer.{i}.attention.attention.{query|key|value}.*"),
    Rule("blocks.{i}.attn.proj.*", "encoder.layer.{i}.attention.output.dense.*"),
    Rule("blocks.{i}.norm2.*", "encoder.layer.{i}.layernorm_after.*"),
    Rule("blocks.{i}.mlp.fc1.*", "encoder.layer.{i}.intermediate.dense.*"),
    Rule("blocks.{i}.mlp.fc2.*", "encoder.layer.{i}.output.dense.*"),
    *VIT_HEAD,
)
VIT_IN_MEMORY = (
    Rule("blocks.{i}.norm1.*", "layers.{i}.layernorm_before.*"),
    Rule("blocks.{i}.attn.qkv.*", "layers.{i}.attention.{q_proj|k_proj|v_proj}.*"),
    Rule("blocks.{i}.attn.proj.*", "layers.{i}.attention.o_proj.*"),
    Rule("blocks.{i}.norm2.*", "layers.{i}.layernorm_after.*"),
    Rule("blocks.{i}.mlp.fc1.*", "layers.{i}.mlp.fc1.*"),
    Rule("blocks.{i}.mlp.fc2.*", "layers.{i}.mlp.fc2.*"),
)
DINOV2 = (
    *EMBEDDING,
    Rule("blocks.{i}.norm1.*", "encoder.layer.{i}.norm1.*"),
    Rule("blocks.{i}.attn.qkv.*", "encoder.layer.{i}.attention.attention.{query|key|value}.*"),
    Rule("blocks.{i}.attn.proj.*", "encoder.layer.{i}.attention.output.dense.*"),
    Rule("blocks.{i}.ls1.gamma", "encoder.layer.{i}.layer_scale1.lambda1"),
    Rule("blocks.{i}.norm2.*", "encoder.layer.{i}.norm2.*"),
    Rule("blocks.{i}.mlp.fc1.*", "encoder.layer.{i}.mlp.fc1.*"),
    Rule("blocks.{i}.mlp.fc2.*", "encoder.layer.{i}.mlp.fc2.*"),
    Rule("blocks.{i}.ls2.gamma", "encoder.layer.{i}.layer_scale2.lambda1"),
    *VIT_HEAD,
)
DINOV2_GATED = (
    Rule("blocks.{i}.mlp.fc1.*", "encoder.layer.{i}.mlp.weights_in.*"),
    Rule("blocks.{i}.mlp.fc2.*", "encoder.layer.{i}.mlp.weights_out.*"),
)
DINOV2_IN_MEMORY = (
    Rule("blocks.{i}.attn.qkv.*", "encoder.layer.{i}.attention.{q_proj|k_proj|v_proj}.*"),
    Rule("blocks.{i}.attn.proj.*", "encoder.layer.{i}.attention.o_proj.*"),
    Rule("blocks.{i}.mlp.fc1.*", "encoder.layer.{i}.mlp.{gate_proj|up_proj}.*"),
    Rule("blocks.{i}.mlp.fc2.*", "encoder.layer.{i}.mlp.down_proj.*"),
)
_OURS, _THEIRS = "layers.{s}.blocks.{b}", "encoder.layers.{s}.blocks.{b}"
SWIN_SHARED = (
    Rule("patch_embed.proj.*", "embeddings.patch_embeddings.projection.*"),
    Rule("patch_norm.*", "embeddings.norm.*"),
    Rule(f"{_OURS}.norm1.*", f"{_THEIRS}.layernorm_before.*"),
    Rule(f"{_OURS}.attn.proj.*", f"{_THEIRS}.attention.output.dense.*"),
    Rule(f"{_OURS}.norm2.*", f"{_THEIRS}.layernorm_after.*"),
    Rule(f"{_OURS}.mlp.fc1.*", f"{_THEIRS}.intermediate.dense.*"),
    Rule(f"{_OURS}.mlp.fc2.*", f"{_THEIRS}.output.dense.*"),
    # The merging between two stages belongs to the end of the first.
    Rule("layers.{s}.downsample.norm.*", "encoder.layers.{s-1}.downsample.norm.*"),
    Rule("layers.{s}.downsample.reduction.*", "encoder.layers.{s-1}.downsample.reduction.*"),
    Rule("norm.*", "layernorm.*"),
    Rule("head.*", "classifier.*"),
)
SWIN = (
    *SWIN_SHARED,
    Rule(f"{_OURS}.attn.qkv.*", f"{_THEIRS}.attention.self.{{query|key|value}}.*"),
    Rule(
        f"{_OURS}.attn.relative_position_bias_table",
        f"{_THEIRS}.attention.self.relative_position_bias_table",
    ),
)
SWIN_V2 = (
    *SWIN_SHARED,
    Rule(f"{_OURS}.attn.qkv.weight", f"{_THEIRS}.attention.self.{{query|key|value}}.weight"),
    Rule(f"{_OURS}.attn.q_bias", f"{_THEIRS}.attention.self.query.bias"),
    Rule(f"{_OURS}.attn.v_bias", f"{_THEIRS}.attention.self.value.bias"),
    Rule(f"{_OURS}.attn.logit_scale", f"{_THEIRS}.attention.self.logit_scale"),
    Rule(
        f"{_OURS}.attn.cpb_mlp.{{j}}.*",
        f"{_THEIRS}.attention.self.continuous_position_bias_mlp.{{j}}.*",
    ),
)
SWIN_IN_MEMORY = (
    Rule(f"{_OURS}.attn.qkv.*", f"{_THEIRS}.attention.{{q_proj|k_proj|v_proj}}.*"),
    Rule(f"{_OURS}.attn.proj.*", f"{_THEIRS}.attention.o_proj.*"),
    Rule(
        f"{_OURS}.attn.relative_position_bias_table",
        f"{_THEIRS}.attention.relative_position_bias.relative_position_bias_table",
    ),
    Rule(f"{_OURS}.mlp.fc1.*", f"{_THEIRS}.mlp.fc1.*"),
    Rule(f"{_OURS}.mlp.fc2.*", f"{_THEIRS}.mlp.fc2.*"),
)
IGNORED = (
    Ignored(r"pooler\..*", "a hidden layer of pretraining, which the classifier does not use"),
    Ignored(r"embeddings\.mask_token", "stands for hidden patches in pretraining"),
    Ignored(r"decoder\..*", "the decoder of pretraining"),
    *BUFFERS,
)
_TYPES = re.compile(r"(vit|deit|dinov2|dinov2_with_registers|swin|swinv2)\.(?=\w)")


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """Any of the models, with or without the model's type in front of the names."""
    plain = {_TYPES.sub("", name, count=1): tensor for name, tensor in tensors.items()}
    table: tuple[Rule, ...]
    if any(name.endswith(".logit_scale") for name in plain):
        table = SWIN_V2
    elif any(".blocks." in name for name in plain):
        table = (*SWIN, *SWIN_IN_MEMORY)
    elif any(".norm1." in name for name in plain):
        table = (*DINOV2, *DINOV2_GATED, *DINOV2_IN_MEMORY)
    else:
        table = (*VIT, *VIT_IN_MEMORY, *DISTILLED_HEAD)
    result = rules.to_ours(table, IGNORED, plain)
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


def vit_from_ours(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Our ViT with the names of files of this type: vit, deit, dinov2, dinov2_with_registers."""
    table: tuple[Rule, ...]
    match kind:
        case "vit":
            table = VIT
        case "deit":
            table = (*DISTILLED_HEAD, *VIT)
        case _:
            fc1, fc2 = (tensors[f"blocks.0.mlp.{part}.weight"] for part in ("fc1", "fc2"))
            table = (*DINOV2_GATED, *DINOV2) if fc1.shape[0] == 2 * fc2.shape[1] else DINOV2
    return _prefixed(rules.from_ours(table, tensors), kind)


def swin_from_ours(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Our Swin with the names of files of this type: swin, swinv2."""
    return _prefixed(rules.from_ours(SWIN if kind == "swin" else SWIN_V2, tensors), kind)


def _prefixed(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {
        name if "classifier." in name else f"{kind}.{name}": tensor
        for name, tensor in tensors.items()
    }
