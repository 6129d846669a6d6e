"""Biases that a project leaves out or lays out in another way."""

import re

from torch import Tensor

from vision.checkpoints.layouts.rules import Converted

_BIASED = re.compile(
    r"(blocks\.\d+\.(norm[12]|attn\.(proj|q_norm|k_norm|norm)|mlp\.(fc1|norm|fc2))|norm|norm_pre"
    r"|patch_embed\.norm_\w+|pooling\.(q|kv|proj|norm|mlp\.fc[12])|representation|head(_dist)?)"
    r"\.weight"
)
"""Layers of a ViT that always have a bias here."""


def with_zero_biases(result: Converted) -> Converted:
    """Layers without a bias get one of zeros, which computes the same."""
    for name in [name for name in result.tensors if _BIASED.fullmatch(name)]:
        bias, weight = name.removesuffix("weight") + "bias", result.tensors[name]
        if bias not in result.tensors:
            result.tensors[bias] = weight.new_zeros(weight.shape[0])
            result.changed[bias] = "zeros: the file has no such bias"
    return result


def split_bias(result: Converted, name: str, bias: Tensor, how: str) -> None:
    """A bias of queries, keys and values under the names of a model whose keys have none."""
    queries, _, values = bias.chunk(3)
    place = name.removesuffix("qkv.bias")
    parts = {f"{place}q_bias": queries, f"{place}v_bias": values}
    result.tensors |= {part: tensor.clone() for part, tensor in parts.items()}
    result.changed |= dict.fromkeys(parts, how)
