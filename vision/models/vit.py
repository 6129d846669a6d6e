"""The Vision Transformer (Dosovitskiy et al., ICLR 2021, section 3.1), one image in one sequence.

Stem, positions, rotations, perceptron and pooling are each a choice of the config and a small class
of their own; this file puts them together.

Axes: b batch · c width · n tokens (prefix tokens first, then patches row by row) · h heads · d
width of a head · y, x rows and columns of the patch grid.
"""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from vision.models.attention import AttentionPool, ObservedAttention, build_pooling, width_of_head
from vision.models.configs import ViTConfig
from vision.models.layers import (
    Classifier,
    DropPath,
    GatedMlp,
    Grid,
    Mlp,
    drop_path_rates,
    init_norms,
    run_block,
    trunc_normal,
    zero_branches,
)
from vision.models.lora import linear_with_bias
from vision.models.positions.added import added_positions
from vision.models.positions.relative import RelativeBias
from vision.models.positions.rotary import Rotation, rotary_positions, rotate
from vision.models.stems import HiddenCells, build_stem

HEAD = ("norm", "pooling", "representation", "projection", "head", "head_dist")
"""Modules after the last block."""


class Attention(ObservedAttention):
    """Multi-head self-attention over all tokens of an image."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        head_width, eps = width_of_head(config), config.norm_eps
        inner = config.heads * head_width
        self.heads, self.scale = config.heads, head_width**-0.5
        self.attention_dropout, self.dropout = config.attention_dropout, config.dropout
        self.qkv = nn.Linear(config.width, 3 * inner, bias=config.qkv_bias == "qkv")
        self.q_bias: nn.Parameter | None = None
        if config.qkv_bias == "qv":
            self.q_bias = nn.Parameter(torch.empty(inner))
            self.v_bias = nn.Parameter(torch.empty(inner))
        self.q_norm = nn.LayerNorm(head_width, eps=eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head_width, eps=eps) if config.qk_norm else nn.Identity()
        self.norm = nn.LayerNorm(inner, eps=eps) if config.attention_norm else nn.Identity()
        self.proj = nn.Linear(inner, config.width)

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """(b n c) → (b n c); `bias` (1 h n n) is added to the scores."""
        q, k, v = rearrange(
            self._qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads
        ).unbind(0)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        x = self.norm(self.attend(q, k, v, bias))
        return F.dropout(self.proj(x), self.dropout, self.training)

    def _qkv(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side: (b n 3·h·d)."""
        if self.q_bias is None:
            return self.qkv(x)
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        return linear_with_bias(self.qkv, x, bias)


class LayerScale(nn.Module):
    """A learned factor per channel of a residual branch (Touvron et al., ICCV 2021)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """(b n c) → (b n c)"""
        return x * self.gamma


class Block(nn.Module):
    """Pre-norm encoder block: attention, then MLP, each on a residual branch."""

    def __init__(self, config: ViTConfig, grid: Grid, drop_path: float) -> None:
        super().__init__()
        width, eps, scale = config.width, config.norm_eps, config.layer_scale
        self.norm1 = nn.LayerNorm(width, eps=eps)
        own = config.relative_bias == "block"
        self.relative = RelativeBias(grid, config.heads) if own else None
        self.attn = Attention(config)
        self.ls1 = nn.Identity() if scale is None else LayerScale(width, scale)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = (GatedMlp if config.mlp == "gated" else Mlp)(
            width,
            int(width * config.mlp_ratio),
            config.dropout,
            config.activation,
            eps if config.mlp_norm else None,
        )
        self.ls2 = nn.Identity() if scale is None else LayerScale(width, scale)
        self.drop_path = DropPath(drop_path)

    def forward(
        self, x: Tensor, grid: Grid, rotation: Rotation | None, bias: Tensor | None
    ) -> Tensor:
        """(b n c) → (b n c); `bias` is used unless the block has one of its own."""
        bias = bias if self.relative is None else self.relative(grid)
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), rotation, bias)))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


class PostNormBlock(Block):
    """Encoder block with the norm at the end of each residual branch (EVA-02-CLIP-E)."""

    def forward(
        self, x: Tensor, grid: Grid, rotation: Rotation | None, bias: Tensor | None
    ) -> Tensor:
        """(b n c) → (b n c)"""
        bias = bias if self.relative is None else self.relative(grid)
        x = x + self.drop_path(self.ls1(self.norm1(self.attn(x, rotation, bias))))
        return x + self.drop_path(self.ls2(self.norm2(self.mlp(x))))


class ViT(Classifier):
    """Patches, a class token and positions through `depth` blocks; a linear head on the pooled
    tokens.
    """

    undecayed = frozenset(
        {"cls_token", "dist_token", "reg_token", "table", "latent", "frequencies"}
    )

    def __init__(self, config: ViTConfig, image_size: Grid, channels: int, classes: int) -> None:
        super().__init__()
        self.config = config
        width, eps = config.width, config.norm_eps
        self.patch_embed = build_stem(config, channels)
        self.grid = self.patch_embed.grid(image_size)
        self.cls_token = _tokens(int(config.class_token), width)
        self.dist_token = _tokens(int(config.distillation_token), width)
        self.reg_token = _tokens(config.registers, width)
        self.prefix = int(config.class_token) + int(config.distillation_token) + config.registers
        self.positions = added_positions(config, self.grid)
        self.rotary = rotary_positions(config, self.grid, self.prefix) if config.turns else None
        shared = config.relative_bias == "shared"
        self.relative = RelativeBias(self.grid, config.heads) if shared else None
        self.norm_pre = nn.LayerNorm(width, eps=eps) if config.embedding_norm else nn.Identity()
        block = PostNormBlock if config.block_norm == "after" else Block
        rates = drop_path_rates(config.drop_path, config.drop_path_schedule, config.depth)
        self.blocks = nn.ModuleList(block(config, self.grid, rate) for rate in rates)
        self.norm = nn.Identity() if config.pool_norm == "none" else nn.LayerNorm(width, eps=eps)
        self.pooling = build_pooling(config, self.prefix)
        pooled = width if config.distillation_token else self.pooling.vectors * width
        hidden = config.representation or pooled
        self.representation = nn.Linear(pooled, hidden) if config.representation else None
        features = config.projection or hidden
        self.projection = nn.Linear(hidden, features, bias=False) if config.projection else None
        self.head = _head(features, classes)
        self.head_dist = _head(width, classes) if config.distillation_token else None

    def forward_features(self, images: Tensor, hidden: HiddenCells | None = None) -> Tensor:
        """Images (b channels height width) → tokens (b n c), normed unless the norm follows the
        pooling. `hidden`: patches that a token of pretraining stands for (SimMIM).
        """
        patches, grid = self._patches(images)
        patches = patches if hidden is None else hidden.replace(patches)
        x = self._encode(self._embed(patches, grid), grid)
        return x if self.config.pool_norm == "after" else self.norm(x)

    def forward_visible(self, images: Tensor, kept: Tensor) -> Tensor:
        """Normed tokens of images of which only the patches `kept` (b k) are seen (MAE):
        (b prefix + k c).
        """
        x = self._embed(*self._patches(images))
        prefix = torch.arange(self.prefix, device=kept.device).expand(len(kept), -1)
        kept = torch.cat([prefix, kept + self.prefix], dim=1)
        x = x.gather(1, repeat(kept, "b k -> b k c", c=x.shape[-1]))
        return self.norm(self._encode(x, self.grid, kept))

    def _patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Images → embedded patches (b y·x c) and their grid."""
        x = self.patch_embed(images)
        return rearrange(x, "b c y x -> b (y x) c"), (x.shape[-2], x.shape[-1])

    def _encode(self, x: Tensor, grid: Grid, kept: Tensor | None = None) -> Tensor:
        """All tokens of a grid, or those `kept` of each image, through the blocks."""
        x = self.norm_pre(F.dropout(x, self.config.dropout, self.training))
        rotations = [None] * len(self.blocks) if self.rotary is None else self.rotary(grid)
        bias = None if self.relative is None else self.relative(grid)
        for block, rotation in zip(self.blocks, rotations, strict=True):
            if rotation is not None and kept is not None:
                rotation = rotation.at(kept)
            recompute = self.config.checkpoint_activations
            x = run_block(block, x, grid, rotation, bias, recompute=recompute)
        return x

    def _embed(self, patches: Tensor, grid: Grid) -> Tensor:
        """Patches (b y·x c) with positions and prefix tokens: class token, distillation token,
        registers, patches.
        """
        batch = patches.shape[0]
        tokens = (self.cls_token, self.dist_token, self.reg_token)
        prefix = [t.expand(batch, -1, -1) for t in tokens if t is not None]
        if self.positions is None:
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
        """Tokens (b n c) → input of the head (b c); two vectors are put side by side."""
        x = self.pooling(features)
        x = (self.norm(x) if self.config.pool_norm == "after" else x).flatten(1)
        if self.representation is not None:
            x = torch.tanh(self.representation(x))
        return x if self.projection is None else self.projection(x)

    def classify(self, pooled: Tensor) -> Tensor:
        """Pooled tokens → logits (b classes), the mean of those of two heads."""
        if self.head_dist is None:
            return self.head(pooled)
        first, second = pooled.chunk(2, dim=1)
        return (self.head(first) + self.head_dist(second)) / 2

    def forward_heads(self, features: Tensor) -> Tensor:
        """Tokens (b n c) → logits of each head by itself (heads b classes)."""
        heads = self.heads()
        pooled = self.pool(features).chunk(len(heads), dim=1)
        return torch.stack([head(x) for head, x in zip(heads, pooled, strict=True)])

    def heads(self) -> list[nn.Module]:
        """The head, and the head of the distillation token if there is one."""
        return [self.head] if self.head_dist is None else [self.head, self.head_dist]

    def layer_of(self, parameter: str) -> int:
        """0: embedding; i: block i - 1; `depth + 1`: last norm, pooling and head."""
        part, _, rest = parameter.partition(".")
        if part == "blocks":
            return int(rest.split(".")[0]) + 1
        return len(self.blocks) + 1 if part in HEAD else 0

    def init_weights(self, generator: torch.Generator) -> None:
        """As in DeiT (`trunc_normal`), or as in the ViT paper's own code (`xavier`)."""
        xavier = self.config.initialization == "xavier"
        self.patch_embed.init_weights("lecun" if xavier else "uniform", generator)
        init_norms(self)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                _init_linear(name, module, xavier, generator)
            elif isinstance(module, LayerScale):
                nn.init.constant_(module.gamma, module.start)
            elif isinstance(module, Attention) and module.q_bias is not None:
                nn.init.zeros_(module.q_bias)
                nn.init.zeros_(module.v_bias)
            elif isinstance(module, AttentionPool):
                trunc_normal(module.latent, self.config.width**-0.5, generator)
            elif isinstance(module, RelativeBias):
                nn.init.zeros_(module.table)
        for positions in (self.positions, self.rotary):
            if positions is not None:
                positions.init_weights(generator)  # type: ignore[operator]
        if self.cls_token is not None and xavier:
            nn.init.zeros_(self.cls_token)
        elif self.cls_token is not None:
            trunc_normal(self.cls_token, 0.02, generator)
        for token, std in ((self.reg_token, 1e-6), (self.dist_token, 0.02)):
            if token is not None:
                trunc_normal(token, std, generator)
        for head in self.heads():
            if xavier and isinstance(head, nn.Linear):
                nn.init.zeros_(head.weight)
        if self.config.initialization == "zero_residual":
            zero_branches(self)


def _head(features: int, classes: int) -> nn.Module:
    return nn.Linear(features, classes) if classes else nn.Identity()


def _tokens(count: int, width: int) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(1, count, width)) if count else None


def _init_linear(name: str, linear: nn.Linear, xavier: bool, generator: torch.Generator) -> None:
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    if not xavier:
        trunc_normal(linear.weight, 0.02, generator)
        return
    # Queries, keys and values separately: as one layer the bound would be √2 too small.
    parts = linear.weight.chunk(3) if name.endswith(".qkv") else (linear.weight,)
    for part in parts:
        nn.init.xavier_uniform_(part, generator=generator)
    if ".mlp." in name:
        nn.init.normal_(linear.bias, std=1e-6, generator=generator)
