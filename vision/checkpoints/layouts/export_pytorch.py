"""State dicts as torchvision's models and the official code of Swin and MAE load them."""

import torch
from torch import Tensor

from vision.checkpoints.layouts import rules, torchvision
from vision.checkpoints.layouts.exporting import (
    ANY,
    PLAIN_VIT,
    Export,
    Needs,
    check_settings,
    one_window,
    own_config,
    position_rows,
    refuse,
    shift_masks,
    swin_of,
    window_buffers,
    without_positions,
)
from vision.checkpoints.layouts.meta import MAE_DECODER
from vision.checkpoints.layouts.timm.timm_names import OFFICIAL_SWIN
from vision.checkpoints.layouts.timm.timm_names import VIT as TIMM_VIT
from vision.models.configs import SwinV2Config, ViTConfig
from vision.models.positions.added import SinCos2d
from vision.models.vit import ViT

VIT: Needs = {
    **PLAIN_VIT,
    "qkv_bias": ("qkv",),
    "representation": ANY,
    "activation": ("gelu",),
    "norm_eps": (1e-6,),
}
"""Settings of torchvision's ViT."""
MAE: Needs = {**PLAIN_VIT, "activation": ("gelu",), "pool": ANY, "pool_norm": ANY}
"""Settings of the official MAE's encoder; how it is pooled later is open."""


def torchvision_tensors(export: Export) -> dict[str, Tensor]:
    """The state dict of torchvision's VisionTransformer or SwinTransformer."""
    own = own_config(export)
    if isinstance(own, ViTConfig):
        check_settings(own, VIT, "torchvision", "its ViT")
        tensors = without_positions(export.tensors)
        tensors["positions.table"] = position_rows(export, 1)
        return rules.from_ours(torchvision.VIT, tensors)
    model, config = swin_of(export, "torchvision")
    if len(set(model.windows)) > 1:
        refuse(
            "torchvision",
            f"its windows {model.windows} shrink with the grid; there they keep their size",
        )
    if isinstance(config, SwinV2Config) and config.pretrained_window is not None:
        refuse("torchvision", "it was pretrained with other windows (pretrained_window)")
    if config.norm_eps != 1e-5:
        export.notes.append(f"norm_eps={config.norm_eps} here; torchvision's Swin has 1e-05.")
    return torchvision.swin_from_ours(export.tensors, window_buffers(model))


def official_tensors(export: Export) -> dict[str, Tensor]:
    """The state dict of the official Swin or Swin V2, buffers included."""
    if isinstance(own_config(export), ViTConfig):
        refuse(
            "official",
            "it is the layout of the Swin code; DeiT, DINO and MAE read a ViT in timm's names",
        )
    model, _ = swin_of(export, "official")
    window = one_window(model, "official")
    if window[0] != window[1]:
        refuse("official", f"its windows are square, not {list(window)}")
    buffers = {
        name: buffer if buffer.ndim > 1 else buffer.view(round(len(buffer) ** 0.5), -1)
        for name, buffer in window_buffers(model).items()
    }
    return rules.from_ours(OFFICIAL_SWIN, export.tensors) | buffers | shift_masks(model)


def mae_tensors(export: Export) -> dict[str, Tensor]:
    """The state dict of the official MAE in pretraining: encoder and decoder."""
    own, model, decoder = own_config(export), export.opened.model, dict(export.opened.decoder)
    if not isinstance(own, ViTConfig) or not isinstance(model, ViT):
        refuse("mae", "its encoder is a ViT")
    check_settings(own, MAE, "mae", "its encoder")
    if "embed.weight" not in decoder:
        refuse("mae", "it has no decoder of such pretraining; format=timm takes the encoder alone")
    if own.norm_eps != 1e-6:
        export.notes.append(f"norm_eps={own.norm_eps} here; MAE's ViT has 1e-06.")
    encoder = without_positions(export.tensors)
    encoder["positions.table"] = position_rows(export, 1)
    width = decoder["embed.weight"].shape[0]
    cells = SinCos2d(model.grid, width, open_end=True)(model.grid)
    decoder["positions.table"] = torch.cat([cells.new_zeros(1, 1, width), cells], dim=1)
    return rules.from_ours(TIMM_VIT, encoder) | rules.from_ours(MAE_DECODER, decoder)
