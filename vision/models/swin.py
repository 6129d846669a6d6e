"""The Swin Transformer (Liu et al., ICCV 2021), in window order (see `vision/models/windows.py`).

Axes: b batch · w windows · t tokens of a window · c width of a token (doubled from stage to stage)
· h heads · d width of a head · y, x rows and columns of the grid of a stage.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.config import pair
from vision.models.attention import Observer, attention, learns_on_cpu
from vision.models.configs import AnySwinConfig
from vision.models.initialization import init_conv, init_norms, trunc_normal
from vision.models.layers import (
    Classifier,
    Derived,
    DropPath,
    Grid,
    Mlp,
    PatchEmbed,
    drop_path_rates,
    pad_to_multiple,
    run_block,
)
from vision.models.positions.added import resize_table
from vision.models.windows import (
    BlockWindows,
    StageGeometry,
    StageIndex,
    StageShape,
    leave_stage,
    relative_index,
    shift_windows,
    stage_index,
    stage_shapes,
    stage_windows,
    unshift_windows,
)


class WindowAttention(nn.Module):
    """Multi-head self-attention within windows, with a learned bias per relative position."""

    observer: Observer | None = None

    def __init__(
        self, config: AnySwinConfig, width: int, heads: int, stage: int, window: Grid
    ) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.scale = (width // heads) ** -0.5
        self.attention_dropout, self.dropout = config.attention_dropout, config.dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.relative_position_bias_table: nn.Parameter | None = None
        if config.positions == "relative":
            rows = (2 * window[0] - 1) * (2 * window[1] - 1)
            self.relative_position_bias_table = nn.Parameter(torch.empty(rows, heads))
            self.relative = Derived(relative_index, window)

    def bias(self, mask: Tensor | None) -> Tensor | None:
        """What is added to the scores: relative positions and mask, (w h t t) or (1 h t t)."""
        if self.relative_position_bias_table is None:
            return mask
        (index,) = self.relative(self.window)
        return self._by_pair(self.relative_position_bias_table, index, mask)

    def _by_pair(self, table: Tensor, index: Tensor, mask: Tensor | None) -> Tensor:
        """The rows of a table (offsets h) laid out for every pair of a window's tokens, with the
        mask.
        """
        # index_select, because the gradient of table[index] is not deterministic with several
        # threads.
        pairs = table.transpose(0, 1).index_select(1, index)
        bias = rearrange(pairs, "h (t s) -> 1 h t s", t=self.window[0] * self.window[1])
        return bias if mask is None else bias + mask

    def init_positions(self, generator: torch.Generator) -> None:
        """Draw the bias table."""
        if self.relative_position_bias_table is not None:
            trunc_normal(self.relative_position_bias_table, 0.02, generator)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """(b w·t c) in window order → the same"""
        slots, tokens = x.shape[1], self.window[0] * self.window[1]
        qkv = rearrange(
            self.qkv(x),
            "b (w t) (three h d) -> three (b w) h t d",
            t=tokens,
            three=3,
            h=self.heads,
        )
        if learns_on_cpu(bias):
            qkv = qkv.contiguous()  # one copy, where the matrix products would make three
        q, k, v = qkv.unbind(0)
        return self._finish(self._attend(q, k, v, bias), slots)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        return attention(
            q,
            k,
            v,
            bias,
            scale=self.scale,
            dropout=self.attention_dropout if self.training else 0.0,
            observer=self.observer,
        )

    def _finish(self, x: Tensor, slots: int) -> Tensor:
        x = rearrange(x, "(b w) t c -> b (w t) c", w=slots // x.shape[1])
        return F.dropout(self.proj(x), self.dropout, self.training)


class SwinBlock(nn.Module):
    """Pre-norm block: window attention, then MLP, each on a residual branch."""

    attention_class: type[nn.Module] = WindowAttention

    def __init__(
        self,
        config: AnySwinConfig,
        width: int,
        heads: int,
        stage: int,
        window: Grid,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.static: Tensor | None = None
        """Bias and mask at the configured size, while `static_bias` holds them."""
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attn: Any = self.attention_class(config, width, heads, stage, window)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), config.dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, bias: Tensor | None, windows: BlockWindows) -> Tensor:
        """(b w·t c) in this block's window order → the same. `bias` is computed unless given."""
        bias = self.attn.bias(windows.mask) if bias is None else bias
        x = x + self.drop_path(self.attn(windows.zero_padding(self.norm1(x)), bias))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchMerging(nn.Module):
    """Four neighbouring tokens become one of twice the width."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width, eps=eps)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b n 4·c) → (b n 2·c)"""
        return self.reduction(self.norm(x))


class Stage(nn.Module):
    """Blocks of one resolution, plain and shifted windows in turn, after a merging if it is not the
    first.
    """

    def __init__(
        self,
        downsample: nn.Module | None,
        blocks: list[SwinBlock],
        shape: StageShape,
        following: StageShape | None,
    ) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.layout = Derived(stage_index, self.geometry(shape, following))

    def geometry(self, shape: StageShape, following: StageShape | None) -> StageGeometry:
        """This stage's geometry when its grid and the next stage's are of these shapes."""
        return StageGeometry(shape, following, ends_shifted=len(self.blocks) % 2 == 0)

    def forward(self, x: Tensor, geometry: StageGeometry, recompute: bool) -> Tensor:
        """(b n c), or (b n 4·c) before a merging, in plain window order → as the next stage takes
        them.
        """
        if self.downsample is not None:
            x = self.downsample(x)
        index = StageIndex(*self.layout(geometry))
        for i, block in enumerate(self.blocks):
            shifted = i % 2 == 1
            if i > 0:
                x = shift_windows(x, index) if shifted else unshift_windows(x, index)
            static = block.static if geometry == self.layout.geometry else None
            x = run_block(block, x, static, index.windows(shifted), recompute=recompute)
        return leave_stage(x, index)

    def hold_biases(self) -> None:
        """Keep the biases of all blocks at the configured size; see `static_bias`."""
        index = StageIndex(*self.layout(self.layout.geometry))
        for i, block in enumerate(self.blocks):
            block.static = block.attn.bias(index.windows(i % 2 == 1).mask)  # type: ignore

    def drop_biases(self) -> None:
        """Compute biases in every forward pass again."""
        for block in self.blocks:
            block.static = None  # type: ignore[assignment]


class Swin(Classifier):
    """Stages of window attention, each at half the resolution; a linear head on the mean of the
    tokens.
    """

    block_class: type[SwinBlock] = SwinBlock
    merging_class: type[nn.Module] = PatchMerging
    undecayed = frozenset({"relative_position_bias_table", "absolute_pos_embed"})

    def __init__(
        self, config: AnySwinConfig, image_size: Grid, channels: int, classes: int
    ) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(channels, config.width, pair(config.patch_size))
        self.patch_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.grid = self.patch_embed.grid(image_size)
        self.windows = stage_windows(config, image_size)
        self.absolute_pos_embed: nn.Parameter | None = None
        if config.positions == "absolute":
            cells = self.grid[0] * self.grid[1]
            self.absolute_pos_embed = nn.Parameter(torch.empty(1, cells, config.width))
        self.layers = nn.ModuleList(self._stages())
        width = self._width(len(config.depths) - 1)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.head: nn.Module = nn.Linear(width, classes) if classes else nn.Identity()

    def _width(self, stage: int) -> int:
        return self.config.width * 2**stage

    def shapes(self, grid: Grid) -> list[StageShape]:
        """The geometry of every stage for a first grid. Windows keep their configured size."""
        return stage_shapes(self.config, self.windows, grid)

    def _stages(self) -> Iterator[Stage]:
        config = self.config
        rates = iter(
            drop_path_rates(config.drop_path, config.drop_path_schedule, sum(config.depths))
        )
        shapes = self.shapes(self.grid)
        for s, (depth, heads) in enumerate(zip(config.depths, config.heads, strict=True)):
            blocks = [
                self.block_class(config, self._width(s), heads, s, self.windows[s], next(rates))
                for _ in range(depth)
            ]
            merging = self.merging_class(self._width(s - 1), config.norm_eps) if s else None
            yield Stage(merging, blocks, shapes[s], _following(shapes, s))

    def forward_features(self, images: Tensor) -> Tensor:
        """Images (b channels height width) → normed tokens (b y·x c), row by row."""
        grid = self.patch_embed.grid((images.shape[-2], images.shape[-1]))
        shapes = self.shapes(grid)
        h, w = self.windows[0]
        x = self.patch_embed(images, multiple=(h, w))
        x = self.patch_norm(rearrange(x, "b c (wy h) (wx w) -> b (wy wx h w) c", h=h, w=w))
        if self.absolute_pos_embed is not None:
            x = x + self._absolute_positions(self.absolute_pos_embed, shapes[0])
        x = F.dropout(x, self.config.dropout, self.training)
        for s, stage in enumerate(self.layers):
            assert isinstance(stage, Stage)
            geometry = stage.geometry(shapes[s], _following(shapes, s))
            x = stage(x, geometry, self.config.checkpoint_activations)
            if s + 1 < len(self.layers):
                x = rearrange(x, "b (n four) c -> b n (four c)", four=4)
        return self.norm(x)

    def _absolute_positions(self, table: Tensor, shape: StageShape) -> Tensor:
        """The table at this grid, in plain window order, zero on padding: (1 slots c)."""
        if shape.grid != self.grid:
            table = resize_table(table, self.grid, shape.grid)
        cells = rearrange(table, "one (y x) c -> one c y x", y=shape.grid[0])
        h, w = shape.window
        cells = pad_to_multiple(cells, shape.window)
        return rearrange(cells, "one c (wy h) (wx w) -> one (wy wx h w) c", h=h, w=w)

    def pool(self, features: Tensor) -> Tensor:
        """Tokens (b n c) → their mean (b c)"""
        return features.mean(dim=1)

    def layer_of(self, parameter: str) -> int:
        """0: embedding; then block by block, a merging with the block after it; last: norm and
        head.
        """
        part, _, rest = parameter.partition(".")
        depths = self.config.depths
        if part != "layers":
            return sum(depths) + 1 if part in ("norm", "head") else 0
        stage, kind, block = rest.split(".")[:3]
        before = sum(depths[: int(stage)])
        return before + 1 + (int(block) if kind == "blocks" else 0)

    def init_weights(self, generator: torch.Generator) -> None:
        """As in the official code: truncated normal of 0.02, patch embedding as torch draws it."""
        init_conv(self.patch_embed.proj, "uniform", generator)
        init_norms(self)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal(module.weight, 0.02, generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, WindowAttention):
                module.init_positions(generator)
        if self.absolute_pos_embed is not None:
            trunc_normal(self.absolute_pos_embed, 0.02, generator)


def _following(shapes: list[StageShape], stage: int) -> StageShape | None:
    return shapes[stage + 1] if stage + 1 < len(shapes) else None
