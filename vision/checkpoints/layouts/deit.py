"""DeiT, distilled DeiT and DeiT-III: timm's names, but for layer scale.

The table of positions of DeiT-III has no row for the class token; that of a distilled DeiT has one
for the class token and one for the distillation token. Both show in its shape. timm's RoPE-ViT with
a table (vit_*_rope_ape) has exactly DeiT-III's tensors: `infer_vit.py` asks which of them it is.
"""

from vision.checkpoints.layouts.rules import IMAGENET, NameTable
from vision.checkpoints.layouts.timm.timm_names import LAYER_SCALE, VIT

to_ours = NameTable((*LAYER_SCALE, *VIT), preprocess=IMAGENET | {"interpolation": "bicubic"})
