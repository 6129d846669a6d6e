"""Masked autoencoders: timm's names for the encoder, and a decoder that no classifier needs.

A fine-tuned MAE has no decoder and is timm's layout (`fc_norm` where it pools the mean).
"""

from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import IMAGENET, Converted, Ignored
from vision.checkpoints.layouts.timm.timm_names import VIT

IGNORED = (
    Ignored(r"decoder_.*", "the decoder of pretraining"),
    Ignored(r"mask_token", "stands for hidden patches in pretraining"),
)


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """The encoder."""
    result = rules.to_ours(VIT, IGNORED, tensors)
    result.preprocess |= IMAGENET | {"interpolation": "bicubic", "crop_ratio": 0.875}
    return result
