"""The layout of the official Swin and Swin V2 code, which is also timm's until 0.6.

The merging between two stages belongs to the end of the first one, not to the start of the second.
"""

from vision.checkpoints.layouts.rules import BUFFERS, IMAGENET, NameTable, Rule, same, within
from vision.checkpoints.layouts.timm.timm_names import STAGE_BLOCK, SWIN_BLOCK

SWIN = (
    *same("patch_embed.proj.*", "absolute_pos_embed", "norm.*", "head.*"),
    Rule("patch_norm.*", "patch_embed.norm.*"),
    *within(STAGE_BLOCK, STAGE_BLOCK, SWIN_BLOCK),
    *within("layers.{s}.downsample", "layers.{s-1}.downsample", ("norm.*", "reduction.*")),
)
to_ours = NameTable(SWIN, BUFFERS, IMAGENET | {"interpolation": "bicubic", "crop_ratio": 0.875})
