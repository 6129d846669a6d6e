"""Stems of a ViT, from pixels to tokens: `PatchEmbed` of layers.py and its variants."""

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.config import pair
from vision.models.configs import ViTConfig
from vision.models.layers import PatchEmbed, pad_to_multiple


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
