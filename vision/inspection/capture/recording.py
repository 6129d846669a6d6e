"""The result of a capture, and the recorder that collects and checks it while the model runs.

Axes: see `vision/inspection/capture/layout.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from vision.inspection.capture.layout import Layout, Place
from vision.models.layers import Grid

Fusion = Literal["mean", "max", "min"]
"""The reduction of the heads of a layer to one."""

Pool = Literal["class", "mean", "class and distillation", "class and mean", "attention", "other"]
"""What the head sees of the last tokens."""

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

    def column(self, place: Place) -> Tensor:
        """The weights of all tokens on one: (b h n), zero outside its window."""
        return self.layout.column(self.weights, place)

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
        return self.layout.index is not None

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
    """Attention that cannot be captured, or that fails its checks."""


@dataclass
class _Entry:
    layer: LayerAttention
    raw: Tensor
    """The tensor of the forward pass: ((b w) h t t)."""
    head_count: int
    inputs: Tensor | None


@dataclass
class Recorder:
    """Takes attention as the model computes it: checks, selects, reduces, keeps."""

    batch: int
    gradients: bool
    layers: Sequence[int | str] | None
    heads: Sequence[int] | None
    reduce: Fusion | None
    entries: list[_Entry] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Of all layers seen, selected or not."""
    layout: Layout | None = None
    """Of the last layer seen."""
    pooling: Tensor | None = None
    """The weights of an attention pooling: (b n)."""
    open: bool = True
    """False while a backward pass may run parts of the model again."""

    def add(
        self,
        name: str,
        raw: Tensor,
        layout: Callable[[], Layout],
        inputs: Callable[[], Tensor | None],
    ) -> None:
        """Record the weights ((b w) h t t) of one layer."""
        if not self.open:
            return
        number = len(self.names)
        self.names.append(name)
        check_rows(name, raw)
        self.layout = layout()
        heads = self._heads(raw.shape[1])
        weights = self._shaped(raw if self.gradients else raw.detach(), self.layout, heads)
        kept_heads = heads if self.reduce is None else ()
        layer = LayerAttention(name, number, weights, self.layout, kept_heads, self.reduce)
        kept = raw if self.gradients else weights
        given = inputs() if self.gradients else None
        self.entries.append(_Entry(layer, kept, raw.shape[1], given))
        self.entries = [entry for entry in self.entries if self._may_select(entry.layer)]

    def _may_select(self, layer: LayerAttention) -> bool:
        """Whether a layer is selected, or may be once the number of layers is known."""
        if self.layers is None or layer.name in self.layers or layer.number in self.layers:
            return True
        furthest = min((n for n in self.layers if isinstance(n, int)), default=0)
        return layer.number - len(self.names) >= furthest

    def _heads(self, count: int) -> tuple[int, ...]:
        """The selected heads that a layer has; `select` reports those that it does not have."""
        found = [h % count for h in self.heads or () if -count <= h < count]
        return tuple(found) or tuple(range(count))

    def _shaped(self, raw: Tensor, layout: Layout, heads: Sequence[int]) -> Tensor:
        """The heads that are kept, with an axis of windows where there are some."""
        if len(heads) != raw.shape[1]:
            raw = raw[:, list(heads)]
        if self.reduce is not None:
            raw = fuse(raw, self.reduce, dim=1).unsqueeze(1)
        if layout.index is None:
            return raw
        return rearrange(raw, "(b w) h t s -> b w h t s", b=self.batch)

    def select(self) -> None:
        """Keep the selected layers only, now that the number of layers is known."""
        self.open = False
        depth = len(self.names)
        for which in self.layers or ():
            if which not in self.names and which not in range(-depth, depth):
                raise ValueError(
                    f"There is no layer {which!r}: this model has {depth} attention layers, "
                    f"from 0 ({self.names[0]}) to {depth - 1} ({self.names[-1]})."
                )
        if self.layers is not None:
            numbers = {n % depth for n in self.layers if isinstance(n, int)}
            self.entries = [
                e for e in self.entries if e.layer.number in numbers or e.layer.name in self.layers
            ]
        for entry in self.entries:
            for head in self.heads or ():
                if not -entry.head_count <= head < entry.head_count:
                    raise ValueError(
                        f"There is no head {head}: layer {entry.layer.name} has "
                        f"{entry.head_count} heads."
                    )

    def finish(
        self, score: Tensor | None, shares: Mapping[str, Tensor], share_slots: bool
    ) -> list[LayerAttention]:
        """The selected layers, with gradients of a score if one is given."""
        gradients: Sequence[tuple[Tensor | None, Tensor | None]]
        gradients = [(None, None)] * len(self.entries)
        if score is not None:
            gradients = _gradients(score, self.entries)
        layers = []
        for entry, (gradient, of_inputs) in zip(self.entries, gradients, strict=True):
            layer = entry.layer
            if gradient is not None:
                gradient = self._shaped(gradient, layer.layout, layer.heads)
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
            f"The rows of the supposed attention of {name} do not sum to 1 "
            f"(difference {apart:.2g}): this is not softmax attention."
        )


def check_output(name: str, explicit: Tensor, fused: Tensor) -> None:
    """The weights times the values give what the fused kernel gives."""
    apart = (explicit.detach() - fused).abs().max().item()
    size = max(1.0, fused.abs().max().item())
    if not apart <= TOLERANCE.get(explicit.dtype, 1e-2) * size:
        raise CaptureError(
            f"The attention of {name} times its values differs by {apart:.2g} from the output of "
            "the fused kernel: these are not the weights that the model uses."
        )


def _gradients(score: Tensor, entries: list[_Entry]) -> list[tuple[Tensor | None, Tensor | None]]:
    """The gradient of the weights and of the inputs of every entry. The graph is kept."""
    wanted = [t for e in entries for t in (e.raw, e.inputs) if t is not None and t.requires_grad]
    found = torch.autograd.grad(score, wanted, retain_graph=True, allow_unused=True)
    by_tensor = {id(tensor): gradient for tensor, gradient in zip(wanted, found, strict=True)}
    gradients = [(by_tensor.get(id(e.raw)), by_tensor.get(id(e.inputs))) for e in entries]
    for entry, (of_weights, _) in zip(entries, gradients, strict=True):
        if of_weights is None:
            raise CaptureError(f"The logits do not depend on the attention of {entry.layer.name}.")
    return gradients


def _share(layer: LayerAttention, shares: Mapping[str, Tensor], slots: bool) -> Tensor | None:
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
    """The input of an attention module, or its gradient, as (b n c)."""
    if values is None:
        return None
    values = values.detach()
    if layout.index is None:
        return values
    values = values.reshape(batch, *layout.index.shape, values.shape[-1])
    return layout.by_cell(values.movedim(-1, 1)).movedim(1, -1)
