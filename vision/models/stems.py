"""Stems: from pixels to a grid of tokens. Each is one choice of `model.stem`.

Axes: b batch · c width · y, x rows and columns of the token grid.
"""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.config import pair
from vision.models.configs import AnySwinConfig, ViTConfig
from vision.models.layers import Grid, ceil_div, pad_to_multiple
from vision.models.windows import partition

InitialConv = Literal["uniform", "lecun"]


class Stem(nn.Module):
    """Base of every stem: one token for each patch of an image."""

    def __init__(self, patch: Grid) -> None:
        super().__init__()
        self.patch = patch

    def grid(self, size: Grid) -> Grid:
        """The grid of tokens of an image; an incomplete last patch counts."""
        return ceil_div(size[0], self.patch[0]), ceil_div(size[1], self.patch[1])

    @property
    def margins(self) -> tuple[int, int, int, int]:
        """Pixels that a token sees beyond its patch: above, left, below, right."""
        return 0, 0, 0, 0

    def forward(self, images: Tensor, multiple: Grid = (1, 1)) -> Tensor:
        """(b channels height width) → (b c y x), the grid rounded up to multiples."""
        raise NotImplementedError

    def init_weights(self, kind: InitialConv, generator: torch.Generator) -> None:
        """Draw the convolutions; norms are set with those of the model."""
        raise NotImplementedError


class HiddenCells(NamedTuple):
    """What SimMIM hides of an image (Xie et al., CVPR 2022), under a learned token."""

    mask: Tensor
    """bool (b y x): true where a cell is hidden."""
    token: Tensor
    """(c,)"""

    def replace(self, tokens: Tensor, window: Grid | None = None) -> Tensor:
        """Tokens (b n c) with the hidden ones replaced; row by row, or in plain window order with
        the grid padded to whole windows.
        """
        mask = self.mask[:, None]
        if window is None:
            hidden = mask.flatten(2).transpose(1, 2)
        else:
            hidden = partition(pad_to_multiple(mask, window), window)
        return torch.where(hidden, self.token.to(tokens.dtype), tokens)


class PatchEmbed(Stem):
    """Patches of an image, each mapped to a token, by a convolution whose stride is its kernel."""

    def __init__(self, channels: int, width: int, patch: Grid, bias: bool = True) -> None:
        super().__init__(patch)
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch, bias=bias)

    def forward(self, images: Tensor, multiple: Grid = (1, 1)) -> Tensor:
        """(b channels height width) → (b c y x), rounded up to multiples with zero pixels."""
        step = self.patch[0] * multiple[0], self.patch[1] * multiple[1]
        return self.proj(pad_to_multiple(images, step))

    def init_weights(self, kind: InitialConv, generator: torch.Generator) -> None:
        """Draw the projection."""
        init_conv(self.proj, kind, generator)


class NormedPatches(PatchEmbed):
    """LayerNorm of a patch's pixels, linear map, LayerNorm of the token (vit-pytorch)."""

    def __init__(self, channels: int, width: int, patch: Grid, norm_eps: float) -> None:
        super().__init__(channels, width, patch)
        self.norm_before = nn.LayerNorm(channels * patch[0] * patch[1], eps=norm_eps)
        self.norm_after = nn.LayerNorm(width, eps=norm_eps)

    def forward(self, images: Tensor, multiple: tuple[int, int] = (1, 1)) -> Tensor:
        """(b channels height width) → (b c y x)"""
        p, q = self.patch
        images = pad_to_multiple(images, (p * multiple[0], q * multiple[1]))
        pixels = rearrange(images, "b c (y p) (x q) -> b y x (c p q)", p=p, q=q)
        tokens = F.linear(self.norm_before(pixels), self.proj.weight.flatten(1), self.proj.bias)
        return rearrange(self.norm_after(tokens), "b y x c -> b c y x")


class ConvStem(Stem):
    """Overlapping convolutions (Xiao et al., NeurIPS 2021): one at full resolution, then, for each
    halving, a 3 × 3 convolution, max pooling, LayerNorm and GELU.

    The norm is one of channels, since statistics of a batch would depend on the number of
    processes. With `whitened` the first convolution is fixed, see `Whitening`.
    """

    def __init__(
        self, channels: int, width: int, patch: Grid, whitened: bool, norm_eps: float
    ) -> None:
        super().__init__(patch)
        self.pools = halvings(patch)
        last = len(self.pools) - 1
        filters = 2 * _PATCH * _PATCH * channels
        widths = [filters, *(max(width >> (last - i), _PATCH) for i in range(last + 1))]
        self.whitening = Whitening(channels) if whitened else None
        inputs = widths if whitened else [channels, *widths]
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False)
            for before, after in pairwise(inputs)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(after, eps=norm_eps) for after in widths[1:])

    @property
    def margins(self) -> tuple[int, int, int, int]:
        """Pixels that a token sees beyond its patch: above, left, below, right."""
        before, after = (0, 1) if self.whitening is not None else (1, 1)
        above, left, below, right = before, before, after, after
        y = x = 1
        for pool in self.pools:  # a 3 × 3 convolution sees one cell of its input on each side
            above, below, left, right = above + y, below + y, left + x, right + x
            y, x = y * pool[0], x * pool[1]
        return above, left, below, right

    def forward(self, images: Tensor, multiple: Grid = (1, 1)) -> Tensor:
        """(b channels height width) → (b c y x). Tokens are padded, not pixels: convolutions would
        carry the border of the padding into the image.
        """
        x = pad_to_multiple(images, self.patch)
        convs = list(self.convs)
        x = convs.pop(0)(x) if self.whitening is None else self.whitening(x)
        for conv, pool, norm in zip(convs, self.pools, self.norms, strict=True):
            x = F.max_pool2d(conv(F.gelu(x)), pool)
            x = rearrange(norm(rearrange(x, "b c y x -> b y x c")), "b y x c -> b c y x")
        return pad_to_multiple(F.gelu(x), multiple)

    def init_weights(self, kind: InitialConv, generator: torch.Generator) -> None:
        """Draw the convolutions; the whitening passes pixels on until it has seen images."""
        for conv in self.convs:
            assert isinstance(conv, nn.Conv2d)
            init_conv(conv, kind, generator)
        if self.whitening is not None:
            self.whitening.init_weights()


_PATCH = 2
"""Pixels along the patches that are whitened."""


class Whitening(nn.Module):
    """A fixed convolution that makes the pixels of 2 × 2 patches uncorrelated, each component with
    both signs, and a learned bias (Jordan, arXiv 2404.00498, section 3.2).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        filters = _PATCH * _PATCH * channels
        shape = (2 * filters, channels, _PATCH, _PATCH)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(2 * filters))

    def forward(self, images: Tensor) -> Tensor:
        """(b channels height width) → (b filters height width)"""
        images = F.pad(images, (0, _PATCH - 1, 0, _PATCH - 1), mode="replicate")
        return F.conv2d(images, self.weight, self.bias)

    def init_weights(self) -> None:
        """The filters of uncorrelated pixels of variance 1."""
        self._set(torch.eye(self.weight[0].numel()))
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def fit(self, batches: Iterable[Tensor]) -> None:
        """Compute the filters from normalised images, batch by batch (b channels height width)."""
        size = self.weight[0].numel()
        total, number = torch.zeros(size, size, dtype=torch.float64), 0
        for images in batches:
            patches = F.unfold(images.double(), _PATCH)  # (b pixels patches)
            total += torch.einsum("bip,bjp->ij", patches, patches)
            number += patches.shape[0] * patches.shape[2]
        variances, components = torch.linalg.eigh(total / number)
        # Components with little variance are mostly noise of the compression: not to be blown up.
        self._set((components / (variances + 5e-4).sqrt()).T)

    @torch.no_grad()
    def _set(self, filters: Tensor) -> None:
        both = torch.cat([filters, -filters]).reshape(self.weight.shape)
        self.weight.copy_(both)


def halvings(patch: Grid) -> list[Grid]:
    """Factors of 2 (or 1) of both axes whose product is a patch, both axes halved together first.

    The config has checked that both sides are powers of 2.
    """
    factors = []
    height, width = patch
    while (height, width) != (1, 1):
        factor = min(height, 2), min(width, 2)
        factors.append(factor)
        height, width = height // factor[0], width // factor[1]
    return factors


def build_stem(config: ViTConfig | AnySwinConfig, channels: int) -> Stem:
    """The stem of `config.stem`."""
    patch = pair(config.patch_size)
    match config.stem:
        case "patch_normed":
            return NormedPatches(channels, config.width, patch, config.norm_eps)
        case "conv" | "conv_whitened" as kind:
            whitened = kind == "conv_whitened"
            return ConvStem(channels, config.width, patch, whitened, config.norm_eps)
        case "patch" | "patch_no_bias" as kind:
            return PatchEmbed(channels, config.width, patch, kind == "patch")


def init_conv(conv: nn.Conv2d, kind: InitialConv, generator: torch.Generator) -> None:
    """Draw a convolution of a stem.

    `lecun`: variance 1 / fan-in and no bias, as in the ViT paper's code. `uniform`: weight and bias
    within ±1 / √fan-in, torch's default, which DeiT and Swin left as it is.
    """
    bound = 1 / math.sqrt(conv.weight[0].numel())
    if kind == "uniform":
        nn.init.uniform_(conv.weight, -bound, bound, generator=generator)
        if conv.bias is not None:
            nn.init.uniform_(conv.bias, -bound, bound, generator=generator)
        return
    # A normal distribution cut at two deviations keeps this share of its standard deviation.
    std = bound / 0.87962566103423978
    nn.init.trunc_normal_(conv.weight, std=std, a=-2 * std, b=2 * std, generator=generator)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
