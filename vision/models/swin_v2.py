"""Swin Transformer V2 (Liu et al., CVPR 2022): the differences from `vision/models/swin.py`.

- Norms at the end of each residual branch (section 3.2, res-post-norm).
- Cosine attention with a learned scale per head (section 3.2, equation 2).
- A position bias that a small network computes from log-spaced offsets (section 3.3).
- A norm after, not before, the reduction of a patch merging (the official code).
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.models.configs import AnySwinConfig, SwinV2Config
from vision.models.layers import Derived, Grid, full_precision
from vision.models.lora import linear_with_bias
from vision.models.swin import Swin, SwinBlock, WindowAttention
from vision.models.windows import BlockWindows, StageWindows, relative_index


class WindowAttentionV2(WindowAttention):
    """Cosine attention within windows, with a continuous bias by log-spaced relative position."""

    qkv_bias = False  # there is one for queries and one for values, below

    def __init__(
        self, config: AnySwinConfig, width: int, heads: int, stage: int, window: Grid
    ) -> None:
        super().__init__(config, width, heads, stage, window)
        self.scale = 1.0  # the learned scale is part of the queries
        self.q_bias = nn.Parameter(torch.empty(width))
        self.no_k_bias = Derived(_zeros, width)
        self.v_bias = nn.Parameter(torch.empty(width))
        self.logit_scale = nn.Parameter(torch.empty(heads, 1, 1))

    def add_positions(self, config: AnySwinConfig, stage: int) -> None:
        """Create the network of section 3.3."""
        assert isinstance(config, SwinV2Config)
        trained = config.pretrained_window
        reference = self.window if trained is None else (trained[stage], trained[stage])
        self.relative = Derived(partial(_relative, reference), self.window)
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, self.heads, bias=False)
        )

    def position_bias(self) -> Tensor:
        """16 · sigmoid of the network's output for each offset: (1 h t t)."""
        index, offsets = self.relative(self.window)
        return self.by_pair(16 * full_precision(self.cpb_mlp(offsets)).sigmoid(), index)

    def init_positions(self, generator: torch.Generator) -> None:
        """Biases at zero, scale at 10; the position network is drawn with all other layers."""
        nn.init.zeros_(self.q_bias)
        nn.init.zeros_(self.v_bias)
        nn.init.constant_(self.logit_scale, math.log(10))

    def project(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (b w·t c) → queries, keys and values of each window: (b·w h t d)."""
        tokens, width = self.window[0] * self.window[1], x.shape[2]
        (no_k_bias,) = self.no_k_bias(width)
        qkv_bias = torch.cat([self.q_bias, no_k_bias, self.v_bias])
        qk, v = linear_with_bias(self.qkv, x, qkv_bias).split([2 * width, width], dim=2)
        pattern = "b (w t) (two h) d -> two (b w) h t d"
        q, k = rearrange(self._directions(qk), pattern, t=tokens, two=2).unbind(0)
        return q, k, rearrange(v, "b (w t) (h d) -> (b w) h t d", t=tokens, h=self.heads)

    def _directions(self, qk: Tensor) -> Tensor:
        """Queries of length `exp(logit_scale)` and keys of length 1, in full precision.

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

    def forward(self, x: Tensor, windows: BlockWindows) -> Tensor:
        """(b n c) → (b n c), in the order of this block's windows."""
        x = x + self.drop_path(self.norm1(self.attn(windows.zero_padding(x), windows.mask)))
        return x + self.drop_path(self.norm2(self.mlp(x)))


class PatchMergingV2(nn.Module):
    """The same as in V1 with the norm at the end."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(2 * width, eps=eps)

    def forward(self, x: Tensor, windows: StageWindows) -> Tensor:
        """Tokens (b 4·n c) of the previous stage → (b n 2·c), in this stage's plain windows."""
        return self.norm(self.reduction(windows.merge_neighbours(x)))


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
    """Row of its offset for every pair of tokens of a window, and the offsets: sign(Δ) ·
    log₂(1 + 8|Δ|) / log₂ 8 (equation 4).

    Δ is in units of the window that the network was trained with. Single precision and this order
    of operations give the same offsets as every other Swin V2, to the last bit.
    """
    axes = [
        torch.arange(1 - size, size, device=device).float() / max(unit - 1, 1) * 8
        for size, unit in zip(window, reference, strict=True)
    ]
    offsets = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    offsets = offsets.sign() * torch.log2(offsets.abs() + 1) / math.log2(8)
    return *relative_index(window, device), offsets
