"""The Vision Transformer (Dosovitskiy et al., ICLR 2021, section 3.1), one picture in one sequence.

Axes: b batch · c width · n tokens (prefix tokens first, then patches row by row) · h heads · d
width of a head · y, x rows and columns of the patch grid.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.config import pair
from vision.models.attention import Observer, attention
from vision.models.configs import ViTConfig
from vision.models.layers import (
    Classifier,
    DropPath,
    Grid,
    Mlp,
    PatchEmbed,
    drop_path_rates,
    init_conv,
    init_norms,
    run_block,
    trunc_normal,
)
from vision.models.positions import (
    FourierPositions,
    LearnedPositions,
    RotaryPositions,
    SinCos2d,
    rotate,
)


class Attention(nn.Module):
    """Multi-head self-attention over all tokens of a picture."""

    observer: Observer | None = None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.scale = (config.width // config.heads) ** -0.5
        self.attention_dropout, self.dropout = config.attention_dropout, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(config.width // config.heads, eps=config.norm_eps)
            self.k_norm = nn.LayerNorm(config.width // config.heads, eps=config.norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """(b n c) → (b n c)"""
        q, k, v = rearrange(
            self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads
        ).unbind(0)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        x = attention(
            q,
            k,
            v,
            scale=self.scale,
            dropout=self.attention_dropout if self.training else 0.0,
            observer=self.observer,
        )
        return F.dropout(self.proj(x), self.dropout, self.training)


class LayerScale(nn.Module):
    """A learned factor per channel of a residual branch (Touvron et al., ICCV 2021)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """(b n c) → (b n c)"""
        return x * self.gamma


class SwiGlu(nn.Module):
    """A perceptron whose hidden layer is gated by a SiLU (Shazeer, 2020)."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """(b n c) → (b n c)"""
        gate, x = self.fc1(x).chunk(2, dim=-1)
        x = F.dropout(F.silu(gate) * x, self.dropout, self.training)
        return F.dropout(self.fc2(x), self.dropout, self.training)


class Block(nn.Module):
    """Pre-norm encoder block: attention, then MLP, each on a residual branch."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        width, scale = config.width, config.layer_scale
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ls1 = nn.Identity() if scale is None else LayerScale(width, scale)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        perceptron = SwiGlu if config.mlp == "swiglu" else Mlp
        self.mlp = perceptron(width, int(width * config.mlp_ratio), config.dropout)
        self.ls2 = nn.Identity() if scale is None else LayerScale(width, scale)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """(b n c) → (b n c)"""
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), rotation)))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


class ViT(Classifier):
    """Patches, a class token and positions through `depth` blocks; a linear head on the pooled
    tokens.
    """

    undecayed = frozenset({"cls_token", "dist_token", "reg_token", "table"})

    def __init__(self, config: ViTConfig, image_size: Grid, channels: int, classes: int) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patch_embed = PatchEmbed(channels, width, pair(config.patch_size))
        self.grid = self.patch_embed.grid(image_size)
        self.cls_token = _tokens(int(config.class_token), width)
        self.dist_token = _tokens(int(config.distillation_token), width)
        self.reg_token = _tokens(config.registers, width)
        self.prefix = int(config.class_token) + int(config.distillation_token) + config.registers
        self.positions = self._positions()
        rates = drop_path_rates(config.drop_path, config.drop_path_schedule, config.depth)
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        pooled = 2 * width if config.pool == "class_token_and_mean" else width
        self.head: nn.Module = nn.Linear(pooled, classes) if classes else nn.Identity()
        self.head_dist: nn.Module | None = None
        if config.distillation_token:
            self.head_dist = nn.Linear(width, classes) if classes else nn.Identity()

    def _positions(self) -> nn.Module | None:
        config = self.config
        match config.positions:
            case "learned":
                rows = int(config.class_token) + int(config.distillation_token)
                rows = rows if config.class_token_position else 0
                return LearnedPositions(self.grid, config.width, rows)
            case "sincos2d":
                return SinCos2d(self.grid, config.width)
            case "fourier":
                return FourierPositions(self.grid, config.width)
            case "rotary":
                return RotaryPositions(self.grid, config.width // config.heads, self.prefix)
            case "none":
                return None

    def forward_features(self, images: Tensor) -> Tensor:
        """Images (b channels height width) → tokens (b n c), normed unless the norm follows the
        pooling.
        """
        x = self.patch_embed(images)
        grid = (x.shape[-2], x.shape[-1])
        x = self._embed(rearrange(x, "b c y x -> b (y x) c"), grid)
        x = F.dropout(x, self.config.dropout, self.training)
        turns = isinstance(self.positions, RotaryPositions)
        rotation = self.positions(grid) if turns and self.positions is not None else None
        for block in self.blocks:
            x = run_block(block, x, rotation, recompute=self.config.checkpoint_activations)
        return x if self._norm_after_pool else self.norm(x)

    def _embed(self, patches: Tensor, grid: Grid) -> Tensor:
        """Patches (b y·x c) with positions and prefix tokens: class token, distillation token,
        registers, patches.
        """
        batch = patches.shape[0]
        tokens = (self.cls_token, self.dist_token, self.reg_token)
        prefix = [t.expand(batch, -1, -1) for t in tokens if t is not None]
        if self.positions is None or isinstance(self.positions, RotaryPositions):
            return torch.cat([*prefix, patches], dim=1) if prefix else patches
        table = self.positions(grid)
        if table.shape[1] == patches.shape[1]:
            return torch.cat([*prefix, patches + table], dim=1) if prefix else patches + table
        # The table has a row for the class token, and one for the distillation token if there is
        # one; registers have no position and come in between.
        rows = table.shape[1] - patches.shape[1]
        x = torch.cat([*prefix[:rows], patches], dim=1) + table
        return torch.cat([x[:, :rows], *prefix[rows:], x[:, rows:]], dim=1) if prefix[rows:] else x

    def pool(self, features: Tensor) -> Tensor:
        """Tokens (b n c) → (b c), normed; two vectors side by side where the head takes two."""
        match self.config.pool:
            case "class_token" if self.head_dist is not None:
                x = features[:, :2]
            case "class_token":
                x = features[:, 0]
            case "mean":
                x = features[:, self.prefix :].mean(dim=1)
            case "class_token_and_mean":
                x = torch.stack([features[:, 0], features[:, self.prefix :].mean(dim=1)], dim=1)
        return (self.norm(x) if self._norm_after_pool else x).flatten(1)

    def classify(self, pooled: Tensor) -> Tensor:
        """Pooled tokens → logits (b classes); of two heads the mean."""
        if self.head_dist is None:
            return self.head(pooled)
        first, second = pooled.chunk(2, dim=1)
        return (self.head(first) + self.head_dist(second)) / 2

    @property
    def _norm_after_pool(self) -> bool:
        return self.config.pool_norm == "after"

    def layer_of(self, parameter: str) -> int:
        """0: embedding; i: block i - 1; `depth + 1`: last norm and head."""
        part, _, rest = parameter.partition(".")
        if part == "blocks":
            return int(rest.split(".")[0]) + 1
        return len(self.blocks) + 1 if part in ("norm", "head", "head_dist") else 0

    def init_weights(self, generator: torch.Generator) -> None:
        """As in DeiT (`trunc_normal`), or as in the ViT paper's own code (`xavier`)."""
        xavier = self.config.initialization == "xavier"
        init_conv(self.patch_embed.proj, "lecun" if xavier else "uniform", generator)
        init_norms(self)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                _init_linear(name, module, xavier, generator)
            elif isinstance(module, LayerScale):
                nn.init.constant_(module.gamma, module.start)
        if self.positions is not None:
            self.positions.init_weights(generator)  # type: ignore[operator]
        if self.cls_token is not None and xavier:
            nn.init.zeros_(self.cls_token)
        elif self.cls_token is not None:
            trunc_normal(self.cls_token, 0.02, generator)
        if self.reg_token is not None:
            trunc_normal(self.reg_token, 1e-6, generator)
        if self.dist_token is not None:
            trunc_normal(self.dist_token, 0.02, generator)
        for head in (self.head, self.head_dist):
            if xavier and isinstance(head, nn.Linear):
                nn.init.zeros_(head.weight)


def _tokens(count: int, width: int) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(1, count, width)) if count else None


def _init_linear(name: str, linear: nn.Linear, xavier: bool, generator: torch.Generator) -> None:
    nn.init.zeros_(linear.bias)
    if not xavier:
        trunc_normal(linear.weight, 0.02, generator)
        return
    # Queries, keys and values each on their own: as one layer the bound would be √2 too small.
    parts = linear.weight.chunk(3) if name.endswith(".qkv") else (linear.weight,)
    for part in parts:
        nn.init.xavier_uniform_(part, generator=generator)
    if ".mlp." in name:
        nn.init.normal_(linear.bias, std=1e-6, generator=generator)
