"""The result of a capture: the attention of every layer, and where its tokens lie in the image.

Axes: b batch · h heads · w windows · t, s slots of a window (queries, keys) · n, m tokens (prefix
tokens first, then cells row by row) · y, x rows and columns of the cell grid.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from vision.inspection.capture.token_layout import Layout, Place
from vision.models.layers import Activation, Grid

Fusion = Literal["mean", "max", "min"]
"""The reduction of the heads of a layer to one."""

Pool = Literal["class", "mean", "class and distillation", "class and mean", "attention", "other"]
"""What the head sees of the last tokens."""


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """The attention of one layer."""

    name: str
    """Of the module that computed it."""
    number: int
    """Among all attention layers of the model, from 0."""
    weights: Tensor
    """(b h n n), or (b w h t t) of a windowed layer; rows sum to 1."""
    layout: Layout
    reduced: Fusion | None = None
    """How the heads were fused into one."""
    gradient: Tensor | None = None
    """Of the target's logit with respect to the weights, of their shape."""
    share: Tensor | None = None
    """The measured part of the attention branch in the residual sum, ‖branch‖ / (‖branch‖ + ‖x‖),
    by token (b n). None where the block's parts are unknown."""
    inputs: Tensor | None = None
    """The input of the attention (b n c); with gradients only."""
    inputs_gradient: Tensor | None = None

    @property
    def head_axis(self) -> int:
        """The axis of heads in `weights`."""
        return 1 if self.layout.index is None else 2

    def row(self, place: Place) -> Tensor:
        """Where a token looks: (b h n), zero outside its window."""
        return self.layout.row(self.weights, place)

    def need_gradient(self) -> Tensor:
        """The gradient, or an error that says how to get it."""
        if self.gradient is None:
            raise ValueError("This needs gradients: capture(..., gradients=True).")
        return self.gradient


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of a model beside its attention."""

    prefix: tuple[str, ...]
    patch: Grid
    """Pixels from one token of the first layer to the next."""
    pool: Pool = "other"
    norm: nn.Module | None = None
    """The last norm."""
    head: nn.Linear | None = None
    norm_after: bool = False
    """Whether the last norm follows the pooling."""
    last: nn.Module | None = None
    """The module whose input or output are the last tokens before the final norm."""
    last_is: Literal["input", "output"] = "input"


@dataclass(frozen=True, eq=False)
class Captured:
    """One forward pass."""

    model: str
    """The model's class."""
    logits: Tensor | None
    """(b classes); None for a model without a head."""
    targets: Tensor | None
    """The target classes, also of the gradients: (b)."""
    layers: list[LayerAttention]
    depth: int
    """Number of attention layers of the model; `layers` may be a selection."""
    tokens: Tensor | None
    """The last tokens before the final norm: (b n c), prefix first."""
    layout: Layout
    """Of `tokens`."""
    anatomy: Anatomy
    pooling: Tensor | None = None
    """Shares of the last tokens in what an attention pooling sees, mean over its heads: (b n)."""
    activation: Activation = "softmax"
    """From logits to probabilities."""

    @property
    def batch(self) -> int:
        """Number of images."""
        return self.layers[0].weights.shape[0]

    @property
    def windowed(self) -> bool:
        """Whether this is a model of windows."""
        return self.layout.index is not None

    def layer(self, which: int | str) -> LayerAttention:
        """A layer by its number among all of the model's (negative: from the end) or its name."""
        for layer in self.layers:
            if which in (layer.name, layer.number, layer.number - self.depth):
                return layer
        known = ", ".join(f"{layer.number} ({layer.name})" for layer in self.layers)
        raise ValueError(f"Layer {which!r} was not captured. Captured: {known}.")

    def need_all(self) -> list[LayerAttention]:
        """All layers in order, or an error where only some were captured."""
        if len(self.layers) != self.depth:
            raise ValueError(
                f"This needs all {self.depth} layers, but only {len(self.layers)} were captured: "
                "capture without `layers`."
            )
        return self.layers


class CaptureError(RuntimeError):
    """Attention that cannot be captured, or that fails its checks."""


_FUSE: dict[Fusion, Callable[..., Tensor]] = {
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}


def fuse(weights: Tensor, fusion: Fusion, dim: int) -> Tensor:
    """Heads as one."""
    if fusion not in _FUSE:
        raise ValueError(f"Unknown fusion {fusion!r} of heads: choose mean, max or min.")
    return _FUSE[fusion](weights, dim)
