"""Attention, one function with two paths that give the same output; and the poolings of a ViT, one
small class for each `pool`, the last of which attends.

Axes here and in the models: b batch · h heads · n, m tokens (queries, keys) · d width of a head · w
windows · t tokens of a window · c width of a token · y, x rows and columns of the token grid.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from vision.models.configs import ViTConfig
from vision.models.layers import Mlp

TRACED_DEVICE: ContextVar[str] = ContextVar("TRACED_DEVICE", default="cpu")
"""Type of the device whose path tensors on `meta` take."""

Observer = Callable[[Tensor], Tensor]
"""Takes the attention weights (b h n m) of a forward pass and returns those to continue with."""


class AttentionCall(NamedTuple):
    """The arguments of `F.scaled_dot_product_attention`, for those who do its work themselves."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@runtime_checkable
class Checker(Protocol):
    """An observer that also compares both paths on the same queries, keys and values."""

    def check(self, explicit: Tensor, fused: Callable[[], Tensor]) -> None:
        """Compare the output (b h n d) of the explicit path with that of the fused one."""
        ...


def width_of_head(config: ViTConfig) -> int:
    """Channels of a head."""
    return config.head_width or config.width // config.heads


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float,
    dropout: float = 0.0,
    observer: Observer | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ + bias) v, heads side by side.

    q, k, v: (b h n d). bias: (w h n n), where b is a multiple of w and runs over images first,
    windows second; w is 1 where all windows share one bias. Returns (b n (h d)).

    The fused path is the default. The explicit path serves an observer, which needs the weights,
    and training on a CPU where it is the faster one (`explicit_on_cpu`).
    """
    if observer is not None or explicit_on_cpu(q, bias):
        out = _explicit(q, k, v, bias, scale, dropout, observer)
        if isinstance(observer, Checker):
            observer.check(out, lambda: _fused(q, k, v, bias, scale, dropout))
    else:
        out = _fused(q, k, v, bias, scale, dropout)
    return rearrange(out, "b h n d -> b n (h d)")


class ObservedAttention(nn.Module):
    """A module that attends, with the observer of its weights and their dropout in training."""

    observer: Observer | None = None
    attention_dropout = 0.0
    scale: float

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """(b h n d) → (b n (h d)); see `attention`."""
        dropout = self.attention_dropout if self.training else 0.0
        return attention(q, k, v, bias, scale=self.scale, dropout=dropout, observer=self.observer)


def explicit_on_cpu(q: Tensor, bias: Tensor | None) -> bool:
    """Whether training on a CPU takes the explicit path: torch's fused CPU kernel has no gradient
    for a bias, and in bf16 it is the slower one by far (docs/results.md, benchmarks/attention.py).
    """
    device = q.device.type if q.device.type != "meta" else TRACED_DEVICE.get()
    if not torch.is_grad_enabled() or device != "cpu":
        return False
    learned = bias is not None and bias.requires_grad
    return learned or (q.requires_grad and q.dtype == torch.bfloat16)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    if bias is not None and bias.shape[0] > 1:
        bias = repeat(bias, "w h n m -> (b w) h n m", b=q.shape[0] // bias.shape[0])
    mask = None if bias is None else bias.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, scale=scale)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    dropout: float,
    observer: Observer | None,
) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    if bias is None:
        scores = scores * scale
    else:
        # bias + scale · scores in one pass; the images of the batch broadcast over the windows'
        # biases.
        windows = bias.shape[0]
        by_image = rearrange(scores, "(b w) h n m -> b w h n m", w=windows)
        scores = torch.add(bias, by_image, alpha=scale)
        scores = rearrange(scores, "b w h n m -> (b w) h n m")
    weights = scores.softmax(dim=-1)
    if observer is not None:
        weights = observer(weights)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights.to(v.dtype) @ v


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
