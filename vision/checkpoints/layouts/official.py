"""The layout of the official Swin and Swin V2 code, which is also timm's until 0.6.

The merging between two stages belongs to the end of the first one, not to the start of the second.
"""

from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import BUFFERS, IMAGENET, Converted, Rule, same, within
from vision.checkpoints.layouts.timm.timm_names import STAGE_BLOCK, SWIN_BLOCK

SWIN = (
    *same("patch_embed.proj.*", "absolute_pos_embed", "norm.*", "head.*"),
    Rule("patch_norm.*", "patch_embed.norm.*"),
    *within(STAGE_BLOCK, STAGE_BLOCK, SWIN_BLOCK),
    *within("layers.{s}.downsample", "layers.{s-1}.downsample", ("norm.*", "reduction.*")),
)


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A Swin of either version."""
    result = rules.to_ours(SWIN, BUFFERS, tensors)
    result.preprocess |= IMAGENET | {"interpolation": "bicubic", "crop_ratio": 0.875}
    return result
