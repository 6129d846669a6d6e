"""The distributions that weights are drawn from."""

import math

import torch
from torch import Tensor, nn


def trunc_normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    """Draw from a normal distribution, cut at ±2 in absolute terms as DeiT and Swin do."""
    nn.init.trunc_normal_(tensor, std=std, generator=generator)


def init_norms(module: nn.Module) -> None:
    """Set every LayerNorm to the identity."""
    for m in module.modules():
        if isinstance(m, nn.LayerNorm):
            nn.init.ones_(m.weight)
            nn.init.zeros_(m.bias)


def init_conv(conv: nn.Conv2d, kind: str, generator: torch.Generator) -> None:
    """Draw a patch embedding.

    `lecun`: variance 1 / fan-in and no bias, as in the ViT paper's code. `uniform`: weight and bias
    within ±1 / √fan-in, torch's default, which DeiT and Swin left as it is.
    """
    bound = 1 / math.sqrt(conv.weight[0].numel())
    if kind == "uniform":
        nn.init.uniform_(conv.weight, -bound, bound, generator=generator)
        if conv.bias is not None:
            nn.init.uniform_(conv.bias, -bound, bound, generator=generator)
        return
    # A normal distribution cut at two deviations keeps this share of its standard deviation.
    std = bound / 0.87962566103423978
    nn.init.trunc_normal_(conv.weight, std=std, a=-2 * std, b=2 * std, generator=generator)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
