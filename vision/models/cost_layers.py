"""The layers of each model family with their cost, in closed form; definitions in `cost.py`.

Letters: n tokens that are computed (prefix and padding included) · c width · h heads · t tokens of
a window.
"""

from dataclasses import dataclass

from vision.config import pair
from vision.models.configs import SwinConfig, SwinV2Config, ViTConfig
from vision.models.layers import Grid, ceil_div, drop_path_rates
from vision.models.positions import FourierPositions
from vision.models.windows import StageShape, stage_shape

FLOAT = 4
"""Bytes of a number in fp32."""


@dataclass(frozen=True)
class AttentionCost:
    """The attention matrices of a group of equal blocks; entries are for one head of one block."""

    blocks: int
    heads: int
    patches: int
    """Entries between patches alone."""
    tokens: int
    """Entries with prefix tokens: class token, distillation token and registers."""
    everywhere: int
    """Entries if every patch attended to every patch, as without Swin's windows."""

    def bytes_of_head(self, entries: int) -> int:
        """Bytes of one head of one block."""
        return FLOAT * entries

    def bytes_of_heads(self, entries: int) -> int:
        """Bytes of all heads of one block."""
        return self.heads * self.bytes_of_head(entries)

    def bytes_of_blocks(self, entries: int) -> int:
        """Bytes of all heads of all blocks of the group."""
        return self.blocks * self.bytes_of_heads(entries)


@dataclass(frozen=True)
class LayerCost:
    """A layer, or a group of equal blocks: the figures are those of the whole group."""

    name: str
    stage: int | None
    """Swin's stage, counted from 1."""
    output: tuple[int, ...]
    """Shape of the output for one picture, without padding."""
    parameters: int
    macs: int
    activation_bytes: int
    attention: AttentionCost | None = None


def vit_layers(config: ViTConfig, size: Grid, channels: int, classes: int) -> list[LayerCost]:
    """Embedding, blocks, norm and head of a ViT."""
    patch, c, h = pair(config.patch_size), config.width, config.heads
    grid = ceil_div(size[0], patch[0]), ceil_div(size[1], patch[1])
    cells, prefix = grid[0] * grid[1], _class_tokens(config) + config.registers
    n = cells + prefix
    pixels = channels * patch[0] * patch[1]
    embedding = LayerCost(
        name="embedding",
        stage=None,
        output=(n, c),
        parameters=linear(pixels, c) + prefix * c + _vit_positions(config, cells),
        macs=cells * pixels * c + _fourier_macs(config, cells),
        activation_bytes=FLOAT * (cells * pixels + (n * c if config.dropout else 0)),
    )
    attention = AttentionCost(config.depth, h, patches=cells**2, tokens=n**2, everywhere=cells**2)
    scale = 2 * c if config.layer_scale is not None else 0
    norms = 4 * (c // h) if config.qk_norm else 0
    rates = drop_path_rates(config.drop_path, config.drop_path_schedule, config.depth)
    kept = 2 * n * c if config.layer_scale is not None else 0
    kept += 4 * h * n if config.qk_norm else 0
    kept += _kept_by_attention(
        config,
        n,
        c,
        h,
        keys=n,
        learned_bias=False,
        # Normed or turned queries and keys, and with them a result whose heads must be brought
        # side by side, are kept beside the qkv layer's output.
        more_fused=3 if config.qk_norm or config.positions == "rotary" else 0,
        more_explicit=3 if config.qk_norm else 0,
    )
    blocks = LayerCost(
        name=f"{config.depth} blocks",
        stage=None,
        output=(n, c),
        parameters=config.depth * (_block_parameters(config, c) + 3 * c + scale + norms),
        macs=config.depth * _block_macs(config, n, c, keys=n),
        activation_bytes=FLOAT * sum(_kept_by_block(config, n, c, rate, kept) for rate in rates),
        attention=attention,
    )
    return [embedding, blocks, _vit_head(config, n, classes)]


def _vit_positions(config: ViTConfig, cells: int) -> int:
    match config.positions:
        case "learned":
            rows = cells + (_class_tokens(config) if config.class_token_position else 0)
            return rows * config.width
        case "fourier":
            return linear(4 * FourierPositions.bands, config.width)
        case "sincos2d" | "rotary" | "none":
            return 0


def _class_tokens(config: ViTConfig) -> int:
    return int(config.class_token) + int(config.distillation_token)


def _fourier_macs(config: ViTConfig, cells: int) -> int:
    if config.positions != "fourier":
        return 0
    return cells * 4 * FourierPositions.bands * config.width


def _vit_head(config: ViTConfig, n: int, classes: int) -> LayerCost:
    """The head needs its input, and with it the whole tensor that a class token is a view of."""
    c, heads = config.width, 1 + int(config.distillation_token)
    pooled = 2 * c if config.pool == "class_token_and_mean" else c
    if config.pool_norm == "before":
        kept = n * c + 2 * n
        head_input = n * c if config.pool == "class_token" else pooled
    else:
        kept = (n * c if config.pool == "class_token" else c) + 2 * heads
        head_input = heads * c
    return LayerCost(
        name="norm and head",
        stage=None,
        output=(classes or pooled,),
        parameters=2 * c + (heads * linear(pooled, classes) if classes else 0),
        macs=heads * pooled * classes,
        activation_bytes=FLOAT * (kept + (head_input if classes else 0)),
    )


def swin_layers(
    config: SwinConfig | SwinV2Config, size: Grid, channels: int, classes: int
) -> list[LayerCost]:
    """Embedding, the blocks of each stage with the mergings between them, norm and head."""
    patch, c = pair(config.patch_size), config.width
    grid = ceil_div(size[0], patch[0]), ceil_div(size[1], patch[1])
    shapes = _shapes(config, grid)
    rates = drop_path_rates(config.drop_path, config.drop_path_schedule, sum(config.depths))
    n, pixels = shapes[0].slots, channels * patch[0] * patch[1]
    positions = grid[0] * grid[1] * c if config.positions == "absolute" else 0
    layers = [
        LayerCost(
            name="embedding",
            stage=None,
            output=(*grid, c),
            parameters=linear(pixels, c) + 2 * c + positions,
            macs=n * pixels * c,
            activation_bytes=FLOAT
            * (n * pixels + n * c + 2 * n + (n * c if config.dropout else 0)),
        )
    ]
    for stage, shape in enumerate(shapes):
        if stage:
            layers.append(_merging(config, stage, shape))
        before = sum(config.depths[:stage])
        depth = config.depths[stage]
        layers.append(_swin_blocks(config, stage, shape, rates[before : before + depth]))
    c, cells = c * 2 ** (len(shapes) - 1), shapes[-1].grid[0] * shapes[-1].grid[1]
    head = LayerCost(
        name="norm and head",
        stage=None,
        output=(classes or c,),
        parameters=2 * c + (linear(c, classes) if classes else 0),
        macs=c * classes,
        activation_bytes=FLOAT * (cells * c + 2 * cells + (c if classes else 0)),
    )
    return [*layers, head]


def _shapes(config: SwinConfig | SwinV2Config, grid: Grid) -> list[StageShape]:
    largest, shapes = pair(config.window), []
    for stage in range(len(config.depths)):
        y, x = ceil_div(grid[0], 2**stage), ceil_div(grid[1], 2**stage)
        window = min(largest[0], y), min(largest[1], x)
        shapes.append(stage_shape((y, x), window, config.shift))
    return shapes


def _merging(config: SwinConfig | SwinV2Config, stage: int, shape: StageShape) -> LayerCost:
    n, c = shape.slots, config.width * 2 ** (stage - 1)
    normed = 2 * c if config.kind == "swin_v2" else 4 * c
    return LayerCost(
        name="merging",
        stage=stage + 1,
        output=(*shape.grid, 2 * c),
        parameters=linear(4 * c, 2 * c, bias=False) + 2 * normed,
        macs=n * 4 * c * 2 * c,
        activation_bytes=FLOAT * (n * 4 * c + n * normed + 2 * n),
    )


def _swin_blocks(
    config: SwinConfig | SwinV2Config, stage: int, shape: StageShape, rates: list[float]
) -> LayerCost:
    n, c, h = shape.slots, config.width * 2**stage, config.heads[stage]
    t, cells = shape.window[0] * shape.window[1], shape.grid[0] * shape.grid[1]
    relative, version_2 = config.positions == "relative", config.kind == "swin_v2"
    offsets = (2 * shape.window[0] - 1) * (2 * shape.window[1] - 1)
    parameters, macs = _block_parameters(config, c), _block_macs(config, n, c, keys=t)
    if version_2:
        # Keys have no bias; every head has a scale; a network computes the position bias.
        parameters += 2 * c + h + (linear(2, 512) + 512 * h if relative else 0)
        macs += offsets * 512 * (2 + h) if relative else 0
    else:
        parameters += 3 * c + (offsets * h if relative else 0)
    kept = _kept_by_attention(
        config,
        n,
        c,
        h,
        keys=t,
        learned_bias=relative,
        more_fused=2 if version_2 else 0,
        more_explicit=3 if version_2 else 0,
    )
    kept += 6 * h * n if version_2 else 0  # lengths of queries and keys, on the way to directions
    activations = 0
    for i, rate in enumerate(rates):
        # Fused attention keeps its mask, repeated for every picture where windows differ in it.
        masked = shape.padded != shape.grid or (i % 2 == 1 and any(shape.shift))
        repeated = masked and _fused(config, learned_bias=relative)
        activations += _kept_by_block(config, n, c, rate, kept + (n * t if repeated else 0))
    return LayerCost(
        name=f"{len(rates)} blocks",
        stage=stage + 1,
        output=(*shape.grid, c),
        parameters=len(rates) * parameters,
        macs=len(rates) * macs,
        activation_bytes=FLOAT * activations,
        attention=AttentionCost(
            len(rates), h, patches=n * t, tokens=n * t, everywhere=cells * cells
        ),
    )


def linear(inputs: int, outputs: int, bias: bool = True) -> int:
    """Parameters of a linear layer, or of a convolution that steps by its own size."""
    return inputs * outputs + (outputs if bias else 0)


AnyConfig = ViTConfig | SwinConfig | SwinV2Config


def _block_parameters(config: AnyConfig, c: int) -> int:
    """What all blocks have: qkv without its bias, projection, MLP and two norms."""
    hidden = int(c * config.mlp_ratio)
    gate = linear(c, hidden) if _gated(config) else 0
    return 3 * c * c + linear(c, c) + linear(c, hidden) + linear(hidden, c) + gate + 4 * c


def _block_macs(config: AnyConfig, n: int, c: int, keys: int) -> int:
    layers = 3 if _gated(config) else 2
    return n * (4 * c * c + layers * c * int(c * config.mlp_ratio)) + 2 * n * keys * c


def _gated(config: AnyConfig) -> bool:
    """Whether the MLP has a third layer, whose output gates the hidden one."""
    return isinstance(config, ViTConfig) and config.mlp == "swiglu"


def _fused(config: AnyConfig, learned_bias: bool) -> bool:
    """Whether training attends with the fused CPU kernel, which knows neither dropout nor the
    gradient of a bias.
    """
    return not learned_bias and not config.attention_dropout


def _kept_by_attention(
    config: AnyConfig,
    n: int,
    c: int,
    h: int,
    *,
    keys: int,
    learned_bias: bool,
    more_fused: int,
    more_explicit: int,
) -> int:
    """Numbers that attention keeps between the qkv layer and the projection, masks left out.

    Queries, keys and values are kept as the qkv layer's output or as copies. Where something comes
    in between, `more_…` says how many further tensors of n · c numbers are kept on either path.
    """
    if _fused(config, learned_bias):
        return (3 + more_fused) * n * c + h * n  # h · n: the logarithm of each row's sum
    weights = (3 if config.attention_dropout else 1) * h * n * keys
    return (3 + more_explicit) * n * c + weights


def _kept_by_block(config: AnyConfig, n: int, c: int, drop_path: float, attention: int) -> int:
    """Numbers that one block keeps: input and output of both norms with their statistics, input of
    the projection, input and output of the GELU, what attention keeps, and what is dropped.
    """
    if config.checkpoint_activations:
        return n * c
    hidden = int(c * config.mlp_ratio)
    # A gate is kept beside what it gates, before and after its SiLU.
    perceptron = 4 * n * hidden if _gated(config) else 2 * n * hidden
    kept = 4 * n * c + 4 * n + n * c + perceptron + attention
    if config.dropout:
        kept += 2 * n * c + n * hidden
    return kept + (2 if drop_path else 0)
