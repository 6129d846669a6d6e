"""ViTs that people write themselves around `nn.MultiheadAttention` or `nn.TransformerEncoder`.

Their tensors have the names that torch gives, below names of their authors' choice; the usual ones
are listed here. What such a program does between its layers leaves no trace: heads are asked for,
and so is all that the two kinds of `nn.TransformerEncoder` do not have in common.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts import biases
from vision.checkpoints.layouts.rules import Asked, Converted, Usual

_ANY = r"(?:\w+\.)*"
_BLOCK = rf"{_ANY}?(?P<i>\d+)\."
_KIND = r"\.(?P<kind>weight|bias)"
_MLP = r"(?:\w*(?:mlp|ffn?|feed_?forward|linear)\w*\.)+(?:net\.)?"
_NORM = r"(?:norm|ln|layer_?norm)"
_MODEL = r"(?:(?:\w*encoder\w*|transformer|vit|backbone)\.)*"
_TABLE = (
    ("blocks.{i}.attn.qkv.{kind}", rf"{_BLOCK}{_ANY}in_proj_(?P<kind>weight|bias)"),
    ("blocks.{i}.attn.proj.{kind}", rf"{_BLOCK}{_ANY}out_proj{_KIND}"),
    ("blocks.{i}.norm1.{kind}", rf"{_BLOCK}(?:{_NORM}_?1|(?:attn|attention)_{_NORM}){_KIND}"),
    ("blocks.{i}.norm1.{kind}", rf"{_BLOCK}(?:msa|attn|attention)_block\.{_NORM}{_KIND}"),
    ("blocks.{i}.norm2.{kind}", rf"{_BLOCK}(?:{_NORM}_?2|(?:mlp|ffn?)_{_NORM}){_KIND}"),
    ("blocks.{i}.norm2.{kind}", rf"{_BLOCK}(?:mlp|ffn?)_block\.{_NORM}{_KIND}"),
    ("blocks.{i}.mlp.fc1.{kind}", rf"{_BLOCK}(?:{_MLP})?(?:fc|linear|lin|dense)_?1{_KIND}"),
    ("blocks.{i}.mlp.fc2.{kind}", rf"{_BLOCK}(?:{_MLP})?(?:fc|linear|lin|dense)_?2{_KIND}"),
    ("blocks.{i}.mlp.fc1.{kind}", rf"{_BLOCK}{_MLP}0{_KIND}"),
    ("blocks.{i}.mlp.fc2.{kind}", rf"{_BLOCK}{_MLP}[23]{_KIND}"),
    ("blocks.{i}.ls1.gamma", rf"{_BLOCK}(?:ls|layer_?scale)_?1\.\w+"),
    ("blocks.{i}.ls2.gamma", rf"{_BLOCK}(?:ls|layer_?scale)_?2\.\w+"),
    ("cls_token", rf"{_ANY}(?:cls|class)_?(?:token|embedding|embed|emb)?"),
    (
        "positions.table",
        rf"{_ANY}pos(?:ition(?:al|s)?)?_?(?:embeddings?|embed|emb|encoding)(?:\.weight)?",
    ),
    ("norm_pre.{kind}", rf"{_ANY}(?:norm_pre|pre_norm|ln_pre){_KIND}"),
    (
        "patch_embed.proj.{kind}",
        rf"{_ANY}(?:patch\w*|to_patch\w*|conv_proj|input_layer|embedding)"
        rf"(?:\.(?:proj|projection|patcher|conv|linear|\d))?{_KIND}",
    ),
    ("norm.{kind}", rf"{_MODEL}(?:final_|encoder_)?{_NORM}(?:_f|_final|_post)?{_KIND}"),
    ("norm.{kind}", rf"(?:mlp_)?(?:heads?|classifier)\.0{_KIND}"),
    ("head.{kind}", rf"(?:mlp_)?(?:heads?|classifier)\.1{_KIND}"),
    (
        "head.{kind}",
        rf"(?:\w+_)?(?:heads?|classifier|fc|fc_out|linear_head)(?:\.(?:head|fc|linear))?{_KIND}",
    ),
)
_RULES = tuple((ours, re.compile(theirs)) for ours, theirs in _TABLE)


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A ViT with the usual names; the rest is unknown and can be renamed."""
    result = Converted({})
    for name, tensor in tensors.items():
        ours = _name(name, tensor)
        if ours is None:
            result.unknown[name] = tensor
            continue
        if ours in result.tensors:
            raise CheckpointError(
                f"'{name}' is the second tensor that could be '{ours}'. Rename one: rename=[…]."
            )
        if ours in ("cls_token", "positions.table"):
            tensor = tensor.reshape(1, -1, tensor.shape[-1])
        result.tensors[ours] = tensor
        result.changed[ours] = f"was '{name}'"
    _check_patches(result.tensors)
    if "cls_token" not in result.tensors and re.search(
        r"\.0\.", result.changed.get("norm.weight", "")
    ):
        result.facts["pool_norm"] = "after"  # the norm is part of the head
    _ask(result, any(re.fullmatch(rf"{_BLOCK}linear1\.weight", name) for name in tensors))
    return biases.with_zero_biases(result)


def _name(name: str, tensor: Tensor) -> str | None:
    """Our name of a tensor. A norm has one axis, and so have biases; all else has more."""
    for ours, pattern in _RULES:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        found = ours.format(**match.groupdict())
        flat = "norm" in found or found.endswith((".bias", ".gamma"))
        if flat == (tensor.ndim == 1) or found == "cls_token":
            return found
    return None


def _check_patches(tensors: Mapping[str, Tensor]) -> None:
    weight = tensors.get("patch_embed.proj.weight")
    if weight is not None and weight.ndim == 2:
        raise CheckpointError(
            f"The patches are vectors of {weight.shape[1]} numbers before a linear layer: in which "
            f"order their pixels come cannot be inferred. Store the weight as that of a "
            f"convolution, (width, channels, height, width of a patch), e.g. "
            f"weight.reshape(len(weight), channels, p, p) where channels come first."
        )


def _ask(result: Converted, encoder: bool) -> None:
    """Settings that leave no trace in the tensors."""
    if "cls_token" not in result.tensors:
        result.usual["pool"] = Usual("mean", "the weights have no class token")
    result.asked["heads"] = Asked(
        "Give the number of heads of nn.MultiheadAttention: model.heads=…."
    )
    result.usual["norm_eps"] = Usual(1e-5, "the default of nn.LayerNorm")
    if encoder:
        result.asked["block_norm"] = Asked(
            "nn.TransformerEncoderLayer has the same tensors with norm_first=True and with "
            "norm_first=False, PyTorch's default. The former is model.block_norm=before; the "
            "latter is a post-norm encoder, which no model here computes.",
            ("before",),
        )
        result.asked["activation"] = Asked(
            "Its activation is relu by default: model.activation=relu, or gelu where it was given."
        )
        return
    reason = "as in the ViT paper; norms after the residual sums are not available here"
    result.usual["block_norm"] = Usual("before", reason, ("before",))
    result.usual["activation"] = Usual("gelu", "as in the ViT paper; else give model.activation=…")
