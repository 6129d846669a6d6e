"""Attention and its gradient from the very forward pass that gives the logits.

This project's models hand their attention to an observer; any other model runs under a torch
function mode (`vision/inspection/capture/foreign_models.py`). The model itself is not changed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from vision.inspection.capture.anatomy import anatomy_of, has_head, own_model
from vision.inspection.capture.captured import Anatomy, Captured, CaptureError, Fusion
from vision.inspection.capture.foreign_models import watching_foreign
from vision.inspection.capture.recording import (
    Recorder,
    check_output,
    keeping_tokens,
    measuring_shares,
    removing,
)
from vision.inspection.capture.token_layout import Layout
from vision.models.attention import AttentionPool, Observer
from vision.models.layers import Grid, evaluating, pad_to_multiple
from vision.models.swin import Stage, Swin
from vision.models.vit import ViT
from vision.models.windows import StageShape, partition

Targets = int | Sequence[int] | Tensor
"""One class for all images, or one for each."""


def capture(
    model: nn.Module,
    images: Tensor,
    *,
    targets: Targets | None = None,
    gradients: bool = False,
    layers: Sequence[int | str] | None = None,
    reduce: Fusion | None = None,
) -> Captured:
    """The attention of a model for images (b channels height width), in evaluation mode.

    targets: the classes that methods will explain; by default the predicted ones.
    gradients: also capture the gradients of the targets' logits.
    layers: numbers (negative: from the end) or names. reduce: keep only the mean, max or min over
    heads, layer by layer, to save memory.
    """
    if gradients and reduce is not None:
        raise ValueError(
            "reduce cannot be combined with gradients, which need the weights of every head; "
            "to save memory choose some layers."
        )
    if layers is not None and not layers:
        raise ValueError("layers is empty: name at least one layer, or leave it out for all.")
    recorder = Recorder(images.shape[0], gradients, layers, reduce)
    return _run(model, images, recorder, [targets])[0]


class Passes:
    """The captures of a model for a batch of images (b channels height width).

    Whatever is computed from them, the model runs at most twice: once for its attention, and once
    for all classes whose gradients are asked for together.
    """

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.model, self.images = model, images
        self._by_targets: dict[tuple[int, ...], Captured] = {}

    @cached_property
    def plain(self) -> Captured:
        """Every head of every layer."""
        return capture(self.model, self.images)

    def gradients(self, targets: Tensor) -> list[Captured]:
        """The same with gradients, for each of several classes per image (b k)."""
        keys = [tuple(column.tolist()) for column in targets.T]
        missing = [key for key in dict.fromkeys(keys) if key not in self._by_targets]
        if missing:
            recorder = Recorder(self.images.shape[0], gradients=True)
            found = _run(self.model, self.images, recorder, missing)
            self._by_targets |= dict(zip(missing, found, strict=True))
        return [self._by_targets[key] for key in keys]


def _run(
    model: nn.Module, images: Tensor, recorder: Recorder, targets: Sequence[Targets | None]
) -> list[Captured]:
    """One forward pass, and a backward pass for each of the targets where gradients are wanted."""
    _check_arguments(model, images)
    anatomy = anatomy_of(model)
    size = (images.shape[-2], images.shape[-1])
    own = own_model(model)
    watching = watching_foreign if own is None else _watching_own
    with (
        evaluating(model),
        torch.set_grad_enabled(recorder.gradients),
        measuring_shares(model) as shares,
        keeping_tokens(anatomy.last, anatomy.last_is) as tokens,
        watching(model, recorder, anatomy, size),
    ):
        # A leaf that requires a gradient, so that one exists also where all weights are frozen.
        output = model(images.detach().requires_grad_() if recorder.gradients else images)
        # The output of a model without a head are features, which must not pass for logits.
        logits = logits_of(output) if has_head(model) else None
        if not recorder.names:
            raise CaptureError(
                f"No attention was found in {type(model).__name__}. It has none (a convolutional "
                "network?), or computes it where torch functions cannot be seen: in a compiled, "
                "scripted or exported graph, or in a kernel of another package (flash-attn, "
                "xFormers)."
            )
        recorder.select()
        layout = recorder.layout
        assert layout is not None
        captures = []
        for target in targets:
            chosen = score = None
            if recorder.gradients or target is not None:
                if logits is None:
                    raise ValueError(
                        f"{type(model).__name__} returns no logits (b, classes), so there is no "
                        "class to explain: use the model with its classification head."
                    )
                chosen = chosen_classes(logits, target)
                score = logits.gather(1, chosen[:, None]).sum() if recorder.gradients else None
            captures.append(
                Captured(
                    model=type(model).__name__,
                    logits=None if logits is None else logits.detach(),
                    targets=chosen,
                    layers=recorder.finish(score, shares, isinstance(own, Swin)),
                    depth=len(recorder.names),
                    tokens=tokens[0] if tokens and tokens[0].shape[1] == layout.tokens else None,
                    layout=layout,
                    anatomy=anatomy,
                    pooling=recorder.pooling,
                    activation=getattr(model, "activation", "softmax"),
                )
            )
    return captures


def logits_of(output: Any) -> Tensor | None:
    """The logits among what a model returns; None if it returns features only."""
    if isinstance(output, Tensor):
        return output if output.ndim == 2 else None
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def _check_arguments(model: nn.Module, images: Tensor) -> None:
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            f"Expected images as a float tensor (batch, channels, height, width), found "
            f"{tuple(images.shape)} of {images.dtype}."
        )
    if images.shape[0] == 0:
        raise ValueError("The batch is empty: at least one image is needed.")
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())
    if compiled or hasattr(model, "_orig_mod"):
        raise CaptureError(
            f"{type(model).__name__} is compiled, and the attention inside a compiled graph "
            "cannot be seen. Pass the model from before torch.compile; it has the same weights."
        )


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


@contextmanager
def _watching_own(
    model: nn.Module, recorder: Recorder, anatomy: Anatomy, size: Grid
) -> Iterator[None]:
    """While this lasts, the attention of a model of this project goes to the recorder."""
    observers = _observers(model, recorder, anatomy, size)
    watched: dict[Any, Observer] = {observer.module: observer for observer in observers}
    for module in model.modules():
        if isinstance(module, AttentionPool):
            watched[module] = partial(_record_pooling, recorder)
    before = {module: vars(module).get("observer") for module in watched}
    handles = [o.module.register_forward_pre_hook(o.enter) for o in observers]
    try:
        for module, observer in watched.items():
            module.observer = observer
        with removing(handles):
            yield
    finally:
        for module, former in before.items():
            del module.observer  # the class has the default
            if former is not None:
                module.observer = former


def _record_pooling(recorder: Recorder, weights: Tensor) -> Tensor:
    """Record the weights (b h 1 n) of an attention pooling and return them unchanged."""
    if recorder.open:
        recorder.pooling = weights.detach().mean(dim=1)[:, 0]
    return weights


@dataclass(eq=False)
class _Observer:
    """The observer of one attention module."""

    name: str
    module: Any
    layout: Callable[[], Layout]
    recorder: Recorder
    inputs: Tensor | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep the input of the module, for its gradient."""
        self.inputs = args[0] if self.recorder.gradients else None

    def __call__(self, weights: Tensor) -> Tensor:
        """Record the weights and return them unchanged."""
        self.recorder.add(self.name, weights, self.layout, self.inputs)
        self.inputs = None
        return weights

    def check(self, explicit: Tensor, fused: Callable[[], Tensor]) -> None:
        """Compare the explicit with the fused path."""
        with torch.no_grad():
            check_output(self.name, explicit, fused())


def _observers(
    model: nn.Module, recorder: Recorder, anatomy: Anatomy, size: Grid
) -> list[_Observer]:
    """Observers of the attention modules, in the order in which these run."""
    own = own_model(model)
    assert own is not None
    name = next(name for name, module in model.named_modules() if module is own)
    prefix = f"{name}." if name else ""
    grid = own.patch_embed.grid(size)
    if isinstance(own, ViT):
        margins = own.patch_embed.margins
        layout = Layout(anatomy.prefix, grid, anatomy.patch, size, margins=margins)
        return [
            _Observer(f"{prefix}blocks.{i}.attn", block.attn, lambda: layout, recorder)
            for i, block in enumerate(own.blocks)
        ]
    shapes = own.shapes(grid)
    observers = []
    for s, stage in enumerate(own.layers):
        assert isinstance(stage, Stage)
        stride = (anatomy.patch[0] * 2**s, anatomy.patch[1] * 2**s)
        # Blocks of a kind share one layout, computed when first needed.
        kinds = [
            cache(partial(_own_windows, own, s, shapes[s], second, stride, size))
            for second in (False, True)
        ]
        for i, block in enumerate(stage.blocks):
            name = f"{prefix}layers.{s}.blocks.{i}.attn"
            observers.append(_Observer(name, block.attn, kinds[i % 2], recorder))
    return observers


def _own_windows(
    model: Swin, number: int, shape: StageShape, second: bool, stride: Grid, size: Grid
) -> Layout:
    """The layout of a block, by the order and the masks that the stage itself uses."""
    stage = model.layers[number]
    assert isinstance(stage, Stage)
    windows = stage.windows(shape)
    rows, columns = shape.grid
    numbers = torch.arange(rows * columns, device=stage.tensors.device).view(1, 1, rows, columns)
    # Padding is zero in the model: number cells from 1 to distinguish the first from padding.
    slots = partition(pad_to_multiple(numbers + 1, shape.window) - 1, shape.window)
    shifted = second and windows.to_shifted is not None
    slots = windows.shift(slots) if shifted else slots
    mask = windows.of_block(int(second)).mask
    return Layout(
        (),
        shape.grid,
        stride,
        size,
        shape.window,
        shape.shift if shifted else (0, 0),
        slots.view(-1, shape.window[0] * shape.window[1]),
        None if mask is None else mask[:, 0] == 0,
        model.patch_embed.margins,
    )
