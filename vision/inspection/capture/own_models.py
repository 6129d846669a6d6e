"""Attention of this project's models, through their observers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vision.inspection.capture.anatomy import Anatomy, own_model
from vision.inspection.capture.layout import Layout
from vision.inspection.capture.recording import Recorder, check_output
from vision.models.attention import Observer
from vision.models.layers import Grid, pad_to_multiple
from vision.models.pooling import AttentionPool
from vision.models.swin import Stage
from vision.models.vit import ViT
from vision.models.windows import StageIndex, StageShape, shift_windows


@contextmanager
def watching_own(
    model: nn.Module, recorder: Recorder, anatomy: Anatomy, size: Grid
) -> Iterator[None]:
    """While this lasts, the attention of a model of this project goes to the recorder."""
    sites = sites_of(model, size, anatomy)
    watchers = [_Watcher(site, recorder) for site in sites]
    handles = [w.site.module.register_forward_pre_hook(w.enter) for w in watchers]
    try:
        with ExitStack() as stack:
            for watcher in watchers:
                stack.enter_context(_observing(watcher.site.module, watcher))
            for pool in (m for m in model.modules() if isinstance(m, AttentionPool)):
                stack.enter_context(_observing(pool, partial(_note_pooling, recorder)))
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _observing(module: Any, observer: Observer) -> Iterator[None]:
    """While this lasts, a module has this observer."""
    before = module.__dict__.get("observer")
    module.observer = observer
    try:
        yield
    finally:
        if before is None:
            module.__dict__.pop("observer", None)
        else:
            module.observer = before


def _note_pooling(recorder: Recorder, weights: Tensor) -> Tensor:
    """Note what an attention pooling looks at (b h 1 n), and leave it as it is."""
    if recorder.open:
        recorder.pooling = weights.detach().mean(dim=1)[:, 0]
    return weights


@dataclass(frozen=True, eq=False)
class Site:
    """An attention module of this project's models, and where its tokens will be."""

    name: str
    module: Any
    layout: Callable[[], Layout]


class _Watcher:
    """The observer of one attention module."""

    def __init__(self, site: Site, recorder: Recorder) -> None:
        self.site, self.recorder = site, recorder
        self.inputs: Tensor | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep what the module is given, for its gradient."""
        self.inputs = args[0] if self.recorder.gradients else None

    def __call__(self, weights: Tensor) -> Tensor:
        """Note the weights and leave them as they are."""
        self.recorder.add(self.site.name, weights, self.site.layout, lambda: self.inputs)
        self.inputs = None
        return weights

    def check(self, explicit: Tensor, fused: Callable[[], Tensor]) -> None:
        """Both paths agree."""
        with torch.no_grad():
            check_output(self.site.name, explicit, fused())


def sites_of(model: nn.Module, size: Grid, anatomy: Anatomy) -> list[Site]:
    """The attention modules in the order in which they run."""
    own = own_model(model)
    assert own is not None
    name = next(name for name, module in model.named_modules() if module is own)
    prefix = f"{name}." if name else ""
    grid = own.patch_embed.grid(size)
    if isinstance(own, ViT):
        layout = Layout(anatomy.prefix, grid, anatomy.patch, size)
        return [
            Site(f"{prefix}blocks.{i}.attn", block.attn, lambda: layout)
            for i, block in enumerate(own.blocks)
        ]
    shapes = own.shapes(grid)
    sites = []
    for s, stage in enumerate(own.layers):
        assert isinstance(stage, Stage)
        following = shapes[s + 1] if s + 1 < len(shapes) else None
        stride = (anatomy.patch[0] * 2**s, anatomy.patch[1] * 2**s)
        # Blocks of a kind share one layout, computed when first asked for.
        kinds = [
            cache(partial(_own_windows, stage, shapes[s], following, second, stride, size))
            for second in (False, True)
        ]
        for i, block in enumerate(stage.blocks):
            place = kinds[i % 2]
            sites.append(Site(f"{prefix}layers.{s}.blocks.{i}.attn", block.attn, place))
    return sites


def _own_windows(
    stage: Stage,
    shape: StageShape,
    following: StageShape | None,
    second: bool,
    stride: Grid,
    size: Grid,
) -> Layout:
    """The layout of a block, by the order and the masks that the stage itself uses."""
    index = StageIndex(*stage.layout(stage.geometry(shape, following)))
    rows, columns = shape.grid
    numbers = torch.arange(rows * columns, device=stage.layout.device).view(1, 1, rows, columns)
    # Padding is zero in the model: number cells from 1 to tell it from the first cell.
    cells = pad_to_multiple(numbers + 1, shape.window) - 1
    h, w = shape.window
    slots = rearrange(cells, "one 1 (wy h) (wx w) -> one (wy wx h w) 1", h=h, w=w)
    shifted = second and index.shift is not None
    slots = shift_windows(slots, index) if shifted else slots
    mask = index.windows(second).mask
    return Layout(
        (),
        shape.grid,
        stride,
        size,
        shape.window,
        shape.shift if shifted else (0, 0),
        slots.view(-1, h * w),
        None if mask is None else mask[:, 0] == 0,
    )
