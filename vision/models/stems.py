"""Stems: from pixels to a grid of tokens."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.config import pair
from vision.models.configs import ViTConfig
from vision.models.layers import Grid, ceil_div, pad_to_multiple


class PatchEmbed(nn.Module):
    """Patches of an image, each mapped to a token, by a convolution whose stride is its kernel."""

    def __init__(self, channels: int, width: int, patch: Grid, bias: bool = True) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch, bias=bias)

    def grid(self, size: Grid) -> Grid:
        """The grid of tokens of an image; an incomplete last patch counts."""
        return ceil_div(size[0], self.patch[0]), ceil_div(size[1], self.patch[1])

    def forward(self, images: Tensor, multiple: Grid = (1, 1)) -> Tensor:
        """(b channels height width) → (b c y x), rounded up to multiples with zero pixels."""
        step = self.patch[0] * multiple[0], self.patch[1] * multiple[1]
        return self.proj(pad_to_multiple(images, step))


class NormedPatches(PatchEmbed):
    """LayerNorm of a patch's pixels, linear map, LayerNorm of the token (vit-pytorch)."""

    def __init__(self, config: ViTConfig, channels: int) -> None:
        patch = pair(config.patch_size)
        super().__init__(channels, config.width, patch)
        self.norm_before = nn.LayerNorm(channels * patch[0] * patch[1], eps=config.norm_eps)
        self.norm_after = nn.LayerNorm(config.width, eps=config.norm_eps)

    def forward(self, images: Tensor, multiple: tuple[int, int] = (1, 1)) -> Tensor:
        """(b channels height width) → (b c y x)"""
        p, q = self.patch
        images = pad_to_multiple(images, (p * multiple[0], q * multiple[1]))
        pixels = rearrange(images, "b c (y p) (x q) -> b y x (c p q)", p=p, q=q)
        tokens = F.linear(self.norm_before(pixels), self.proj.weight.flatten(1), self.proj.bias)
        return rearrange(self.norm_after(tokens), "b y x c -> b c y x")


def build_stem(config: ViTConfig, channels: int) -> PatchEmbed:
    """The stem of `config.stem`."""
    match config.stem:
        case "patch_normed":
            return NormedPatches(config, channels)
        case "patch" | "patch_no_bias" as kind:
            return PatchEmbed(channels, config.width, pair(config.patch_size), kind == "patch")


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
