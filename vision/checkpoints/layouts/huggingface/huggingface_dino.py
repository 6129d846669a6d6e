"""Hugging Face's layout of DINOv2 (with registers) and DINOv3."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import Converted, Ignored, Rule, Usual, within

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
BLOCK = {
    "norm1.*": "layernorm_before.*",
    "attn.proj.*": "attention.output.dense.*",
    "norm2.*": "layernorm_after.*",
    "mlp.fc1.*": "intermediate.dense.*",
    "mlp.fc2.*": "output.dense.*",
}
"""Parts of a block of ViT, BEiT and Swin in files."""
BLOCK_IN_MEMORY = {
    "norm1.*": "layernorm_before.*",
    "attn.proj.*": "attention.o_proj.*",
    "norm2.*": "layernorm_after.*",
    "mlp.fc1.*": "mlp.fc1.*",
    "mlp.fc2.*": "mlp.fc2.*",
}
"""The same in memory, as of version 5."""
_LAYER = "encoder.layer.{i}"
DINO_BLOCK = {
    "norm1.*": "norm1.*",
    "ls1.gamma": "layer_scale1.lambda1",
    "norm2.*": "norm2.*",
    "ls2.gamma": "layer_scale2.lambda1",
}
DINOV2 = (
    *EMBEDDING,
    *within("blocks.{i}", _LAYER, DINO_BLOCK),
    *within("blocks.{i}.mlp", f"{_LAYER}.mlp", ("fc1.*", "fc2.*")),
    Rule("blocks.{i}.attn.qkv.*", f"{_LAYER}.attention.attention.{{query|key|value}}.*"),
    Rule("blocks.{i}.attn.proj.*", f"{_LAYER}.attention.output.dense.*"),
    *HEAD,
)
DINOV2_GATED = within(
    "blocks.{i}.mlp", f"{_LAYER}.mlp", {"fc1.*": "weights_in.*", "fc2.*": "weights_out.*"}
)
IN_MEMORY = {
    "attn.qkv.*": "attention.{q_proj|k_proj|v_proj}.*",
    "attn.proj.*": "attention.o_proj.*",
    "mlp.fc1.*": "mlp.{gate_proj|up_proj}.*",
    "mlp.fc2.*": "mlp.down_proj.*",
}
DINOV2_ALL = (*DINOV2, *DINOV2_GATED, *within("blocks.{i}", _LAYER, IN_MEMORY))
DINOV3 = (
    Rule("cls_token", "embeddings.cls_token"),
    Rule("reg_token", "embeddings.register_tokens"),
    Rule("patch_embed.proj.*", "embeddings.patch_embeddings.*"),
    *within("blocks.{i}", "layer.{i}", DINO_BLOCK),
    Rule("blocks.{i}.attn.qkv.weight", "layer.{i}.attention.{q_proj|k_proj|v_proj}.weight"),
    Rule("blocks.{i}.attn.proj.*", "layer.{i}.attention.o_proj.*"),
    Rule("blocks.{i}.mlp.fc2.*", "layer.{i}.mlp.down_proj.*"),
    Rule("norm.*", "norm.*"),
)
DINOV3_PLAIN = Rule("blocks.{i}.mlp.fc1.*", "layer.{i}.mlp.up_proj.*")
DINOV3_GATED = Rule("blocks.{i}.mlp.fc1.*", "layer.{i}.mlp.{gate_proj|up_proj}.*")
DINOV3_BIASES = within(
    "blocks.{i}.attn", "layer.{i}.attention", {"q_bias": "q_proj.bias", "v_bias": "v_proj.bias"}
)
DINOV3_BIAS = Rule("blocks.{i}.attn.qkv.bias", "layer.{i}.attention.{q_proj|k_proj|v_proj}.bias")
IGNORED = (Ignored(r"embeddings\.mask_token", "stands for hidden patches in pretraining"),)
_HEADS = {384: 6, 768: 12, 1024: 16, 1280: 20, 4096: 32}
"""Heads of Meta's DINOv3 by their width."""
_PROJECTION = re.compile(r"layer\.\d+\.attention\.([qkv])_proj\.(weight|bias)")


def dinov3_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A DINOv3; in memory of version 5 there is one word more in front of its layers."""
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    gated = any(name.endswith(".gate_proj.weight") for name in plain)
    plain, biases = _with_biases(plain)
    table = (*DINOV3, DINOV3_GATED if gated else DINOV3_PLAIN, *biases)
    result = rules.with_zero_biases(rules.to_ours(table, IGNORED, plain))
    if "reg_token" in result.tensors and not result.tensors["reg_token"].shape[1]:
        del result.tensors["reg_token"]
        result.ignored["embeddings.register_tokens"] = "empty: the model has no registers"
    result.facts |= {"positions": "rotary", "rotary": "dinov3_hf", "norm_eps": 1e-5}
    width = plain["embeddings.patch_embeddings.weight"].shape[0]
    if width in _HEADS:
        result.usual["heads"] = Usual(_HEADS[width], f"as in Meta's DINOv3 of width {width}")
    return result


def _with_biases(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Rule, ...]]:
    """Biases of queries, keys and values, each of which may be left out, which is a bias of zeros;
    and the rules for them. Without any bias for keys there is none here.
    """
    found = [match for name in tensors if (match := _PROJECTION.fullmatch(name))]
    biased = {match[1] for match in found if match[2] == "bias"}
    if not biased:
        return tensors, ()
    wanted = "qkv" if "k" in biased else "qv"
    zeros = {
        match[0].removesuffix("weight") + "bias": tensors[match[0]].new_zeros(
            tensors[match[0]].shape[0]
        )
        for match in found
        if match[2] == "weight" and match[1] in wanted
    }
    return zeros | tensors, (DINOV3_BIAS,) if "k" in biased else DINOV3_BIASES


def dinov2_from_ours(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our ViT with the names of files of DINOv2, without the model's type in front."""
    return rules.from_ours((*DINOV2_GATED, *DINOV2) if _gated(tensors) else DINOV2, tensors)


def dinov3_from_ours(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our ViT with the names of files of DINOv3."""
    own = {name: tensor for name, tensor in tensors.items() if name != "rotary.periods"}
    mlp = DINOV3_GATED if _gated(own) else DINOV3_PLAIN
    width = own["cls_token"].shape[-1]
    own.setdefault("reg_token", torch.empty(1, 0, width))
    return rules.from_ours((*DINOV3, mlp, *DINOV3_BIASES, DINOV3_BIAS), own)


def _gated(tensors: Mapping[str, Tensor]) -> bool:
    fc1, fc2 = (tensors[f"blocks.0.mlp.{part}.weight"] for part in ("fc1", "fc2"))
    return fc1.shape[0] == 2 * fc2.shape[1]
