"""Everything that is recorded while a model runs: attention, residual shares, last tokens.

Axes: see `vision/inspection/capture/captured.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vision.inspection.capture.captured import CaptureError, Fusion, LayerAttention, fuse
from vision.inspection.capture.token_layout import Layout

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
BRANCHES = ("drop_path1", "drop_path", "stochastic_depth", "dropout")
"""Names of the last module of the attention branch in the blocks of different libraries."""


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
    layers: Sequence[int | str] | None = None
    reduce: Fusion | None = None
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
        self, name: str, raw: Tensor, layout: Callable[[], Layout], inputs: Tensor | None
    ) -> None:
        """Record the weights ((b w) h t t) of one layer, and the input of its attention."""
        if not self.open:
            return
        number = len(self.names)
        self.names.append(name)
        _check_rows(name, raw)
        self.layout = layout()
        weights = self._shaped(raw if self.gradients else raw.detach(), self.layout)
        layer = LayerAttention(name, number, weights, self.layout, self.reduce)
        kept = raw if self.gradients else weights
        self.entries.append(_Entry(layer, kept, inputs if self.gradients else None))
        self.entries = [entry for entry in self.entries if self._may_select(entry.layer)]

    def _may_select(self, layer: LayerAttention) -> bool:
        """Whether a layer is selected, or may be once the number of layers is known."""
        if self.layers is None or layer.name in self.layers or layer.number in self.layers:
            return True
        furthest = min((n for n in self.layers if isinstance(n, int)), default=0)
        return layer.number - len(self.names) >= furthest

    def _shaped(self, raw: Tensor, layout: Layout) -> Tensor:
        """The heads, fused if asked for, with an axis of windows where there are some."""
        if self.reduce is not None:
            raw = fuse(raw, self.reduce, dim=1).unsqueeze(1)
        if layout.index is None:
            return raw
        return rearrange(raw, "(b w) h t s -> b w h t s", b=self.batch)

    def select(self) -> None:
        """Keep the selected layers only, now that the number of layers is known."""
        self.open = False
        if self.layers is None:
            return
        depth = len(self.names)
        for which in self.layers:
            if which not in self.names and which not in range(-depth, depth):
                raise ValueError(
                    f"Unknown layer {which!r}: this model has {depth} attention layers, "
                    f"from 0 ({self.names[0]}) to {depth - 1} ({self.names[-1]})."
                )
        numbers = {n % depth for n in self.layers if isinstance(n, int)}
        self.entries = [
            e for e in self.entries if e.layer.number in numbers or e.layer.name in self.layers
        ]

    def finish(
        self, score: Tensor | None, shares: Mapping[str, Tensor], share_slots: bool
    ) -> list[LayerAttention]:
        """The selected layers, with gradients of a score if one is given."""
        gradients = {} if score is None else self._gradients(score)
        layers = []
        for entry in self.entries:
            layer = entry.layer
            gradient = gradients.get(id(entry.raw))
            of_inputs = gradients.get(id(entry.inputs))
            layers.append(
                replace(
                    layer,
                    weights=layer.weights.detach(),
                    gradient=None if gradient is None else self._shaped(gradient, layer.layout),
                    share=_share(layer, shares, share_slots),
                    inputs=_by_token(entry.inputs, layer.layout, self.batch),
                    inputs_gradient=_by_token(of_inputs, layer.layout, self.batch),
                )
            )
        return layers

    def _gradients(self, score: Tensor) -> dict[int, Tensor]:
        """By id of the weights and inputs of every entry. The graph is kept."""
        tensors = [tensor for e in self.entries for tensor in (e.raw, e.inputs)]
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        found = torch.autograd.grad(score, wanted, retain_graph=True, allow_unused=True)
        gradients = {id(tensor): one for tensor, one in zip(wanted, found, strict=True)}
        for entry in self.entries:
            if gradients.get(id(entry.raw)) is None:
                name = entry.layer.name
                raise CaptureError(f"The logits do not depend on the attention of {name}.")
        return gradients


def _check_rows(name: str, weights: Tensor) -> None:
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


@contextmanager
def removing(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def measuring_shares(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """‖branch‖ / (‖branch‖ + ‖x‖) of the attention branch of every block that runs, by name.

    Tokens are in the order of the block: (b …).
    """
    shares: dict[str, Tensor] = {}
    handles = []
    for name, block in model.named_modules():
        branch = _branch(block)
        if branch is not None:
            handles += _measure(shares, name, block, branch)
    with removing(handles):
        yield shares


def _branch(block: nn.Module) -> nn.Module | None:
    """The module that ends the attention branch of a block; None for other modules."""
    children = dict(block.named_children())
    if not any("norm" in type(child).__name__.lower() for child in children.values()):
        return None
    return next((children[name] for name in BRANCHES if name in children), None)


def _measure(
    shares: dict[str, Tensor], name: str, block: nn.Module, branch: nn.Module
) -> list[RemovableHandle]:
    entered: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered[:] = [_first_tensor((*args, *kwargs.values())).detach()]

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The same module may also end the branch of the MLP: the first call is the attention's.
        if entered:
            x = entered.pop()
            branch = _first_tensor((*args, *kwargs.values())).detach()
            if branch.shape == x.shape:
                ours, theirs = branch.norm(dim=-1), x.norm(dim=-1)
                shares[name] = ours / (ours + theirs).clamp_min(torch.finfo(ours.dtype).tiny)

    return [
        block.register_forward_pre_hook(enter, with_kwargs=True),
        branch.register_forward_pre_hook(add, with_kwargs=True),
    ]


@contextmanager
def keeping_tokens(module: nn.Module | None, which: str) -> Iterator[list[Tensor]]:
    """The input or output of a module, as (b n c)."""
    kept: list[Tensor] = []

    def hook(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        values = (*args, *kwargs.values()) if which == "input" else (output,)
        kept[:] = [_first_tensor(values).detach().flatten(1, -2)]

    modules = [] if module is None else [module]
    with removing([m.register_forward_hook(hook, with_kwargs=True) for m in modules]):
        yield kept


def _first_tensor(values: Sequence[Any]) -> Tensor:
    """The first tensor among arguments; outputs may also be tuples."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            return value[0]
    raise ValueError("a module was called without a tensor")
