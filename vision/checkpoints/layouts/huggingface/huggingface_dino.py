"""Hugging Face's layout of DINOv2 (with registers) and DINOv3."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vision.checkpoints.layouts import biases, rules
from vision.checkpoints.layouts.rules import (
    MASK_TOKEN,
    Converted,
    Rule,
    Usual,
    gated_mlp,
    split_qkv,
    within,
)

IN_FILES, IN_MEMORY = ("query", "key", "value"), ("q_proj", "k_proj", "v_proj")
"""Names of queries, keys and values."""
EMBEDDING = (
    Rule("cls_token", "embeddings.cls_token"),
    Rule("dist_token", "embeddings.distillation_token"),
    Rule("reg_token", "embeddings.register_tokens"),
    Rule("positions.table", "embeddings.position_embeddings"),
    Rule("patch_embed.proj.*", "embeddings.patch_embeddings.projection.*"),
)
HEAD = (
    Rule("norm.*", "layernorm.*"),
    Rule("head.*", "classifier.*"),
)
_LAYER = "encoder.layer.{i}"
BLOCK = {
    "norm1.*": "norm1.*",
    "ls1.gamma": "layer_scale1.lambda1",
    "norm2.*": "norm2.*",
    "ls2.gamma": "layer_scale2.lambda1",
}
DINOV2 = (
    *EMBEDDING,
    *within("blocks.{i}", _LAYER, BLOCK),
    *within("blocks.{i}.mlp", f"{_LAYER}.mlp", ("fc1.*", "fc2.*")),
    *split_qkv(f"{_LAYER}.attention.attention", IN_FILES, key_bias=True),
    Rule("blocks.{i}.attn.proj.*", f"{_LAYER}.attention.output.dense.*"),
    *HEAD,
)
DINOV2_GATED = within(
    "blocks.{i}.mlp", f"{_LAYER}.mlp", {"fc1.*": "weights_in.*", "fc2.*": "weights_out.*"}
)
GATED = {"mlp.fc1.*": "mlp.{gate_proj|up_proj}.*", "mlp.fc2.*": "mlp.down_proj.*"}
PROJECTION = {"attn.proj.*": "attention.o_proj.*"}
DINOV2_ALL = (
    *DINOV2,
    *DINOV2_GATED,
    *split_qkv(f"{_LAYER}.attention", IN_MEMORY, key_bias=True),
    *within("blocks.{i}", _LAYER, PROJECTION | GATED),
)
DINOV3 = (
    Rule("cls_token", "embeddings.cls_token"),
    Rule("reg_token", "embeddings.register_tokens"),
    Rule("patch_embed.proj.*", "embeddings.patch_embeddings.*"),
    *within("blocks.{i}", "layer.{i}", BLOCK | PROJECTION),
    Rule("norm.*", "norm.*"),
)
_HEADS = {384: 6, 768: 12, 1024: 16, 1280: 20, 4096: 32}
"""Heads of Meta's DINOv3 by their width."""
_PROJECTION = re.compile(r"layer\.\d+\.attention\.([qkv])_proj\.(weight|bias)")


def _dinov3(gated: bool, key_bias: bool) -> tuple[Rule, ...]:
    mlp = GATED if gated else {"mlp.fc1.*": "mlp.up_proj.*", "mlp.fc2.*": "mlp.down_proj.*"}
    attention = split_qkv("layer.{i}.attention", IN_MEMORY, key_bias)
    return (*DINOV3, *attention, *within("blocks.{i}", "layer.{i}", mlp))


def dinov3_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A DINOv3; in memory of version 5 there is one word more in front of its layers."""
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    gated = any(name.endswith(".gate_proj.weight") for name in plain)
    key_bias = _add_biases(plain)
    result = biases.with_zero_biases(rules.to_ours(_dinov3(gated, key_bias), [MASK_TOKEN], plain))
    if "reg_token" in result.tensors and not result.tensors["reg_token"].shape[1]:
        del result.tensors["reg_token"]
        result.ignored["embeddings.register_tokens"] = "empty: the model has no registers"
    result.facts |= {"positions": "rotary", "rotary": "dinov3_hf", "norm_eps": 1e-5}
    width = plain["embeddings.patch_embeddings.weight"].shape[0]
    if width in _HEADS:
        result.usual["heads"] = Usual(_HEADS[width], f"as in Meta's DINOv3 of width {width}")
    return result


def _add_biases(tensors: dict[str, Tensor]) -> bool:
    """Complete the biases of queries, keys and values, each of which may be left out, by zeros,
    unless none has one; whether keys have a bias.
    """
    found = [match for name in tensors if (match := _PROJECTION.fullmatch(name))]
    biased = {match[1] for match in found if match[2] == "bias"}
    wanted = "qkv" if "k" in biased else "qv" if biased else ""
    for match in found:
        if match[2] == "weight" and match[1] in wanted:
            zeros = tensors[match[0]].new_zeros(tensors[match[0]].shape[0])
            tensors.setdefault(match[0].removesuffix("weight") + "bias", zeros)
    return "k" in biased


def dinov2_from_ours(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our ViT with the names of files of DINOv2, without the model's type in front."""
    return rules.from_ours((*DINOV2_GATED, *DINOV2) if gated_mlp(tensors) else DINOV2, tensors)


def dinov3_from_ours(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our ViT with the names of files of DINOv3."""
    own = {name: tensor for name, tensor in tensors.items() if name != "rotary.periods"}
    own.setdefault("reg_token", torch.empty(1, 0, own["cls_token"].shape[-1]))
    key_bias = "blocks.0.attn.q_bias" not in own
    return rules.from_ours(_dinov3(gated_mlp(own), key_bias), own)
