"""DeiT, distilled DeiT and DeiT-III: timm's names, but for layer scale.

The table of positions of DeiT-III has no row for the class token; that of a distilled DeiT has one
for the class token and one for the distillation token. Both show in its shape.
"""

from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.formats import rules
from vision.checkpoints.formats.rules import Converted, Rule
from vision.checkpoints.formats.timm import VIT, VIT_IGNORED

DEIT = (
    Rule("blocks.{i}.ls1.gamma", "blocks.{i}.gamma_1"),
    Rule("blocks.{i}.ls2.gamma", "blocks.{i}.gamma_2"),
    *VIT,
)


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A ViT of any of the three."""
    return rules.to_ours(DEIT, VIT_IGNORED, tensors)
