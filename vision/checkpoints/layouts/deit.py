"""DeiT, distilled DeiT and DeiT-III: timm's names, but for layer scale.

The table of positions of DeiT-III has no row for the class token; that of a distilled DeiT has one
for the class token and one for the distillation token. Both show in its shape. timm's RoPE-ViT with
a table (vit_*_rope_ape) has exactly DeiT-III's tensors: `infer_vit.py` asks which of them it is.
"""

from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import IMAGENET, Converted
from vision.checkpoints.layouts.timm.timm_names import LAYER_SCALE, VIT

DEIT = (*LAYER_SCALE, *VIT)


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A ViT of any of the three."""
    result = rules.to_ours(DEIT, (), tensors)
    result.preprocess |= IMAGENET | {"interpolation": "bicubic"}
    return result
