"""The layout of the official Swin and Swin V2 code, which is also timm's until 0.6.

The merging between two stages belongs to the end of the first one, not to the start of the second.
"""

from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import BUFFERS, IMAGENET, Converted, Rule
from vision.checkpoints.layouts.timm.timm_names import SWIN_BLOCK

SWIN = (
    Rule("patch_embed.proj.*", "patch_embed.proj.*"),
    Rule("patch_norm.*", "patch_embed.norm.*"),
    Rule("absolute_pos_embed", "absolute_pos_embed"),
    *SWIN_BLOCK,
    Rule("layers.{s}.downsample.norm.*", "layers.{s-1}.downsample.norm.*"),
    Rule("layers.{s}.downsample.reduction.*", "layers.{s-1}.downsample.reduction.*"),
    Rule("norm.*", "norm.*"),
    Rule("head.*", "head.*"),
)


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A Swin of either version."""
    result = rules.to_ours(SWIN, BUFFERS, tensors)
    result.preprocess |= IMAGENET | {"interpolation": "bicubic", "crop_ratio": 0.875}
    return result


def from_ours(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our Swin of either version, with what the official code stores beside the parameters."""
    return rules.from_ours(SWIN, tensors) | dict(buffers)
