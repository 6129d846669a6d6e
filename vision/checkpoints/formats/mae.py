"""Masked autoencoders: timm's names for the encoder, and a decoder that no classifier needs.

A fine-tuned MAE has no decoder and is timm's layout (`fc_norm` where it pools the mean).
"""

from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.formats import rules
from vision.checkpoints.formats.rules import Converted, Ignored
from vision.checkpoints.formats.timm import VIT

IGNORED = (
    Ignored(r"decoder_.*", "the decoder of pretraining"),
    Ignored(r"mask_token", "stands for hidden patches in pretraining"),
)


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """The encoder."""
    return rules.to_ours(VIT, IGNORED, tensors)
