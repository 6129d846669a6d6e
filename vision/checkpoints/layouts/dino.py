"""DINO and DINOv2: timm's names, but for registers, the gated MLP and what pretraining needs.

Registers stand between class token and patches and have no position, as here. A linear head of
DINOv2 sees the class token and the mean of the patches side by side.
"""

from vision.checkpoints.layouts.rules import IMAGENET, Ignored, NameTable, Rule
from vision.checkpoints.layouts.timm.timm_names import VIT

DINO = (
    Rule("reg_token", "register_tokens"),
    Rule("blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.w12.*"),
    Rule("blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.w3.*"),
    Rule("head.*", "linear_head.*"),
    *VIT,
)
IGNORED = (
    Ignored(r"mask_token", "stands for hidden patches in pretraining"),
    Ignored(r"(dino_|ibot_)?head\.(mlp|last_layer)\..*", "the head of pretraining"),
)
to_ours = NameTable(DINO, IGNORED, IMAGENET | {"interpolation": "bicubic", "crop_ratio": 0.875})
