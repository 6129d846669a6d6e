"""Masked autoencoders: timm's names for the encoder, and a decoder that no classifier needs.

A fine-tuned MAE has no decoder and is timm's layout (`fc_norm` where it pools the mean).
"""

from vision.checkpoints.layouts.rules import IMAGENET, Ignored, NameTable
from vision.checkpoints.layouts.timm.timm_names import VIT

IGNORED = (
    Ignored(r"decoder_.*", "the decoder of pretraining"),
    Ignored(r"mask_token", "stands for hidden patches in pretraining"),
)
to_ours = NameTable(VIT, IGNORED, IMAGENET | {"interpolation": "bicubic", "crop_ratio": 0.875})
