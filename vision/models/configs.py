"""What each model family can be told. Free of torch, so that a typo is answered at once."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from vision.config import Config, Count, PositiveInt, Rate, Size


class _Published(Config):
    """What every model has whose YAML may name weights."""

    pretrained: str | None = None
    """The weights that init=pretrained takes, such as timm:NAME; null: none are known.

    Unlike other settings it has a default: a model that is told by a file has no such name.
    """


class _Shared(_Published):
    """What every model of this project has."""

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
    """Recompute each block in the backward pass instead of storing what it computed."""


class ViTConfig(_Shared):
    """A Vision Transformer (Dosovitskiy et al., ICLR 2021) and its usual variations."""

    kind: Literal["vit"]
    patch_size: Size
    """Pixels along a patch; 1 makes every pixel a token."""
    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    class_token: bool
    registers: Count
    """Extra tokens without a position (Darcet et al., ICLR 2024)."""
    distillation_token: bool
    """A second class token with a head of its own; the logits are averaged (DeiT, Touvron et al.,
    ICML 2021).
    """
    pool: Literal["class_token", "mean", "class_token_and_mean"]
    """What the head sees: class token, mean of the patches, or both side by side (DINOv2)."""
    pool_norm: Literal["before", "after"]
    """Whether the last norm comes before or after the pooling; weights of both kinds exist."""
    positions: Literal["learned", "sincos2d", "fourier", "rotary", "none"]
    class_token_position: bool
    """Whether a learned table also has a row for the class token (DeiT-III and big_vision: no), and
    for the distillation token.
    """
    mlp: Literal["gelu", "swiglu"]
    """Two layers with a GELU between them, or a gated SiLU (Shazeer, 2020; DINOv2-g)."""
    layer_scale: Annotated[float, Field(gt=0)] | None
    """Initial value of the learned scale of each residual branch; null: no such scale."""
    qk_norm: bool
    """LayerNorm on queries and keys (Dehghani et al., ICML 2023)."""
    initialization: Literal["trunc_normal", "xavier"]
    """As in DeiT (truncated normal, 0.02), or as in the ViT paper's own code (Xavier, zero head).
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        _divides("heads", self.heads, "width", self.width)
        if self.pool != "mean" and not self.class_token:
            raise ValueError(f"pool={self.pool} needs class_token=true; or choose pool=mean.")
        if self.pool == "class_token_and_mean" and self.pool_norm == "after":
            raise ValueError("pool=class_token_and_mean needs pool_norm=before.")
        if self.distillation_token and self.pool != "class_token":
            raise ValueError(
                f"distillation_token=true needs pool=class_token, not pool={self.pool}: "
                f"each of the two tokens has a head of its own."
            )
        if self.positions == "sincos2d" and self.width % 4:
            raise ValueError(f"positions=sincos2d needs a width divisible by 4, not {self.width}.")
        if self.positions == "rotary" and self.width // self.heads % 4:
            raise ValueError(
                f"positions=rotary needs a head width divisible by 4, "
                f"but width / heads = {self.width} / {self.heads} = {self.width // self.heads}."
            )
        return self


class _SwinShared(_Shared):
    """What both versions of Swin have."""

    patch_size: Size
    width: PositiveInt
    """Width of the first stage; every later stage doubles it."""
    depths: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    heads: tuple[PositiveInt, ...]
    window: Size
    """Tokens along a window. Where the grid at the configured image size is smaller, so is the
    window.
    """
    shift: bool
    """Shift every second block's windows by half a window; false leaves windows unconnected."""
    positions: Literal["relative", "absolute", "none"]
    """A bias by relative position in every block, one table added to the patches, or neither."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.heads) != len(self.depths):
            raise ValueError(
                f"heads needs one entry per stage: depths has {len(self.depths)} "
                f"{list(self.depths)}, heads has {len(self.heads)} {list(self.heads)}."
            )
        for stage, heads in enumerate(self.heads):
            _divides(f"heads[{stage}]", heads, "the stage's width", self.width * 2**stage)
        return self


class SwinConfig(_SwinShared):
    """A Swin Transformer (Liu et al., ICCV 2021)."""

    kind: Literal["swin"]


class SwinV2Config(_SwinShared):
    """A Swin Transformer V2 (Liu et al., CVPR 2022)."""

    kind: Literal["swin_v2"]
    pretrained_window: tuple[PositiveInt, ...] | None
    """Window of each stage that the position network was trained with; null: this model's own."""

    @model_validator(mode="after")
    def _check_pretrained_window(self) -> Self:
        if self.pretrained_window is not None and len(self.pretrained_window) != len(self.depths):
            raise ValueError(
                f"pretrained_window needs one entry per stage ({len(self.depths)}), "
                f"found {list(self.pretrained_window)}."
            )
        return self


class TimmConfig(_Published):
    """Any model of timm as a baseline behind the same interface."""

    kind: Literal["timm"]
    name: Annotated[str, Field(min_length=1)]
    """timm's name of the architecture, such as resnet50 or mvitv2_tiny."""
    drop_path: Rate | None
    """null: timm's own default, for models that know no stochastic depth."""
    checkpoint_activations: bool


ModelConfig = Annotated[
    ViTConfig | SwinConfig | SwinV2Config | TimmConfig, Field(discriminator="kind")
]


class AutoModelConfig(Config):
    """The model that the weights of `init` belong to. What is null is as the file says; what a file
    cannot say, such as the heads of a ViT of unusual width, is given here.
    """

    kind: Literal["auto"]
    heads: PositiveInt | tuple[PositiveInt, ...] | None
    window: Size | None
    pretrained_window: tuple[PositiveInt, ...] | None
    """Of a Swin V2: the window of each stage that its position network was trained with."""
    trained_size: Size | None
    """Size of the pictures that the weights were trained on, where their grid was not square."""
    dropout: Rate | None
    attention_dropout: Rate | None
    drop_path: Rate | None
    drop_path_schedule: Literal["linear", "uniform"] | None
    checkpoint_activations: bool | None

    def given(self) -> dict[str, Any]:
        """The settings of the model's config that are not left to the file."""
        values = self.model_dump(mode="json", exclude={"kind", "trained_size"})
        return {name: value for name, value in values.items() if value is not None}


ModelChoice = Annotated[
    ViTConfig | SwinConfig | SwinV2Config | TimmConfig | AutoModelConfig,
    Field(discriminator="kind"),
]
"""What a run can be told; when it starts, a ModelConfig is made of it."""


def _divides(small: str, divisor: int, large: str, number: int) -> None:
    if number % divisor:
        raise ValueError(f"{small} = {divisor} does not divide {large} = {number}.")
