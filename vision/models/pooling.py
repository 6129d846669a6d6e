"""Poolings of a ViT, from tokens to the input of its head: one small class for each `pool`."""

import torch
from einops import rearrange
from torch import Tensor, nn

from vision.models.attention import ObservedAttention
from vision.models.configs import ViTConfig
from vision.models.layers import Mlp


class Pooling(nn.Module):
    """From tokens to the input of the head.

    forward: tokens (b n c), prefix tokens first → vectors (b k c), side by side for the head.
    """

    vectors = 1
    """Number of vectors of each image."""


class FirstTokens(Pooling):
    """The class token, and the distillation token after it."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.vectors = tokens

    def forward(self, tokens: Tensor) -> Tensor:
        """(b n c) → (b k c)"""
        return tokens[:, : self.vectors]


class PatchMean(Pooling):
    """The mean of the patches."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Tensor) -> Tensor:
        """(b n c) → (b 1 c)"""
        return tokens[:, self.prefix :].mean(dim=1, keepdim=True)


class FirstTokenAndMean(PatchMean):
    """The class token and the mean of the patches (DINOv2)."""

    vectors = 2

    def forward(self, tokens: Tensor) -> Tensor:
        """(b n c) → (b 2 c)"""
        return torch.cat([tokens[:, :1], super().forward(tokens)], dim=1)


class AttentionPool(ObservedAttention, Pooling):
    """Attention of a learned query to class token and patches, then a residual MLP (the MAP head of
    Set Transformer, Lee et al., ICML 2019; SigLIP, Zhai et al., ICCV 2023).
    """

    def __init__(self, config: ViTConfig, prefix: int) -> None:
        super().__init__()
        width, self.registers = config.width, range(prefix - config.registers, prefix)
        self.heads = config.pool_heads or config.heads
        self.scale = (width // self.heads) ** -0.5
        self.latent = nn.Parameter(torch.empty(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        hidden = int(width * (config.pool_mlp_ratio or config.mlp_ratio))
        self.mlp = Mlp(width, hidden, config.dropout, config.activation)

    def forward(self, tokens: Tensor) -> Tensor:
        """(b n c) → (b 1 c)"""
        if self.registers:
            before, after = tokens[:, : self.registers.start], tokens[:, self.registers.stop :]
            tokens = torch.cat([before, after], dim=1)
        query = self.q(self.latent).expand(tokens.shape[0], -1, -1)
        q = rearrange(query, "b one (h d) -> b h one d", h=self.heads)
        k, v = rearrange(self.kv(tokens), "b n (two h d) -> two b h n d", two=2, h=self.heads)
        x = self.proj(self.attend(q, k, v))
        return x + self.mlp(self.norm(x))


def build_pooling(config: ViTConfig, prefix: int) -> Pooling:
    """The pooling of `config.pool`, for tokens of which `prefix` come before the patches."""
    match config.pool:
        case "class_token":
            return FirstTokens(1 + int(config.distillation_token))
        case "mean":
            return PatchMean(prefix)
        case "class_token_and_mean":
            return FirstTokenAndMean(prefix)
        case "attention":
            return AttentionPool(config, prefix)
