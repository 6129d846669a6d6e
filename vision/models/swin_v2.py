"""Swin Transformer V2 (Liu et al., CVPR 2022): what differs from `vision/models/swin.py`.

Cosine attention with a learned scale, a position bias that a small network computes from log-spaced
offsets, norms at the end of each residual branch, and a norm after (not before) the reduction of a
patch merging.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.models.configs import SwinV2Config
from vision.models.layers import Derived, Grid, full_precision
from vision.models.lora import linear_with_bias
from vision.models.swin import Swin, SwinBlock, WindowAttention
from vision.models.windows import BlockWindows, relative_index


class WindowAttentionV2(WindowAttention):
    """Cosine attention within windows, with a continuous bias by log-spaced relative position."""

    def __init__(
        self, config: SwinV2Config, width: int, heads: int, stage: int, window: Grid
    ) -> None:
        nn.Module.__init__(self)
        self.heads, self.window = heads, window
        self.scale = 1.0  # the learned scale is part of the queries
        self.attention_dropout, self.dropout = config.attention_dropout, config.dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.empty(width))
        self.no_k_bias = Derived(_zeros, width)
        self.v_bias = nn.Parameter(torch.empty(width))
        self.proj = nn.Linear(width, width)
        self.logit_scale = nn.Parameter(torch.empty(heads, 1, 1))
        self.cpb_mlp: nn.Sequential | None = None
        if config.positions == "relative":
            trained = config.pretrained_window
            reference = window if trained is None else (trained[stage], trained[stage])
            self.relative = Derived(partial(_relative, reference), window)
            self.cpb_mlp = nn.Sequential(
                nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, heads, bias=False)
            )

    def bias(self, mask: Tensor | None) -> Tensor | None:
        """16 · sigmoid of the position network, and mask: (w h t t) or (1 h t t)."""
        if self.cpb_mlp is None:
            return mask
        index, offsets = self.relative(self.window)
        return self._by_pair(16 * full_precision(self.cpb_mlp(offsets)).sigmoid(), index, mask)

    def init_positions(self, generator: torch.Generator) -> None:
        """Biases at zero, scale at 10; the position network is drawn with all other layers."""
        nn.init.zeros_(self.q_bias)
        nn.init.zeros_(self.v_bias)
        nn.init.constant_(self.logit_scale, math.log(10))

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """(b w·t c) in window order → the same"""
        slots, tokens = x.shape[1], self.window[0] * self.window[1]
        (no_k_bias,) = self.no_k_bias(self.q_bias.shape[0])
        qkv_bias = torch.cat([self.q_bias, no_k_bias, self.v_bias])
        qkv = linear_with_bias(self.qkv, x, qkv_bias)
        qk, v = qkv.split([2 * x.shape[2], x.shape[2]], dim=2)
        q, k = rearrange(
            self._directions(qk), "b (w t) (two h) d -> two (b w) h t d", t=tokens, two=2
        ).unbind(0)
        v = rearrange(v, "b (w t) (h d) -> (b w) h t d", t=tokens, h=self.heads)
        return self._finish(self._attend(q, k, v, bias), slots)

    def _directions(self, qk: Tensor) -> Tensor:
        """Queries of length `exp(logit_scale)` and keys of length 1, made in full precision: (b n
        2·h d).

        One pass over queries and keys together; the scale is folded into the queries' norms.
        """
        vectors = rearrange(full_precision(qk), "b n (g d) -> b n g d", g=2 * self.heads)
        length = vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        log_scale = full_precision(self.logit_scale).view(-1, 1).clamp(max=math.log(100))
        shorter = F.pad(-log_scale, (0, 0, 0, self.heads)).exp()  # 1 for keys
        return (vectors / (length * shorter)).to(qk.dtype)


class SwinV2Block(SwinBlock):
    """Residual post-norm block."""

    attention_class = WindowAttentionV2

    def forward(self, x: Tensor, bias: Tensor | None, windows: BlockWindows) -> Tensor:
        """(b w·t c) in this block's window order → the same. `bias` is computed unless given."""
        bias = self.attn.bias(windows.mask) if bias is None else bias
        x = x + self.drop_path(self.norm1(self.attn(windows.zero_padding(x), bias)))
        return x + self.drop_path(self.norm2(self.mlp(x)))


class PatchMergingV2(nn.Module):
    """Four neighbouring tokens become one of twice the width, normed afterwards."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(2 * width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """(b n 4·c) → (b n 2·c)"""
        return self.norm(self.reduction(x))


class SwinV2(Swin):
    """Swin with V2's blocks and mergings."""

    block_class = SwinV2Block
    merging_class = PatchMergingV2
    undecayed = Swin.undecayed | {"logit_scale", "cpb_mlp"}

    def init_weights(self, generator: torch.Generator) -> None:
        """As in the official code: each residual branch starts at zero, through its norm."""
        super().init_weights(generator)
        for module in self.modules():
            if isinstance(module, SwinV2Block):
                for norm in (module.norm1, module.norm2):
                    nn.init.zeros_(norm.weight)
                    nn.init.zeros_(norm.bias)


def _zeros(width: int, device: torch.device) -> tuple[Tensor]:
    return (torch.zeros(width, device=device),)


def _relative(reference: Grid, window: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """For every pair of a window the row of its offset, and the offsets: sign · log₂(1 + 8|Δ|) /
    log₂ 8.

    Δ is in units of the window that the network was trained with. In single precision and in this
    order of operations, so that the offsets are those of every other Swin V2 to the last bit.
    """
    axes = [
        torch.arange(1 - size, size, device=device).float() / max(unit - 1, 1) * 8
        for size, unit in zip(window, reference, strict=True)
    ]
    offsets = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    offsets = offsets.sign() * torch.log2(offsets.abs() + 1) / math.log2(8)
    return *relative_index(window, device), offsets
