"""The Local Relation Network (Hu et al., ICCV 2019): a ResNet whose spatial convolutions are
replaced by local attention.

A convolution multiplies a neighbourhood by fixed weights. Here the weights of the neighbours are
computed: a softmax over how well each neighbour's key goes with the query of the pixel, and over
what a small network says of its offset (the geometric prior). Keys and queries are scalars, one
for each group of channels, and all channels of a group share the weights.

Unlike in the paper the norms are those of channels, since statistics of a batch would depend on
the number of processes.

Axes: b batch · y, x rows and columns of a grid · c width of a pixel · g groups of m channels that
share weights · i, j rows and columns of a neighbourhood.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.models.configs import LRNetConfig
from vision.models.layers import (
    Classifier,
    Derived,
    DropPath,
    Grid,
    drop_path_rates,
    full_precision,
    init_norms,
    run_block,
    trunc_normal,
)

_PRIOR_WIDTH = 32
"""Hidden width of the network of offsets, which the paper leaves open."""


class GeometricPrior(nn.Module):
    """A score for each offset of a neighbour, from a network of two layers (section 3.2)."""

    def __init__(self, side: int, groups: int) -> None:
        super().__init__()
        self.side = side
        self.offsets = Derived(_offsets, side)
        self.hidden = nn.Linear(2, _PRIOR_WIDTH)
        self.scores = nn.Linear(_PRIOR_WIDTH, groups)

    def forward(self) -> Tensor:
        """(g i·j)"""
        (offsets,) = self.offsets(self.side)
        return self.scores(F.relu(self.hidden(offsets))).T


class LocalRelation(nn.Module):
    """The local relation layer: each pixel becomes a mean of its neighbourhood, with weights
    softmax(Φ(query, key) + prior) (equation 2). The only layer in which pixels meet.
    """

    def __init__(self, config: LRNetConfig, width: int, stride: int) -> None:
        super().__init__()
        self.side, self.stride, self.relation = config.neighbourhood, stride, config.relation
        groups = width // config.share
        self.query = nn.Linear(width, groups)
        self.key = nn.Linear(width, groups)
        self.prior = GeometricPrior(self.side, groups) if config.geometric_prior else None

    def forward(self, x: Tensor) -> Tensor:
        """(b y x c) → (b y/stride x/stride c), rounded up"""
        weights = self.weights(x)
        groups = weights.shape[3]
        values = rearrange(self.neighbours(x), "b y x (g m) i j -> b y x g m (i j)", g=groups)
        mean = values @ weights[..., None].to(values.dtype)
        return rearrange(mean, "b y x g m 1 -> b y x (g m)")

    def weights(self, x: Tensor) -> Tensor:
        """Pixels (b y x c) → weights of their neighbours (b y/stride x/stride g i·j)"""
        query = self.query(x[:, :: self.stride, :: self.stride])[..., None]
        keys = self.neighbours(self.key(x)).flatten(-2)
        scores = self.relate(full_precision(query), full_precision(keys))
        if self.prior is not None:
            scores = scores + self.prior()
        # Neighbours beyond the border have no weight.
        inside = self.neighbours(x.new_ones(1, *x.shape[1:3], 1)).flatten(-2)
        return scores.masked_fill(inside == 0, -torch.inf).softmax(dim=-1)

    def relate(self, query: Tensor, keys: Tensor) -> Tensor:
        """Φ: the score of a neighbour by its appearance (equations 3 to 5)."""
        match self.relation:
            case "squared_difference":
                return -((query - keys) ** 2)
            case "absolute_difference":
                return -(query - keys).abs()
            case _:
                return query * keys

    def neighbours(self, x: Tensor) -> Tensor:
        """(b y x c) → (b y/stride x/stride c i j), zero beyond the border"""
        margin = self.side // 2
        x = F.pad(x, (0, 0, margin, margin, margin, margin))
        return x.unfold(1, self.side, self.stride).unfold(2, self.side, self.stride)


class RelationStem(nn.Module):
    """Two halvings: a linear map of each pixel and a local relation layer, in place of the 7 × 7
    convolution of a ResNet; then its max pooling.
    """

    def __init__(self, config: LRNetConfig, channels: int) -> None:
        super().__init__()
        self.proj = nn.Linear(channels, config.width)
        self.relation = LocalRelation(config, config.width, stride=2)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        """(b channels height width) → (b y x c)"""
        x = self.proj(rearrange(images, "b c y x -> b y x c"))
        x = rearrange(F.relu(self.norm(self.relation(x))), "b y x c -> b c y x")
        return rearrange(F.max_pool2d(x, 3, stride=2, padding=1), "b c y x -> b y x c")


class RelationBlock(nn.Module):
    """The bottleneck of a ResNet, with a local relation layer in place of the 3 × 3 convolution."""

    def __init__(
        self, config: LRNetConfig, before: int, width: int, stride: int, rate: float
    ) -> None:
        super().__init__()
        outer, eps = width * config.expansion, config.norm_eps
        self.stride = stride
        self.reduce = nn.Linear(before, width, bias=False)
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.relation = LocalRelation(config, width, stride)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.expand = nn.Linear(width, outer, bias=False)
        self.norm3 = nn.LayerNorm(outer, eps=eps)
        changed = stride > 1 or before != outer
        self.shortcut: nn.Module = (
            nn.Sequential(nn.Linear(before, outer, bias=False), nn.LayerNorm(outer, eps=eps))
            if changed
            else nn.Identity()
        )
        self.drop_path = DropPath(rate)

    def forward(self, x: Tensor) -> Tensor:
        """(b y x c) → (b y/stride x/stride c')"""
        branch = F.relu(self.norm1(self.reduce(x)))
        branch = F.relu(self.norm2(self.relation(branch)))
        branch = self.drop_path(self.norm3(self.expand(branch)))
        return F.relu(branch + self.shortcut(x[:, :: self.stride, :: self.stride]))


class RelationStage(nn.Module):
    """Blocks of one resolution; the first one halves the grid, except in the first stage."""

    def __init__(self, blocks: list[RelationBlock]) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)

    def forward(self, x: Tensor, recompute: bool) -> Tensor:
        """(b y x c) → (b y/stride x/stride c')"""
        for block in self.blocks:
            x = run_block(block, x, recompute=recompute)
        return x


class LRNet(Classifier):
    """A stem and stages of bottlenecks; a linear head on the mean of the pixels."""

    undecayed = frozenset({"prior"})

    def __init__(self, config: LRNetConfig, image_size: Grid, channels: int, classes: int) -> None:
        super().__init__()
        self.config = config
        self.stem = RelationStem(config, channels)
        rates = iter(drop_path_rates(config.drop_path, "linear", sum(config.depths)))
        stages, before = [], config.width
        for stage, depth in enumerate(config.depths):
            blocks, width = [], config.width * 2**stage
            for number in range(depth):
                stride = 2 if stage and number == 0 else 1
                blocks.append(RelationBlock(config, before, width, stride, next(rates)))
                before = width * config.expansion
            stages.append(RelationStage(blocks))
        self.layers = nn.ModuleList(stages)
        self.head: nn.Module = nn.Linear(before, classes) if classes else nn.Identity()

    def forward_features(self, images: Tensor) -> Tensor:
        """Images (b channels height width) → pixels of the last grid (b y·x c), row by row"""
        x = self.stem(images)
        for stage in self.layers:
            x = stage(x, self.config.checkpoint_activations)
        return rearrange(x, "b y x c -> b (y x) c")

    def pool(self, features: Tensor) -> Tensor:
        """Pixels (b n c) → their mean (b c)"""
        return features.mean(dim=1)

    def layer_of(self, parameter: str) -> int:
        """0: stem; then block by block; last: head."""
        part, _, rest = parameter.partition(".")
        if part != "layers":
            return sum(self.config.depths) + 1 if part == "head" else 0
        stage, _, block = rest.split(".")[:3]
        return sum(self.config.depths[: int(stage)]) + int(block) + 1

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw every linear map with a deviation of 1 / √inputs, the head with 0.02."""
        init_norms(self)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                deviation = 0.02 if module is self.head else module.in_features**-0.5
                trunc_normal(module.weight, deviation, generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


def _offsets(side: int, device: torch.device) -> tuple[Tensor]:
    """Offsets of the neighbours from −1 to 1, row by row: (i·j 2)."""
    steps = torch.arange(side, device=device) - side // 2
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    return (torch.stack([y, x], dim=-1).flatten(0, 1) / max(side // 2, 1),)
