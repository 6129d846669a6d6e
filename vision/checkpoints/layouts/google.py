"""Google's .npz files of ViT: the original ones, AugReg and big_vision, also with stacked layers.

They come from JAX, where a kernel's output axis is the last and queries, keys and values have axes
for head and channel. The counters in the names (`LayerNorm_2`, `MlpBlock_3`) run over all layers of
a block in old files and over layers of a kind in big_vision's.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.layouts import big_vision, rules
from vision.checkpoints.layouts.big_vision import DENSE, FLAT, FROM_HEADS, TO_HEADS, change
from vision.checkpoints.layouts.rules import Converted, Ignored, Rule

_BLOCK = "Transformer/encoderblock_{i}"


def _block(attention: str, second_norm: str, mlp: str) -> tuple[Rule, ...]:
    heads = f"{_BLOCK}/{attention}/{{query|key|value}}"
    return (
        Rule("blocks.{i}.norm1.weight", f"{_BLOCK}/LayerNorm_0/scale"),
        Rule("blocks.{i}.norm1.bias", f"{_BLOCK}/LayerNorm_0/bias"),
        Rule("blocks.{i}.attn.qkv.weight", f"{heads}/kernel", TO_HEADS),
        Rule("blocks.{i}.attn.qkv.bias", f"{heads}/bias", FLAT),
        Rule("blocks.{i}.attn.proj.weight", f"{_BLOCK}/{attention}/out/kernel", FROM_HEADS),
        Rule("blocks.{i}.attn.proj.bias", f"{_BLOCK}/{attention}/out/bias"),
        Rule("blocks.{i}.norm2.weight", f"{_BLOCK}/{second_norm}/scale"),
        Rule("blocks.{i}.norm2.bias", f"{_BLOCK}/{second_norm}/bias"),
        Rule("blocks.{i}.mlp.fc1.weight", f"{_BLOCK}/{mlp}/Dense_0/kernel", DENSE),
        Rule("blocks.{i}.mlp.fc1.bias", f"{_BLOCK}/{mlp}/Dense_0/bias"),
        Rule("blocks.{i}.mlp.fc2.weight", f"{_BLOCK}/{mlp}/Dense_1/kernel", DENSE),
        Rule("blocks.{i}.mlp.fc2.bias", f"{_BLOCK}/{mlp}/Dense_1/bias"),
    )


VIT = (
    Rule("patch_embed.proj.weight", "embedding/kernel", change("h w i o -> o i h w")),
    Rule("patch_embed.proj.bias", "embedding/bias"),
    Rule("cls_token", "cls"),
    Rule("positions.table", "Transformer/posembed_input/pos_embedding"),
    Rule("positions.table", "pos_embedding"),
    Rule("norm.weight", "Transformer/encoder_norm/scale"),
    Rule("norm.bias", "Transformer/encoder_norm/bias"),
    Rule("representation.weight", "pre_logits/kernel", DENSE),  # a tanh follows
    Rule("representation.bias", "pre_logits/bias"),
    Rule("head.weight", "head/kernel", DENSE),
    Rule("head.bias", "head/bias"),
)
ORIGINAL = _block("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
BIG_VISION = _block("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
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
    table = (*VIT, *big_vision.MAP_HEAD, *(ORIGINAL if old else BIG_VISION))
    result = rules.to_ours(table, IGNORED, plain)
    for name, tensor in plain.items():
        if name.endswith("/query/kernel"):
            result.facts["heads"] = tensor.shape[1]
    if not old:  # big_vision adds positions before it puts the class token in front
        result.facts["class_token_position"] = False
    if "pooling.latent" in result.tensors:
        result.facts |= big_vision.FACTS
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
