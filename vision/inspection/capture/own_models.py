"""Attention of this project's models, through their observers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from vision.inspection.capture.anatomy import own_model
from vision.inspection.capture.layout import Layout
from vision.inspection.capture.recording import Anatomy, Recorder, check_output
from vision.models.attention import Observer
from vision.models.layers import Grid, pad_to_multiple
from vision.models.pooling import AttentionPool
from vision.models.swin import Stage
from vision.models.vit import ViT
from vision.models.windows import StageShape, partition


@contextmanager
def watching_own(
    model: nn.Module, recorder: Recorder, anatomy: Anatomy, size: Grid
) -> Iterator[None]:
    """While this lasts, the attention of a model of this project goes to the recorder."""
    observers = _observers(model, recorder, anatomy, size)
    handles = [o.module.register_forward_pre_hook(o.enter) for o in observers]
    try:
        with ExitStack() as stack:
            for observer in observers:
                stack.enter_context(_observing(observer.module, observer))
            for pool in (m for m in model.modules() if isinstance(m, AttentionPool)):
                stack.enter_context(_observing(pool, partial(_record_pooling, recorder)))
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _observing(module: Any, observer: Observer) -> Iterator[None]:
    """While this lasts, a module has this observer."""
    before = vars(module).get("observer")
    module.observer = observer
    try:
        yield
    finally:
        del module.observer  # the class has the default
        if before is not None:
            module.observer = before


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
        self.recorder.add(self.name, weights, self.layout, lambda: self.inputs)
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
        layout = Layout(anatomy.prefix, grid, anatomy.patch, size)
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
            cache(partial(_own_windows, stage, shapes[s], second, stride, size))
            for second in (False, True)
        ]
        for i, block in enumerate(stage.blocks):
            name = f"{prefix}layers.{s}.blocks.{i}.attn"
            observers.append(_Observer(name, block.attn, kinds[i % 2], recorder))
    return observers


def _own_windows(stage: Stage, shape: StageShape, second: bool, stride: Grid, size: Grid) -> Layout:
    """The layout of a block, by the order and the masks that the stage itself uses."""
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
    )
