"""Swin and Swin V2 from their definition, slowly and in double precision.

Every token knows its row and column. A block attends from every token to every token and forbids
what is not in the same window; there is no padding, no shifting of tokens and no window order. Only
the config and the parameters of the model under test are used.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vision.config import pair
from vision.models.configs import SwinConfig, SwinV2Config
from vision.models.layers import Grid

Parameters = Mapping[str, Tensor]


def reference_swin(
    config: SwinConfig | SwinV2Config, configured: Grid, parameters: Parameters, images: Tensor
) -> Tensor:
    """Logits (b classes) of a Swin that was configured for images of another size or the same."""
    patch = pair(config.patch_size)
    images = images.double()
    # An incomplete last patch is filled with zeros.
    images = F.pad(images, (0, -images.shape[3] % patch[1], 0, -images.shape[2] % patch[0]))
    rows, columns = images.shape[2] // patch[0], images.shape[3] // patch[1]
    x = torch.stack(
        [
            torch.stack([_patch(images, patch, y, x, parameters) for x in range(columns)], dim=1)
            for y in range(rows)
        ],
        dim=1,
    )
    x = _norm(x, parameters, "patch_norm", config.norm_eps)
    if config.positions == "absolute":
        x = x + parameters["absolute_pos_embed"].view(1, rows, columns, -1)
    grid = math.ceil(configured[0] / patch[0]), math.ceil(configured[1] / patch[1])
    for stage, depth in enumerate(config.depths):
        if stage:
            x = _merged(config, parameters, f"layers.{stage}.downsample", x)
            grid = math.ceil(grid[0] / 2), math.ceil(grid[1] / 2)
        window = _window(config, stage, grid)
        for block in range(depth):
            name = f"layers.{stage}.blocks.{block}"
            x = _block(config, parameters, name, x, stage, window, block % 2 == 1)
    x = _norm(x, parameters, "norm", config.norm_eps)
    return _linear(x.mean(dim=(1, 2)), parameters, "head")


def _window(config: SwinConfig | SwinV2Config, stage: int, grid: Grid) -> Grid:
    """A stage's own window, or the window of all stages, no larger than the configured grid."""
    match config.window:
        case int(side):
            return min(side, grid[0]), min(side, grid[1])
        case (int(height), int(width)):
            return min(height, grid[0]), min(width, grid[1])
        case windows:
            return windows[stage]  # type: ignore[return-value]


def _patch(images: Tensor, patch: Grid, y: int, x: int, parameters: Parameters) -> Tensor:
    """The token (b c) of one patch."""
    h, w = patch
    pixels = images[:, :, y * h : (y + 1) * h, x * w : (x + 1) * w]
    weight = parameters["patch_embed.proj.weight"]
    return torch.einsum("bkij,ckij->bc", pixels, weight) + parameters["patch_embed.proj.bias"]


def _block(
    config: SwinConfig | SwinV2Config,
    parameters: Parameters,
    name: str,
    x: Tensor,
    stage: int,
    window: Grid,
    odd: bool,
) -> Tensor:
    """(b y x c) → (b y x c)"""
    eps = config.norm_eps

    def mlp(tokens: Tensor) -> Tensor:
        hidden = F.gelu(_linear(tokens, parameters, f"{name}.mlp.fc1"))
        return _linear(hidden, parameters, f"{name}.mlp.fc2")

    def attention(tokens: Tensor) -> Tensor:
        return _attention(config, parameters, f"{name}.attn", tokens, stage, window, odd)

    def norm(number: int, tokens: Tensor) -> Tensor:
        return _norm(tokens, parameters, f"{name}.norm{number}", eps)

    if isinstance(config, SwinV2Config):
        x = x + norm(1, attention(x))
        return x + norm(2, mlp(x))
    x = x + attention(norm(1, x))
    return x + mlp(norm(2, x))


def _attention(
    config: SwinConfig | SwinV2Config,
    parameters: Parameters,
    name: str,
    x: Tensor,
    stage: int,
    window: Grid,
    odd: bool,
) -> Tensor:
    """Each token attends to the tokens of its window: (b y x c) → (b y x c)"""
    batch, rows, columns, width = x.shape
    heads = config.heads[stage]
    tokens = x.reshape(batch, rows * columns, width)
    q, k, v = (
        _projected(config, parameters, name, tokens, part, heads) for part in ("q", "k", "v")
    )
    scores = torch.einsum("bhnd,bhmd->bhnm", q, k)
    if isinstance(config, SwinV2Config):
        scale = parameters[f"{name}.logit_scale"].clamp(max=math.log(100)).exp()
        lengths = q.norm(dim=-1)[..., :, None] * k.norm(dim=-1)[..., None, :]
        scores = scale * scores / lengths
    else:
        scores = scores / math.sqrt(width // heads)
    place = torch.tensor([(y, x) for y in range(rows) for x in range(columns)])
    window_of = torch.stack(
        [
            _window_of(place[:, axis], (rows, columns)[axis], window[axis], odd and config.shift)
            for axis in (0, 1)
        ],
        dim=1,
    )
    together = (window_of[:, None] == window_of[None]).all(dim=-1)
    offset = torch.where(together[..., None], place[:, None] - place[None], 0)
    if config.positions == "relative":
        scores = scores + _bias(config, parameters, name, offset, stage, window)
    weights = scores.masked_fill(~together, -torch.inf).softmax(dim=-1)
    out = torch.einsum("bhnm,bhmd->bnhd", weights, v).reshape(batch, rows, columns, width)
    return _linear(out, parameters, f"{name}.proj")


def _window_of(place: Tensor, cells: int, window: int, shifted: bool) -> Tensor:
    """The number of the window that a row or column is in.

    Shifted windows start half a window later; what lies before the first one is a window too. An
    axis of one window is not shifted.
    """
    shift = window // 2 if shifted and cells > window else 0
    return torch.div(place - shift, window, rounding_mode="floor")


def _projected(
    config: SwinConfig | SwinV2Config,
    parameters: Parameters,
    name: str,
    tokens: Tensor,
    part: str,
    heads: int,
) -> Tensor:
    """Queries, keys or values: (b h n d)."""
    index = "qkv".index(part)
    weight = parameters[f"{name}.qkv.weight"].chunk(3)[index]
    projected = tokens @ weight.T
    if not isinstance(config, SwinV2Config):
        projected = projected + parameters[f"{name}.qkv.bias"].chunk(3)[index]
    elif part != "k":  # V2's keys have no bias
        projected = projected + parameters[f"{name}.{part}_bias"]
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def _bias(
    config: SwinConfig | SwinV2Config,
    parameters: Parameters,
    name: str,
    offset: Tensor,
    stage: int,
    window: Grid,
) -> Tensor:
    """The bias (h n m) for offsets (n m 2) of queries from keys."""
    if not isinstance(config, SwinV2Config):
        row = (offset[..., 0] + window[0] - 1) * (2 * window[1] - 1) + offset[..., 1]
        table = parameters[f"{name}.relative_position_bias_table"]
        return table[row + window[1] - 1].permute(2, 0, 1)
    trained = window
    if config.pretrained_window is not None:
        trained = (config.pretrained_window[stage], config.pretrained_window[stage])
    largest = torch.tensor([max(side - 1, 1) for side in trained])
    different, which = offset.flatten(0, 1).unique(dim=0, return_inverse=True)
    scaled = 8 * different.double() / largest
    logarithmic = scaled.sign() * (1 + scaled.abs()).log2() / math.log2(8)
    weight, bias = parameters[f"{name}.cpb_mlp.0.weight"], parameters[f"{name}.cpb_mlp.0.bias"]
    hidden = (logarithmic @ weight.T + bias).relu()
    out = 16 * (hidden @ parameters[f"{name}.cpb_mlp.2.weight"].T).sigmoid()
    return out[which.view(offset.shape[:2])].permute(2, 0, 1)


def _merged(
    config: SwinConfig | SwinV2Config, parameters: Parameters, name: str, x: Tensor
) -> Tensor:
    """Four neighbours become one: (b y x c) → (b y/2 x/2 2·c); zeros beyond an odd edge."""
    rows, columns = (math.ceil(cells / 2) for cells in x.shape[1:3])
    tokens = []
    for y in range(rows):
        for column in range(columns):
            parts = [
                x[:, 2 * y + down, 2 * column + right]
                if 2 * y + down < x.shape[1] and 2 * column + right < x.shape[2]
                else torch.zeros_like(x[:, 0, 0])
                for right in (0, 1)
                for down in (0, 1)
            ]
            tokens.append(torch.cat(parts, dim=-1))
    merged = torch.stack(tokens, dim=1).unflatten(1, (rows, columns))
    reduction = parameters[f"{name}.reduction.weight"]
    if isinstance(config, SwinV2Config):
        return _norm(merged @ reduction.T, parameters, f"{name}.norm", config.norm_eps)
    return _norm(merged, parameters, f"{name}.norm", config.norm_eps) @ reduction.T


def _norm(x: Tensor, parameters: Parameters, name: str, eps: float) -> Tensor:
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    normed = (x - mean) / torch.sqrt(variance + eps)
    return normed * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def _linear(x: Tensor, parameters: Parameters, name: str) -> Tensor:
    return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]
