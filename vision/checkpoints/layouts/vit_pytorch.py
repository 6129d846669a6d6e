"""vit-pytorch (lucidrains): `ViT` of all versions, and `SimpleViT`.

Its patches are vectors whose last axis is the channel, normed before and after their projection in
later versions; queries, keys and values have no bias. The versions differ in how deep a layer is
wrapped (`fn`), where the norm of an MLP lies, and whether the last norm belongs to the head.
"""

import re
from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts import biases, rules
from vision.checkpoints.layouts.rules import Converted, Rule, Usual
from vision.checkpoints.layouts.timm.timm_names import square_patch

_ATTENTION, _MLP = "transformer.layers.{i}.0", "transformer.layers.{i}.1"
SHARED = (
    Rule("cls_token", "cls_token"),
    Rule("positions.table", "pos_embedding"),
    Rule("blocks.{i}.norm1.*", f"{_ATTENTION}.norm.*"),
    Rule("blocks.{i}.attn.qkv.weight", f"{_ATTENTION}.to_qkv.weight"),
    Rule("blocks.{i}.attn.proj.*", f"{_ATTENTION}.to_out.0.*"),
    Rule("blocks.{i}.attn.proj.*", f"{_ATTENTION}.to_out.*"),
    Rule("norm.*", "transformer.norm.*"),
    Rule("norm.*", "mlp_head.0.*"),
    Rule("norm.*", "linear_head.0.*"),
    Rule("head.*", "mlp_head.*"),
    Rule("head.*", "mlp_head.1.*"),
    Rule("head.*", "linear_head.*"),
    Rule("head.*", "linear_head.1.*"),
)
NORM_INSIDE = (  # LayerNorm, Linear, GELU, (Dropout,) Linear
    Rule("blocks.{i}.norm2.*", f"{_MLP}.net.0.*"),
    Rule("blocks.{i}.mlp.fc1.*", f"{_MLP}.net.1.*"),
    Rule("blocks.{i}.mlp.fc2.*", f"{_MLP}.net.4.*"),
    Rule("blocks.{i}.mlp.fc2.*", f"{_MLP}.net.3.*"),
)
NORM_OUTSIDE = (  # Linear, GELU, Dropout, Linear, after a norm of their own
    Rule("blocks.{i}.norm2.*", f"{_MLP}.norm.*"),
    Rule("blocks.{i}.mlp.fc1.*", f"{_MLP}.net.0.*"),
    Rule("blocks.{i}.mlp.fc2.*", f"{_MLP}.net.3.*"),
)
_WRAPPED = re.compile(r"(transformer\.layers\.\d+\.\d)\.(?:fn\.)+")
_PATCHES = re.compile(r"(?:to_patch_embedding\.(\d)|patch_to_embedding)\.(weight|bias)")


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A ViT or SimpleViT of any version."""
    plain = {_WRAPPED.sub(r"\1.", name): tensor for name, tensor in tensors.items()}
    patches = {name: plain.pop(name) for name in list(plain) if _PATCHES.fullmatch(name)}
    inside = f"{_MLP}.net.0.weight".replace("{i}", "0")
    table = NORM_INSIDE if inside in plain and plain[inside].ndim == 1 else NORM_OUTSIDE
    result = rules.to_ours((*SHARED, *table), (), plain)
    own = result.tensors
    for name in ("cls_token", "positions.table"):
        if name in own:  # (1 n c), of late (n c)
            own[name] = own[name].reshape(1, -1, own[name].shape[-1])
    _patches(result, patches)
    _projections(result)
    result.facts |= {"norm_eps": 1e-5, "activation": "gelu"}
    _assume(result, normed_after="linear_head.0.weight" in plain)
    return biases.with_zero_biases(result)


def _patches(result: Converted, tensors: Mapping[str, Tensor]) -> None:
    """The layers from a patch's pixels, whose order is (row, column, channel), to its token."""
    weights = [name for name, tensor in tensors.items() if tensor.ndim == 2]
    if len(weights) != 1:
        raise CheckpointError(
            f"The weights are those of a variant of vit-pytorch: {len(weights)} layers project its "
            f"patches, not one."
        )
    side, channels = square_patch(tensors[weights[0]].shape[1])
    number = int((_PATCHES.fullmatch(weights[0]) or [0, 0])[1] or 0)
    parts = {number - 1: "norm_before", number: "proj", number + 1: "norm_after"}
    shape = {"p": side, "q": side, "c": channels}
    for name, tensor in tensors.items():
        match = _PATCHES.fullmatch(name)
        assert match is not None
        part = parts[int(match[1] or 0)]
        ours = f"patch_embed.{part}.{match[2]}"
        if part == "norm_before":
            tensor = rearrange(tensor, "(p q c) -> (c p q)", **shape)
        elif tensor.ndim == 2:
            tensor = rearrange(tensor, "o (p q c) -> o c p q", **shape)
        result.tensors[ours] = tensor.contiguous()
        result.changed[ours] = "laid out anew"
    reason = f"a patch has {side} × {side} pixels of {channels} channels if it is square"
    result.usual["patch_size"] = Usual(side, reason, (side,))


def _projections(result: Converted) -> None:
    """One head as wide as the model has no projection, which the identity amounts to."""
    own = result.tensors
    for name in [name for name in own if name.endswith(".attn.qkv.weight")]:
        ours = name.replace("qkv", "proj")
        if ours not in own:
            own[ours] = torch.eye(own[name].shape[1], dtype=own[name].dtype)
            result.changed[ours] = "the identity: a single head has no projection there"
            result.facts["heads"] = 1


def _assume(result: Converted, normed_after: bool) -> None:
    """Settings that leave no trace in the tensors."""
    own = result.tensors
    inner = own["blocks.0.attn.qkv.weight"].shape[0] // 3
    if "heads" not in result.facts and inner % 64 == 0:
        result.usual["heads"] = Usual(inner // 64, "dim_head is 64 by default in vit-pytorch")
    if "cls_token" in own:
        reason = (
            "the default of vit-pytorch; its pool='mean' also averages the class token, which no "
            "pooling here does"
        )
        result.usual["pool"] = Usual("class_token", reason, ("class_token",))
        return
    result.facts["pool"] = "mean"
    if "positions.table" not in own:  # SimpleViT
        result.facts["positions"] = "sincos2d"
    if normed_after:
        result.facts["pool_norm"] = "after"
