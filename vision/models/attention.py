"""Attention: one function with two paths that give the same output.

Axes here and in the models: b batch · h heads · n, m tokens (queries, keys) · d width of a head · w
windows · t tokens of a window · c width of a token · y, x rows and columns of the token grid.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from vision.models.configs import ViTConfig

TRACED_DEVICE: ContextVar[str] = ContextVar("TRACED_DEVICE", default="cpu")
"""Type of the device whose path tensors on `meta` take."""

Observer = Callable[[Tensor], Tensor]
"""Takes the attention weights (b h n m) of a forward pass and returns those to continue with."""


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
