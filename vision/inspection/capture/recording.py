"""What a capture holds, and how it is gathered and checked while the model runs.

Axes: see `vision/inspection/capture/layout.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from vision.inspection.capture.layout import Layout, Place

Fusion = Literal["mean", "max", "min"]
"""How the heads of a layer become one."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


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
    heads: tuple[int, ...]
    """Which heads these are; empty where they were fused."""
    reduced: Fusion | None = None
    gradient: Tensor | None = None
    """Of the target's logit with respect to the weights, of their shape."""
    share: Tensor | None = None
    """The measured part of the attention branch in the residual sum, ‖branch‖ / (‖branch‖ + ‖x‖),
    by token (b n). None where the block's parts are not known."""
    inputs: Tensor | None = None
    """What the attention was given (b n c); with gradients only."""
    inputs_gradient: Tensor | None = None

    def row(self, place: Place) -> Tensor:
        """Where a token looks: (b h n), zero outside its window."""
        return self.layout.row(self.weights, place)

    def column(self, place: Place) -> Tensor:
        """Who looks at a token: (b h n), zero outside its window."""
        return self.layout.column(self.weights, place)

    def need_gradient(self) -> Tensor:
        """The gradient, or an error that says how to get it."""
        if self.gradient is None:
            raise ValueError("This needs gradients: capture(..., gradients=True).")
        return self.gradient


@dataclass(frozen=True, eq=False)
class Ending:
    """How a model comes from its last tokens to its logits."""

    pool: Literal["class", "mean", "class and distillation", "class and mean", "attention", "other"]
    norm: nn.Module | None
    """The last norm."""
    norm_after: bool
    """Whether it follows the pooling."""
    head: nn.Linear | None


@dataclass(frozen=True, eq=False)
class Captured:
    """One forward pass."""

    model: str
    """The model's class."""
    logits: Tensor | None
    """(b classes); None for a model without a head."""
    targets: Tensor | None
    """The classes that were asked for, and that gradients are of: (b)."""
    layers: list[LayerAttention]
    depth: int
    """How many attention layers the model has; `layers` may be a selection."""
    tokens: Tensor | None
    """The last tokens before the final norm: (b n c), prefix first."""
    layout: Layout
    """Of `tokens`."""
    ending: Ending
    image_size: tuple[int, int]
    pooling: Tensor | None = None
    """Shares of the last tokens in what an attention pooling sees, mean over its heads: (b n)."""

    @property
    def batch(self) -> int:
        """Number of images."""
        return self.layers[0].weights.shape[0]

    @property
    def windowed(self) -> bool:
        """Whether this is a model of windows."""
        return self.layout.family == "windowed"

    def layer(self, which: int | str) -> LayerAttention:
        """A layer by its number among all of the model's (negative: from the end) or its name."""
        for layer in self.layers:
            if which in (layer.name, layer.number, layer.number - self.depth):
                return layer
        known = ", ".join(f"{layer.number} ({layer.name})" for layer in self.layers)
        raise ValueError(f"There is no captured layer {which!r}. Captured: {known}.")

    def need_all(self) -> list[LayerAttention]:
        """All layers in order, or an error where only some were captured."""
        if len(self.layers) != self.depth:
            raise ValueError(
                f"This needs all {self.depth} layers, but only {len(self.layers)} were captured: "
                "capture without `layers`."
            )
        return self.layers


class CaptureError(RuntimeError):
    """Attention that cannot be had, or that does not pass its checks."""


@dataclass
class _Entry:
    layer: LayerAttention
    raw: Tensor
    """The tensor of the forward pass: ((b w) h t t)."""
    inputs: Tensor | None


@dataclass
class Recorder:
    """Takes attention as the model computes it: checks, selects, reduces, keeps."""

    batch: int
    gradients: bool
    wanted: frozenset[int] | None
    heads: tuple[int, ...] | None
    reduce: Fusion | None
    entries: list[_Entry] = field(default_factory=list)
    seen: int = 0
    layout: Layout | None = None
    """Of the last layer seen, chosen or not."""
    pooling: Tensor | None = None
    """What an attention pooling looks at: (b n)."""
    open: bool = True
    """False while a backward pass may run parts of the model again."""

    def add(
        self,
        name: str,
        raw: Tensor,
        layout: Callable[[], Layout],
        inputs: Callable[[], Tensor | None],
    ) -> None:
        """Note the weights ((b w) h t t) of one layer."""
        if not self.open:
            return
        number, self.seen = self.seen, self.seen + 1
        check_rows(name, raw)
        self.layout = place = layout()
        if self.wanted is not None and number not in self.wanted:
            return
        heads = self._heads(name, raw)
        weights = self.shaped(raw if self.gradients else raw.detach(), place, heads)
        layer = LayerAttention(name, number, weights, place, heads, self.reduce)
        if self.reduce is not None:
            layer = replace(layer, heads=())
        kept = raw if self.gradients else weights
        self.entries.append(_Entry(layer, kept, inputs() if self.gradients else None))

    def _heads(self, name: str, raw: Tensor) -> tuple[int, ...]:
        number = raw.shape[1]
        for head in self.heads or ():
            if not -number <= head < number:
                raise ValueError(f"There is no head {head}: layer {name} has {number} heads.")
        return tuple(range(number)) if self.heads is None else tuple(h % number for h in self.heads)

    def shaped(self, raw: Tensor, layout: Layout, heads: tuple[int, ...]) -> Tensor:
        """The heads that are kept, with an axis of windows where there are some."""
        if len(heads) != raw.shape[1]:
            raw = raw[:, list(heads)]
        if self.reduce is not None:
            raw = fuse(raw, self.reduce, dim=1).unsqueeze(1)
        if layout.index is None:
            return raw
        return rearrange(raw, "(b w) h t s -> b w h t s", b=self.batch)

    def finish(
        self, score: Tensor | None, shares: dict[str, Tensor], share_slots: bool
    ) -> list[LayerAttention]:
        """The layers, with gradients of a score if one is given."""
        self.open = False
        gradients: Sequence[Tensor | None] = [None] * (2 * len(self.entries))
        if score is not None:
            gradients = _gradients(score, self.entries)
        layers = []
        for i, entry in enumerate(self.entries):
            layer, gradient, of_inputs = entry.layer, gradients[2 * i], gradients[2 * i + 1]
            if gradient is not None:
                gradient = self.shaped(gradient, layer.layout, layer.heads)
            layers.append(
                replace(
                    layer,
                    weights=layer.weights.detach(),
                    gradient=gradient,
                    share=_share(layer, shares, share_slots),
                    inputs=_by_token(entry.inputs, layer.layout, self.batch),
                    inputs_gradient=_by_token(of_inputs, layer.layout, self.batch),
                )
            )
        return layers


def fuse(weights: Tensor, fusion: Fusion, dim: int) -> Tensor:
    """Heads as one."""
    match fusion:
        case "mean":
            return weights.mean(dim)
        case "max":
            return weights.amax(dim)
        case "min":
            return weights.amin(dim)
        case _:
            raise ValueError(f"Unknown fusion {fusion!r} of heads: choose mean, max or min.")


def check_rows(name: str, weights: Tensor) -> None:
    """Attention weights are shares: each row sums to 1."""
    apart = (weights.detach().sum(dim=-1) - 1).abs().max().item()
    if not apart <= TOLERANCE.get(weights.dtype, 1e-2):
        raise CaptureError(
            f"The rows of what was taken for the attention of {name} do not sum to 1 "
            f"(off by {apart:.2g}): this is not softmax attention."
        )


def check_output(name: str, explicit: Tensor, fused: Tensor) -> None:
    """The weights times the values give what the fused kernel gives."""
    apart = (explicit.detach() - fused).abs().max().item()
    size = max(1.0, fused.abs().max().item())
    if not apart <= TOLERANCE.get(explicit.dtype, 1e-2) * size:
        raise CaptureError(
            f"The attention of {name} times its values is off by {apart:.2g} from the output of "
            "the fused kernel: these are not the weights that the model uses."
        )


def _gradients(score: Tensor, entries: list[_Entry]) -> list[Tensor | None]:
    """Of the weights and the inputs of every entry, in turn."""
    wanted = [t for e in entries for t in (e.raw, e.inputs) if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(score, wanted, allow_unused=True) if wanted else ())
    gradients: list[Tensor | None] = []
    for entry in entries:
        for tensor in (entry.raw, entry.inputs):
            if tensor is None or not tensor.requires_grad:
                gradients.append(None)
                continue
            gradients.append(next(found))
        if gradients[-2] is None:
            raise CaptureError(f"The logits do not depend on the attention of {entry.layer.name}.")
    return gradients


def _share(layer: LayerAttention, shares: dict[str, Tensor], slots: bool) -> Tensor | None:
    """The measured share of the block that a layer is part of, by token."""
    parts = layer.name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        share = shares.get(".".join(parts[:length]))
        if share is not None:
            share = share.flatten(1)
            if slots and layer.layout.index is not None:
                share = layer.layout.by_cell(share.unflatten(1, layer.layout.index.shape))
            return share if share.shape[1] == layer.layout.tokens else None
    return None


def _by_token(values: Tensor | None, layout: Layout, batch: int) -> Tensor | None:
    """What an attention module was given, or its gradient, as (b n c)."""
    if values is None:
        return None
    values = values.detach()
    if layout.index is None:
        return values
    values = values.reshape(batch, *layout.index.shape, values.shape[-1])
    return layout.by_cell(values.movedim(-1, 1)).movedim(1, -1)
