"""What the shapes of tensors under our names show of their model."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.models.layers import Grid


def need(tensors: Mapping[str, Tensor], name: str, axes: int) -> Tensor:
    """A tensor with this number of axes, or an error."""
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"the weights are not complete: '{name}' is missing.")
    if tensor.ndim != axes or 0 in tensor.shape:
        raise CheckpointError(
            f"'{name}' has the shape {tuple(tensor.shape)}; expected {axes} axes, none of length 0."
        )
    return tensor


class StemShape(NamedTuple):
    """What the tensors of a stem show."""

    kind: str
    """As in `model.stem`."""
    width: int
    channels: int
    patch: Grid


def stem_shape(tensors: Mapping[str, Tensor]) -> StemShape:
    """The stem that weights under our names belong to."""
    halvings = count(tensors, r"patch_embed\.norms\.(\d+)\.weight")
    if halvings > 10:
        raise CheckpointError(f"the stem has {halvings} norms; stems have at most 10.")
    if halvings:
        kind = "conv_whitened" if "patch_embed.whitening.weight" in tensors else "conv"
        first = "whitening" if kind == "conv_whitened" else "convs.0"
        width = need(tensors, f"patch_embed.norms.{halvings - 1}.weight", 1).shape[0]
        channels = need(tensors, f"patch_embed.{first}.weight", 4).shape[1]
        return StemShape(kind, width, channels, (2**halvings, 2**halvings))
    kind = "patch" if "patch_embed.proj.bias" in tensors else "patch_no_bias"
    kind = "patch_normed" if "patch_embed.norm_before.weight" in tensors else kind
    width, channels, *patch = need(tensors, "patch_embed.proj.weight", 4).shape
    return StemShape(kind, width, channels, (patch[0], patch[1]))


def gated_mlp(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the MLPs of a ViT are gated: they have twice the channels before their gate."""
    before, after = (need(tensors, f"blocks.0.mlp.{layer}.weight", 2) for layer in ("fc1", "fc2"))
    return before.shape[0] == 2 * after.shape[1]


def count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """The number of blocks or stages, counted from 0 without a gap in their names."""
    found = {int(match[1]) for name in tensors if (match := re.fullmatch(pattern, name))}
    if found != set(range(len(found))):
        gap = min(set(range(max(found))) - found)
        raise CheckpointError(f"block or stage {gap} is missing among the weights.")
    return len(found)


def mlp_ratio(hidden: int, width: int) -> float:
    """A ratio that gives back this number of channels when it is multiplied and rounded down."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
