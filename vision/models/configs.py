"""Settings of each model family. Free of torch, so that a typo is reported at once."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, Union

from pydantic import Field, create_model, model_validator

from vision.config import Config, Depth, Rate, Side, Size, Width, Window, per_stage

Shift = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(ge=1)]


class _Published(Config):
    """Settings of every model whose YAML may name weights."""

    pretrained: str | None = None
    """Weights that init=pretrained loads, such as timm:NAME; null: none are known.

    Unlike other settings it has a default: a model inferred from a file has no such name.
    """


class _Shared(_Published):
    """Settings of every model of this project."""

    mlp_ratio: Annotated[float, Field(gt=0)]
    """Hidden width of a block's MLP, as a multiple of the block's width."""
    dropout: Rate
    """Dropout of the embedded patches and of both outputs of every block."""
    attention_dropout: Rate
    """Dropout of the attention weights."""
    drop_path: Rate
    """Stochastic depth: the rate of the last block (linear) or of every block (uniform)."""
    drop_path_schedule: Literal["linear", "uniform"]
    norm_eps: Annotated[float, Field(gt=0)]
    checkpoint_activations: bool
    """Recompute each block in the backward pass instead of storing its activations."""


Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]


class ViTConfig(_Shared):
    """Settings of a Vision Transformer (Dosovitskiy et al., ICLR 2021) and its variants."""

    kind: Literal["vit"]
    patch_size: Size
    """Pixels along a patch; 1 makes every pixel a token."""
    stem: Literal["patch", "patch_no_bias", "patch_normed", "conv", "conv_whitened"]
    """Map from pixels to tokens: linear for each patch, also without a bias (CLIP) or with a norm
    before and after it (vit-pytorch); or convolutions, the first of which may be fixed to whiten
    the training images."""
    width: Width
    depth: Depth
    heads: Width
    head_width: Width | None
    """Channels of a head; null: width / heads."""
    class_token: bool
    registers: Annotated[int, Field(ge=0, le=2**10)]
    """Extra tokens without a position (Darcet et al., ICLR 2024)."""
    distillation_token: bool
    """A second class token with a head of its own; the logits are averaged (DeiT, Touvron et al.,
    ICML 2021).
    """
    positions: Literal["learned", "sincos2d", "fourier", "rotary", "learned_rotary", "none"]
    """Position encoding: added to the patches (learned, sincos2d, fourier), rotating queries and
    keys (rotary), or both.
    """
    class_token_position: bool
    """Whether a learned table also has rows for the class token (DeiT-III and big_vision: no) and
    for the distillation token.
    """
    rotary: Literal["axial", "mixed", "eva", "pe", "dinov3", "dinov3_hf"]
    """Angles of rotary positions: as in RoPE-ViT (fixed or learned frequencies), EVA-02, Perception
    Encoder or DINOv3; dinov3_hf rounds them as transformers does.
    """
    rotary_grid: Size | None
    """Grid that the coordinates of eva and pe are scaled to; null: not scaled."""
    rotary_jitter: tuple[Shift, Factor, Factor]
    """DINOv3's augmentation of coordinates in training: largest shift, largest scale of each axis,
    largest scale of both; [0, 1, 1]: none.
    """
    relative_bias: Literal["none", "block", "shared"]
    """Learned attention bias by relative position, one per block or shared by all (BEiT)."""
    embedding_norm: bool
    """LayerNorm of the embedded tokens before the first block (CLIP)."""
    block_norm: Literal["before", "after"]
    """LayerNorm at the start or at the end of each residual branch (EVA-02-CLIP-E: after)."""
    qkv_bias: Literal["qkv", "qv", "none"]
    """Whether queries, keys and values have a bias, queries and values only, or none of them."""
    qk_norm: bool
    """LayerNorm on queries and keys (Dehghani et al., ICML 2023)."""
    attention_norm: bool
    """LayerNorm of the attended values before their projection (EVA-02-CLIP)."""
    layer_scale: Annotated[float, Field(gt=0)] | None
    """Initial value of the learned scale of each residual branch; null: no such scale."""
    mlp: Literal["plain", "gated"]
    """Two layers with an activation between them, or an activated gate (Shazeer, 2020): a gated
    silu is SwiGLU.
    """
    activation: Activation
    mlp_norm: bool
    """LayerNorm of the hidden layer of every MLP (EVA-02)."""
    pool: Literal["class_token", "mean", "class_token_and_mean", "attention"]
    """Input of the head: class token, mean of the patches, both side by side (DINOv2), or the
    attention of a learned query (SigLIP).
    """
    pool_norm: Literal["before", "after", "none"]
    """Place of the last norm, before or after the pooling; weights of all kinds exist."""
    pool_heads: Width | None
    """Heads of the attention pooling; null: as in the blocks."""
    pool_mlp_ratio: Annotated[float, Field(gt=0)] | None
    """Hidden width of its MLP as a multiple of width; null: as in the blocks."""
    representation: Width | None
    """Width of a hidden layer with tanh between pooling and head (the ViT paper's pretraining)."""
    projection: Width | None
    """Width of a linear map of the pooled features (CLIP's space shared with text)."""
    initialization: Literal["trunc_normal", "xavier", "zero_residual"]
    """Initial weights: as in DeiT (truncated normal, 0.02), as in the ViT paper's own code (Xavier,
    zero head), or as in DeiT with residual branches that start at zero.
    """

    @property
    def turns(self) -> bool:
        """Whether queries and keys are rotated."""
        return self.positions in ("rotary", "learned_rotary")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_width is None:
            _divides("heads", self.heads, "width", self.width)
        _check_stem(self.stem, self.patch_size)
        if self.initialization == "zero_residual" and self.block_norm == "after":
            raise ValueError("initialization=zero_residual needs block_norm=before, to learn.")
        self._check_pooling()
        self._check_positions()
        return self

    def _check_pooling(self) -> None:
        if self.pool in ("class_token", "class_token_and_mean") and not self.class_token:
            raise ValueError(f"pool={self.pool} needs class_token=true; or choose pool=mean.")
        if self.pool in ("class_token_and_mean", "attention") and self.pool_norm == "after":
            raise ValueError(f"pool={self.pool} needs pool_norm=before.")
        if self.pool == "attention":
            _divides("pool_heads", self.pool_heads or self.heads, "width", self.width)
        if self.distillation_token and self.pool != "class_token":
            raise ValueError(
                f"distillation_token=true needs pool=class_token, not pool={self.pool}: "
                f"each of the two tokens has a head of its own."
            )
        if self.distillation_token and (self.representation or self.projection):
            raise ValueError("distillation_token=true needs representation=null, projection=false.")

    def _check_positions(self) -> None:
        if self.positions == "sincos2d" and self.width % 4:
            raise ValueError(f"positions=sincos2d: width = {self.width} is not divisible by 4.")
        head_width = self.head_width or self.width // self.heads
        if self.turns and head_width % 4:
            raise ValueError(
                f"positions={self.positions} needs a head width divisible by 4, not {head_width} "
                f"(width = {self.width}, heads = {self.heads}, head_width = {self.head_width})."
            )
        prefix = self.registers + int(self.distillation_token)
        if self.relative_bias != "none" and (prefix or not self.class_token):
            raise ValueError(
                f"relative_bias={self.relative_bias} needs class_token=true and no other token "
                "before the patches: registers=0 and distillation_token=false."
            )


def _check_stem(stem: str, patch_size: Size) -> None:
    sides = patch_size if isinstance(patch_size, tuple) else (patch_size,)
    if stem in ("conv", "conv_whitened") and any(n & (n - 1) or max(sides) < 2 for n in sides):
        raise ValueError(
            f"stem={stem} halves the grid step by step, for which patch_size = {patch_size} is not "
            "a power of 2 such as 4 or 16; or choose stem=patch."
        )


class _SwinShared(_Shared):
    """Settings of both versions of Swin."""

    patch_size: Size
    stem: Literal["patch", "conv", "conv_whitened"]
    """Map from pixels to tokens: linear for each patch, or convolutions, the first of which may be
    fixed to whiten the training images."""
    width: Width
    """Width of the first stage; every later stage doubles it."""
    depths: Annotated[tuple[Depth, ...], Field(min_length=1, max_length=16)]
    """Number of blocks of each stage. Every later stage halves the grid."""
    heads: tuple[Width, ...]
    window: Window
    """Tokens along a window. One number or [height, width] for all stages is clipped where the grid
    at the configured image size is smaller; one [height, width] per stage is used as it is.
    """
    shift: bool
    """Shift every second block's windows by half a window; false leaves windows unconnected."""
    positions: Literal["relative", "absolute", "none"]
    """Position encoding: a relative bias in every block, a table added to the patches, or none."""
    padding: Literal["mask", "attend"]
    """Padding of grids that windows do not divide: masked, or taking part in attention as zero
    tokens, as in torchvision, transformers and mmpretrain.
    """
    initialization: Literal["trunc_normal", "zero_residual"]
    """Initial weights: as in the official code, or with branches that start at zero (V2: all)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        entries: tuple[Any, ...]
        windows = self.window if per_stage(self.window) else self.depths
        for name, entries in (("heads", self.heads), ("window", windows)):
            _check_stages(name, entries, self.depths)
        for stage, heads in enumerate(self.heads):
            _divides("heads", heads, f"width = {self.width} · {2**stage}", self.width * 2**stage)
        _check_stem(self.stem, self.patch_size)
        return self


class SwinConfig(_SwinShared):
    """Settings of a Swin Transformer (Liu et al., ICCV 2021)."""

    kind: Literal["swin"]


class SwinV2Config(_SwinShared):
    """Settings of a Swin Transformer V2 (Liu et al., CVPR 2022)."""

    kind: Literal["swin_v2"]
    pretrained_window: tuple[Side, ...] | None
    """Window of each stage that the position network was trained with; null: this model's own."""

    @model_validator(mode="after")
    def _check_v2(self) -> Self:
        if self.initialization == "zero_residual":
            raise ValueError(
                "initialization=zero_residual: a Swin V2 starts so by its norms; use trunc_normal."
            )
        if self.pretrained_window is not None:
            _check_stages("pretrained_window", self.pretrained_window, self.depths)
        return self


AnySwinConfig = SwinConfig | SwinV2Config


class LRNetConfig(_Published):
    """Settings of a Local Relation Network (Hu et al., ICCV 2019)."""

    kind: Literal["lr_net"]
    width: Width
    """Width of the local relation layers of stem and first stage; every later stage doubles it."""
    depths: Annotated[tuple[Depth, ...], Field(min_length=1, max_length=16)]
    """Number of blocks of each stage. Every later stage halves the grid."""
    expansion: Width
    """Width of a block's output, as a multiple of the width of its local relation layer."""
    neighbourhood: Annotated[int, Field(ge=1, le=2**6)]
    """Pixels along the square that a pixel is composed from; odd."""
    share: Width
    """Number of channels that share one weight per neighbour."""
    relation: Literal["squared_difference", "absolute_difference", "product"]
    """Score of a neighbour from its key and the query of the pixel, both scalars (section 3.2)."""
    geometric_prior: bool
    """Whether a small network of the offset adds to the score of a neighbour."""
    drop_path: Rate
    """Stochastic depth: the rate of the last block, rising linearly from the first."""
    norm_eps: Annotated[float, Field(gt=0)]
    checkpoint_activations: bool
    """Recompute each block in the backward pass instead of storing its activations."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.neighbourhood % 2 == 0:
            raise ValueError(
                f"neighbourhood = {self.neighbourhood} has no centre; it must be odd, such as 7."
            )
        _divides("share", self.share, "width", self.width)
        return self


class TimmConfig(_Published):
    """Settings of a model of timm, used as a baseline behind the same interface."""

    kind: Literal["timm"]
    name: Annotated[str, Field(min_length=1)]
    """Name of the architecture in timm, such as resnet50 or mvitv2_tiny."""
    drop_path: Rate | None
    """Rate of stochastic depth; null: timm's default, for models without stochastic depth."""
    checkpoint_activations: bool


OwnModelConfig = ViTConfig | SwinConfig | SwinV2Config | LRNetConfig
ModelConfig = Annotated[OwnModelConfig | TimmConfig, Field(discriminator="kind")]


def _all_fields() -> dict[str, Any]:
    """Every setting of any model of this project, each optional."""
    types: dict[str, list[Any]] = {}
    meanings: dict[str, str | None] = {}
    for kind in (ViTConfig, SwinConfig, SwinV2Config):
        for name, field in kind.model_fields.items():
            if name not in ("kind", "pretrained"):
                typed = Annotated[field.annotation, *field.metadata] if field.metadata else None
                types.setdefault(name, []).append(typed or field.annotation)
                meanings.setdefault(name, field.description)
    return {
        name: (Union[*choices, None], Field(None, description=meanings[name]))
        for name, choices in types.items()
    }


_EveryField: Any = create_model("_EveryField", __base__=Config, **_all_fields())


class AutoModelConfig(_EveryField):
    """Settings of the model that the weights belong to. A setting that is null is inferred from the
    weights; one that cannot be inferred, such as the heads of a ViT of unusual width, is given.
    """

    kind: Literal["auto"]
    trained_size: Size | None = None
    """Size of the training images of the weights, where their grid was not square."""

    def given(self) -> dict[str, Any]:
        """The settings that are not left to the weights."""
        values = self.model_dump(mode="json", exclude={"kind"})
        return {name: value for name, value in values.items() if value is not None}


MODEL_FIELDS = frozenset(AutoModelConfig.model_fields) - {"kind"}
"""Settings that can be given where they cannot be inferred from the weights."""

ModelChoice = Annotated[OwnModelConfig | TimmConfig | AutoModelConfig, Field(discriminator="kind")]
"""The model of a run; `auto` becomes the ModelConfig of the weights when the run starts."""


def _divides(small: str, divisor: int, large: str, number: int) -> None:
    if number % divisor:
        raise ValueError(f"{small} = {divisor} does not divide {large} = {number}.")


def _check_stages(name: str, entries: Sequence[Any], depths: Sequence[int]) -> None:
    if len(entries) != len(depths):
        counted = (
            f"{name} = {list(entries)} has {len(entries)} entries, depths = {list(depths)} has"
        )
        raise ValueError(f"{counted} {len(depths)}: one for each stage is expected.")
