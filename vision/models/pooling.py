"""Attention pooling: a learned query decides what the head of a ViT sees."""

from einops import rearrange
from torch import Tensor, cat, empty, nn

from vision.models.attention import Observer, attention
from vision.models.configs import ViTConfig
from vision.models.layers import Mlp, Pooling


class AttentionPool(Pooling):
    """What a learned query attends to among class token and patches, then a residual MLP (the MAP
    head of Set Transformer, Lee et al., ICML 2019; SigLIP, Zhai et al., ICCV 2023).
    """

    observer: Observer | None = None

    def __init__(self, config: ViTConfig, prefix: int) -> None:
        super().__init__()
        width, self.registers = config.width, range(prefix - config.registers, prefix)
        self.heads = config.pool_heads or config.heads
        self.latent = nn.Parameter(empty(1, 1, width))
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
            tokens = cat([before, after], dim=1)
        query = self.q(self.latent).expand(tokens.shape[0], -1, -1)
        q = rearrange(query, "b one (h d) -> b h one d", h=self.heads)
        k, v = rearrange(self.kv(tokens), "b n (two h d) -> two b h n d", two=2, h=self.heads)
        x = attention(q, k, v, scale=q.shape[-1] ** -0.5, observer=self.observer)
        x = self.proj(x)
        return x + self.mlp(self.norm(x))
