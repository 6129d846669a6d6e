"""Google's .npz files of ViT: the original ones, AugReg and big_vision, also with stacked layers.

They come from JAX, where a kernel's output axis is the last and queries, keys and values have axes
for head and channel. The counters in the names (`LayerNorm_2`, `MlpBlock_3`) run over all layers of
a block in old files and over layers of a kind in big_vision's.
"""

import re
from collections.abc import Mapping

from einops import rearrange
from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import Change, Converted, Ignored, Rule


def _change(pattern: str) -> Change:
    """A rearrangement of axes; the result has a memory of its own, in the usual order."""
    return Change(lambda tensor: rearrange(tensor, pattern).contiguous())


DENSE = _change("i o -> o i")
TO_HEADS = _change("i h d -> (h d) i")
FROM_HEADS = _change("h d o -> o (h d)")
FLAT = _change("h d -> (h d)")
_BLOCK = "Transformer/encoderblock_{i}"


def _linear(
    ours: str, theirs: str, kernel: Change = DENSE, bias: Change | None = None
) -> tuple[Rule, ...]:
    weight = Rule(f"{ours}.weight", f"{theirs}/kernel", kernel)
    return weight, Rule(f"{ours}.bias", f"{theirs}/bias", bias)


def _norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    return Rule(f"{ours}.weight", f"{theirs}/scale"), Rule(f"{ours}.bias", f"{theirs}/bias")


def _mlp(ours: str, theirs: str) -> tuple[Rule, ...]:
    first, second = (
        _linear(f"{ours}.fc1", f"{theirs}/Dense_0"),
        _linear(f"{ours}.fc2", f"{theirs}/Dense_1"),
    )
    return (*first, *second)


def _block(attention: str, second_norm: str, mlp: str) -> tuple[Rule, ...]:
    heads = f"{_BLOCK}/{attention}/{{query|key|value}}"
    return (
        *_norm("blocks.{i}.norm1", f"{_BLOCK}/LayerNorm_0"),
        *_linear("blocks.{i}.attn.qkv", heads, TO_HEADS, FLAT),
        *_linear("blocks.{i}.attn.proj", f"{_BLOCK}/{attention}/out", FROM_HEADS),
        *_norm("blocks.{i}.norm2", f"{_BLOCK}/{second_norm}"),
        *_mlp("blocks.{i}.mlp", f"{_BLOCK}/{mlp}"),
    )


VIT = (
    *_linear("patch_embed.proj", "embedding", _change("h w i o -> o i h w")),
    Rule("cls_token", "cls"),
    Rule("positions.table", "Transformer/posembed_input/pos_embedding"),
    Rule("positions.table", "pos_embedding"),
    *_norm("norm", "Transformer/encoder_norm"),
    *_linear("representation", "pre_logits"),  # a tanh follows
    *_linear("head", "head"),
)
ORIGINAL = _block("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
BIG_VISION = _block("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
_ATTENTION = "MAPHead_0/MultiHeadDotProductAttention_0"
MAP_HEAD = (
    Rule("pooling.latent", "MAPHead_0/probe"),
    *_linear("pooling.q", f"{_ATTENTION}/query", TO_HEADS, FLAT),
    *_linear("pooling.kv", f"{_ATTENTION}/{{key|value}}", TO_HEADS, FLAT),
    *_linear("pooling.proj", f"{_ATTENTION}/out", FROM_HEADS),
    *_norm("pooling.norm", "MAPHead_0/LayerNorm_0"),
    *_mlp("pooling.mlp", "MAPHead_0/MlpBlock_0"),
)
"""big_vision's attention pooling, as in its files of SigLIP."""
IGNORED = (
    Ignored(r"opt/.*", "the state of the optimiser"),
    Ignored(r"params/.*|txt/.*|t|b", "another part of the model, not its image tower"),
)
_PREFIXES = ("opt/target/", "params/img/", "params/", "img/")
_STACKED = re.compile(r"Transformer/encoderblock/")


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A ViT in any of the four layouts."""
    prefix = next((p for p in _PREFIXES if f"{p}embedding/kernel" in tensors), "")
    plain = _unstacked({name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    old = any("/MlpBlock_3/" in name for name in plain)
    table = (*VIT, *MAP_HEAD, *(ORIGINAL if old else BIG_VISION))
    result = rules.to_ours(table, IGNORED, plain)
    for name, tensor in plain.items():
        if name.endswith("/query/kernel"):
            result.facts["heads"] = tensor.shape[1]
    if not old:  # big_vision adds positions before it puts the class token in front
        result.facts["class_token_position"] = False
    if "pooling.latent" in result.tensors:  # flax approximates gelu
        result.facts |= {"pool": "attention", "activation": "gelu_tanh", "norm_eps": 1e-6}
    elif "cls_token" not in result.tensors:
        result.facts |= {"pool": "mean", "pool_norm": "before"}
    result.preprocess |= {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    return result


def _unstacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layers that were trained as one loop have an axis in front that counts them."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not _STACKED.match(name) or tensor.ndim < 2:
            result[name] = tensor
            continue
        for index, layer in enumerate(tensor):
            result[_STACKED.sub(f"Transformer/encoderblock_{index}/", name)] = layer
    return result
