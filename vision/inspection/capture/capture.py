"""Attention and its gradient from the very forward pass that gives the logits.

This project's models hand their attention to an observer; any other model runs under a torch
function mode (`vision/inspection/capture/foreign_models.py`). Nothing of the model is edited.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vision.inspection.capture.anatomy import Facts, facts_of, has_head, own_model
from vision.inspection.capture.foreign_models import watching_foreign
from vision.inspection.capture.hooks import evaluating, keeping_tokens, measuring_shares
from vision.inspection.capture.own_models import sites_of, watching_own
from vision.inspection.capture.recording import (
    TOLERANCE,
    Captured,
    CaptureError,
    Fusion,
    LayerAttention,
    Recorder,
)
from vision.models.layers import Grid
from vision.models.swin import Swin

Targets = int | Sequence[int] | Tensor
"""One class for all images, or one for each."""


def capture(
    model: nn.Module,
    images: Tensor,
    *,
    targets: Targets | None = None,
    gradients: bool = False,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    reduce: Fusion | None = None,
    verify: bool = False,
) -> Captured:
    """The attention of a model for images (b channels height width), in evaluation mode.

    targets: the classes that methods will ask for; the predicted ones where none are given.
    gradients: also those of the targets' logits.
    layers: numbers (negative: from the end) or names. heads: numbers, of every layer. reduce: keep
    only the mean, max or min over heads, layer by layer, so that memory stays small.
    verify: compare the logits with those of a plain forward pass.
    """
    _check_arguments(model, images, gradients, reduce)
    facts = facts_of(model)
    size = (images.shape[-2], images.shape[-1])
    with evaluating(model):
        wanted = _wanted(model, images, facts, layers)
        recorder = Recorder(
            images.shape[0], gradients, wanted, None if heads is None else tuple(heads), reduce
        )
        with (
            torch.set_grad_enabled(gradients),
            measuring_shares(model) as shares,
            keeping_tokens(facts.last, facts.last_is) as tokens,
            _watching(model, recorder, facts, size),
        ):
            # A leaf that wants a gradient, so that one exists also where all weights are frozen.
            inputs = images.detach().requires_grad_() if gradients else images
            output = model(inputs)
            # What a model without a head returns are features and must not pass for logits.
            logits = logits_of(output) if has_head(model) else None
            found, chosen = _finish(model, recorder, logits, targets, shares)
        if verify and logits is not None:
            _verify(model, images, logits)
    layout = recorder.layout
    assert layout is not None  # some layer was seen
    fits = bool(tokens) and tokens[0].shape[1] == layout.tokens
    return Captured(
        model=type(model).__name__,
        logits=None if logits is None else logits.detach(),
        targets=chosen,
        layers=found,
        depth=recorder.seen,
        tokens=tokens[0] if fits else None,
        layout=layout,
        ending=facts.ending,
        image_size=size,
        pooling=recorder.pooling,
    )


def logits_of(output: Any) -> Tensor | None:
    """The logits among what a model returns; None if it returns features only."""
    if isinstance(output, Tensor):
        return output if output.ndim == 2 else None
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def _check_arguments(
    model: nn.Module, images: Tensor, gradients: bool, reduce: Fusion | None
) -> None:
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            f"Expected images as a float tensor (batch, channels, height, width), found "
            f"{tuple(images.shape)} of {images.dtype}."
        )
    if images.shape[0] == 0:
        raise ValueError("There are no images: the batch is empty.")
    if gradients and reduce is not None:
        raise ValueError(
            "reduce cannot be combined with gradients, which need the weights of every head; "
            "to save memory choose some layers or heads."
        )
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())
    if compiled or hasattr(model, "_orig_mod"):
        raise CaptureError(
            f"{type(model).__name__} is compiled, and the attention inside a compiled graph "
            "cannot be seen. Pass the model from before torch.compile; it has the same weights."
        )


def _wanted(
    model: nn.Module, images: Tensor, facts: Facts, layers: Sequence[int | str] | None
) -> frozenset[int] | None:
    """The numbers of the chosen layers; None: all."""
    if layers is None:
        return None
    if not layers:
        raise ValueError("layers is empty: name at least one layer, or leave it out for all.")
    own = own_model(model)
    if own is not None:
        names = [site.name for site in sites_of(model, (1, 1), facts)]
    else:
        # How many layers another model has is known after a forward pass only: run one that keeps
        # nothing.
        counter = _Names(images.shape[0], False, frozenset(), None, None)
        with torch.no_grad(), _watching(model, counter, facts, (0, 0)):
            model(images)
        names = counter.names
        _need_some(model, len(names))
    numbers = set()
    for layer in layers:
        if isinstance(layer, str) and layer in names:
            numbers.add(names.index(layer))
        elif isinstance(layer, int) and -len(names) <= layer < len(names):
            numbers.add(layer % len(names))
        else:
            raise ValueError(
                f"There is no layer {layer!r}: this model has {len(names)} attention layers, "
                f"from 0 ({names[0]}) to {len(names) - 1} ({names[-1]})."
            )
    return frozenset(numbers)


@dataclass
class _Names(Recorder):
    """Notes no more than which layers there are."""

    names: list[str] = field(default_factory=list)

    def add(self, name: str, *_: Any) -> None:
        """Note the name."""
        self.names.append(name)


def _finish(
    model: nn.Module,
    recorder: Recorder,
    logits: Tensor | None,
    targets: Targets | None,
    shares: dict[str, Tensor],
) -> tuple[list[LayerAttention], Tensor | None]:
    """The layers, and the classes that their gradients are of."""
    _need_some(model, recorder.seen)
    slots = isinstance(own_model(model), Swin)
    if not recorder.gradients and targets is None:
        return recorder.finish(None, shares, slots), None
    if logits is None:
        raise ValueError(
            f"{type(model).__name__} returns no logits (b, classes), so there is no class to ask "
            "for: use the model with its classification head."
        )
    chosen = chosen_classes(logits, targets)
    score = logits.gather(1, chosen[:, None]).sum() if recorder.gradients else None
    return recorder.finish(score, shares, slots), chosen


def chosen_classes(logits: Tensor, targets: Targets | None) -> Tensor:
    """One class per image: (b). Without targets, the predicted one."""
    batch, classes = logits.shape
    if targets is None:
        return logits.argmax(dim=1).detach()
    chosen = torch.as_tensor(targets, device=logits.device, dtype=torch.int64)
    chosen = chosen.expand(batch) if chosen.ndim == 0 else chosen
    if chosen.shape != (batch,):
        raise ValueError(f"Expected one target or {batch}, found {tuple(chosen.shape)}.")
    if bool(((chosen < 0) | (chosen >= classes)).any()):
        raise ValueError(f"Targets must be classes from 0 to {classes - 1}: {chosen.tolist()}.")
    return chosen


def _need_some(model: nn.Module, number: int) -> None:
    if number == 0:
        raise CaptureError(
            f"No attention was found in {type(model).__name__}. It has none (a convolutional "
            "network?), or computes it where torch functions cannot be seen: in a compiled, "
            "scripted or exported graph, or in a kernel of another package (flash-attn, xFormers)."
        )


def _verify(model: nn.Module, images: Tensor, logits: Tensor) -> None:
    with torch.no_grad():
        plain = logits_of(model(images))
    assert plain is not None
    apart = (plain - logits.detach()).abs().max().item()
    if not apart <= TOLERANCE.get(plain.dtype, 1e-2) * max(1.0, plain.abs().max().item()):
        raise CaptureError(f"The logits with and without capture differ by {apart:.2g}.")


@contextmanager
def _watching(model: nn.Module, recorder: Recorder, facts: Facts, size: Grid) -> Iterator[None]:
    own = own_model(model)
    watching = watching_foreign if own is None else watching_own
    with watching(model, recorder, facts, size):
        yield
