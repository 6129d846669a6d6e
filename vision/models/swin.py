"""The Swin Transformer (Liu et al., ICCV 2021), section by section of the paper.

An image is split into patches, each embedded as a token. In every stage tokens attend within
windows; the windows of every second block are shifted, so that neighbouring windows are connected.
Between stages 2 × 2 neighbouring tokens are merged into one of twice the width.

Tokens always lie window by window in memory (docs/decisions/0001-window-order.md). A shift, a merge
or the return to rows is therefore one gather, by indices that `vision/models/windows.py` derives
from the geometry.

Axes: b batch · w windows · t tokens of a window · n = w·t tokens of a grid in whole windows · c
width of a token (doubled from stage to stage) · h heads · d width of a head · y, x rows and columns
of the grid of a stage.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.models.attention import ObservedAttention, explicit_on_cpu
from vision.models.configs import AnySwinConfig
from vision.models.layers import (
    Classifier,
    Derived,
    DropPath,
    Grid,
    Mlp,
    drop_path_rates,
    init_norms,
    pad_to_multiple,
    run_block,
    trunc_normal,
    zero_branches,
)
from vision.models.positions.added import resize_table
from vision.models.stems import HiddenCells, build_stem
from vision.models.windows import (
    BlockWindows,
    StageShape,
    StageWindows,
    partition,
    relative_index,
    row_order,
    stage_shapes,
    stage_tensors,
    stage_windows,
    to_rows,
)


class WindowAttention(ObservedAttention):
    """Self-attention within windows, softmax(q kᵀ / √d + B) v: W-MSA and, between windows that were
    shifted, SW-MSA (section 3.2).
    """

    qkv_bias = True
    """Whether one bias vector of `qkv` serves queries, keys and values."""

    def __init__(
        self, config: AnySwinConfig, width: int, heads: int, stage: int, window: Grid
    ) -> None:
        super().__init__()
        self.held: tuple[Tensor | None, Tensor | None] | None = None
        """A mask and the bias that goes with it, while `static_bias` holds them."""
        self.heads, self.window, self.scale = heads, window, (width // heads) ** -0.5
        self.attention_dropout, self.dropout = config.attention_dropout, config.dropout
        self.qkv = nn.Linear(width, 3 * width, bias=self.qkv_bias)
        self.proj = nn.Linear(width, width)
        self.positioned = config.positions == "relative"
        if self.positioned:
            self.add_positions(config, stage)

    def add_positions(self, config: AnySwinConfig, stage: int) -> None:
        """Create the table of B: one row per offset between two tokens of a window."""
        rows = (2 * self.window[0] - 1) * (2 * self.window[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.empty(rows, self.heads))
        self.relative = Derived(relative_index, self.window)

    def position_bias(self) -> Tensor:
        """B of equation 4: (1 h t t)."""
        (index,) = self.relative(self.window)
        return self.by_pair(self.relative_position_bias_table, index)

    def by_pair(self, table: Tensor, index: Tensor) -> Tensor:
        """The rows of a table (offsets h) for every pair of tokens of a window: (1 h t t)."""
        # index_select, because the gradient of table[index] is not deterministic with several
        # threads.
        pairs = table.transpose(0, 1).index_select(1, index)
        return rearrange(pairs, "h (t s) -> 1 h t s", t=self.window[0] * self.window[1])

    def bias(self, mask: Tensor | None) -> Tensor | None:
        """The sum of position bias and mask: (w h t t), or (1 h t t) where windows are alike."""
        if self.held is not None and self.held[0] is mask:
            return self.held[1]
        if not self.positioned:
            return mask
        return self.position_bias() if mask is None else self.position_bias() + mask

    def init_positions(self, generator: torch.Generator) -> None:
        """Draw the bias table."""
        if self.positioned:
            trunc_normal(self.relative_position_bias_table, 0.02, generator)

    def project(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (b w·t c) → queries, keys and values of each window: (b·w h t d)."""
        tokens = self.window[0] * self.window[1]
        pattern = "b (w t) (three h d) -> three (b w) h t d"
        qkv = rearrange(self.qkv(x), pattern, t=tokens, three=3, h=self.heads)
        if explicit_on_cpu(qkv, bias):
            qkv = qkv.contiguous()  # one copy, where the matrix products would make three
        q, k, v = qkv.unbind(0)
        return q, k, v

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(b w·t c) → (b w·t c); each window attends to itself."""
        batch, bias = x.shape[0], self.bias(mask)
        q, k, v = self.project(x, bias)
        x = rearrange(self.attend(q, k, v, bias), "(b w) t c -> b (w t) c", b=batch)
        return F.dropout(self.proj(x), self.dropout, self.training)


class SwinBlock(nn.Module):
    """Pre-norm block: window attention, then MLP, each on a residual branch (equation 3)."""

    attention_class = WindowAttention

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
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attn = self.attention_class(config, width, heads, stage, window)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), config.dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, windows: BlockWindows) -> Tensor:
        """(b n c) → (b n c), in the order of this block's windows."""
        x = x + self.drop_path(self.attn(windows.zero_padding(self.norm1(x)), windows.mask))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchMerging(nn.Module):
    """Each group of 2 × 2 neighbouring tokens becomes one of twice the width (section 3.1)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width, eps=eps)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor, windows: StageWindows) -> Tensor:
        """Tokens (b 4·n c) of the previous stage → (b n 2·c), in this stage's plain windows."""
        return self.reduction(self.norm(windows.merge_neighbours(x)))


class Stage(nn.Module):
    """Blocks of one resolution, after a patch merging if it is not the first stage."""

    def __init__(
        self, downsample: nn.Module | None, blocks: list[SwinBlock], shape: StageShape
    ) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks: Any = nn.ModuleList(blocks)
        self.tensors = Derived(stage_tensors, shape)

    def windows(self, shape: StageShape) -> StageWindows:
        """The windows of this stage when its grid is of this shape."""
        return StageWindows(*self.tensors(shape))

    def forward(self, x: Tensor, shape: StageShape, recompute: bool) -> Tensor:
        """Tokens of the previous stage (of the first: embedded patches) → (b n c), in the windows
        of the last block.
        """
        windows = self.windows(shape)
        if self.downsample is not None:
            x = self.downsample(x, windows)
        # Section 3.2, "shifted window partitioning in successive blocks": plain and shifted windows
        # in turn. After a last, shifted block the way back is part of the next gather.
        for i, block in enumerate(self.blocks):
            if i > 0:
                x = windows.shift(x) if i % 2 else windows.shift_back(x)
            x = run_block(block, x, windows.of_block(i), recompute=recompute)
        return x

    def hold_biases(self) -> None:
        """Keep the biases of all blocks at the configured size; see `static_bias`."""
        windows = self.windows(self.tensors.geometry)
        for i, block in enumerate(self.blocks):
            mask = windows.of_block(i).mask
            block.attn.held = mask, block.attn.bias(mask)

    def drop_biases(self) -> None:
        """Compute biases in every forward pass again."""
        for block in self.blocks:
            block.attn.held = None


class Swin(Classifier):
    """Stages of window attention, each at half the resolution of the one before; a linear head on
    the mean of the tokens (figure 3).
    """

    block_class = SwinBlock
    merging_class: type[nn.Module] = PatchMerging
    undecayed = frozenset({"relative_position_bias_table", "absolute_pos_embed"})

    def __init__(
        self, config: AnySwinConfig, image_size: Grid, channels: int, classes: int
    ) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = build_stem(config, channels)
        self.patch_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.grid = self.patch_embed.grid(image_size)
        self.windows = stage_windows(config, image_size)
        table = torch.empty(1, self.grid[0] * self.grid[1], config.width)
        absolute = config.positions == "absolute"
        self.absolute_pos_embed = nn.Parameter(table) if absolute else None
        rates = drop_path_rates(config.drop_path, config.drop_path_schedule, sum(config.depths))
        shapes = self.shapes(self.grid)
        self.layers = nn.ModuleList(self._stage(s, shape, rates) for s, shape in enumerate(shapes))
        self.row_order = Derived(row_order, shapes[-1])
        width = self._width(len(config.depths) - 1)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.head: nn.Module = nn.Linear(width, classes) if classes else nn.Identity()

    def _width(self, stage: int) -> int:
        return self.config.width * 2**stage

    def _stage(self, s: int, shape: StageShape, rates: list[float]) -> Stage:
        config, first = self.config, sum(self.config.depths[:s])
        merging = self.merging_class(self._width(s - 1), config.norm_eps) if s else None
        blocks = [
            self.block_class(config, self._width(s), config.heads[s], s, shape.window, rate)
            for rate in rates[first : first + config.depths[s]]
        ]
        return Stage(merging, blocks, shape)

    def shapes(self, grid: Grid) -> list[StageShape]:
        """The geometry of every stage for a first grid. Windows keep their configured size."""
        return stage_shapes(self.config, self.windows, grid)

    def forward_features(self, images: Tensor, hidden: HiddenCells | None = None) -> Tensor:
        """Images (b channels height width) → normed tokens (b y·x c), row by row. `hidden`: patches
        that a token of pretraining stands for (SimMIM).
        """
        shapes = self.shapes(self.patch_embed.grid((images.shape[-2], images.shape[-1])))
        # Section 3.1: split the image into patches and embed each; padded to whole windows.
        x = self.patch_embed(images, multiple=self.windows[0])
        # Section 3.2: partition the grid into windows. Tokens stay in this order to the end.
        x = self.patch_norm(partition(x, self.windows[0]))
        if hidden is not None:
            x = hidden.replace(x, self.windows[0])
        if self.absolute_pos_embed is not None:
            x = x + self._absolute_positions(self.absolute_pos_embed, shapes[0])
        x = F.dropout(x, self.config.dropout, self.training)
        # Each stage merges patches (from the second on), then attends in plain and shifted windows.
        for stage, shape in zip(self.layers, shapes, strict=True):
            x = stage(x, shape, self.config.checkpoint_activations)
        return self.norm(to_rows(x, *self.row_order(shapes[-1])))

    def _absolute_positions(self, table: Tensor, shape: StageShape) -> Tensor:
        """The table at this grid, in plain window order, zero on padding: (1 n c)."""
        if shape.grid != self.grid:
            table = resize_table(table, self.grid, shape.grid)
        cells = rearrange(table, "one (y x) c -> one c y x", y=shape.grid[0])
        return partition(pad_to_multiple(cells, shape.window), shape.window)

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
        self.patch_embed.init_weights("uniform", generator)
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
        if self.config.initialization == "zero_residual":
            zero_branches(self)
