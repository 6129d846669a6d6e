"""Attention of models from other libraries, through one torch function mode.

Under the mode `scaled_dot_product_attention` computes its weights explicitly;
`multi_head_attention_forward` is made to call it; and a softmax that is multiplied by values is
recorded as it is. The order of tokens in windows is not assumed: of all known orders, the one is
chosen that turns the input of the block into what its queries were computed from.

Axes: w windows · t, s slots of a window (queries, keys) · h, w rows and columns of a window.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vision.inspection.capture.captured import Anatomy, CaptureError
from vision.inspection.capture.recording import Recorder, check_output, removing
from vision.inspection.capture.token_layout import PADDING, Layout
from vision.models.attention import AttentionCall
from vision.models.layers import Grid, ceil_div, pad_to_multiple
from vision.models.windows import partition

SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}


@contextmanager
def watching_foreign(
    model: nn.Module, recorder: Recorder, anatomy: Anatomy, size: Grid
) -> Iterator[None]:
    """While this lasts, the attention of the model goes to the recorder."""
    stack: list[_Running] = []
    handles = []

    def enter(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack.append(_Running(name, module, (*args, *kwargs.values())))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # A module whose forward raised never got here: drop it with its own callers.
        while stack and stack.pop().module is not module:
            pass

    for name, module in model.named_modules():
        entering = partial(enter, name)
        handles.append(module.register_forward_pre_hook(entering, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    with removing(handles), _AttentionMode(recorder, anatomy, size, stack):
        yield


class _Running(NamedTuple):
    """A module that is being run, and its arguments."""

    name: str
    module: nn.Module
    values: tuple[Any, ...]


class _AttentionMode(TorchFunctionMode):
    def __init__(
        self, recorder: Recorder, anatomy: Anatomy, size: Grid, stack: list[_Running]
    ) -> None:
        super().__init__()
        self.recorder, self.anatomy, self.size, self.stack = recorder, anatomy, size, stack
        self.pending: Tensor | None = None
        """The last softmax that may be attention."""
        self.projected: Tensor | None = None
        """What queries, keys and values were computed from."""
        self.normed: Tensor | None = None
        """The last output of a layer norm."""
        self.latest: Tensor | None = None
        """The last weights that were computed here."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(func, AttentionCall(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            return self._multi_head(func, args, kwargs)
        if func in MATMUL and self._is_pending(args[0]):
            self._record(self.pending)
            self.pending = None
            return func(*args, **kwargs)
        if func is F.linear:
            tensor = args[0] if args else kwargs["input"]
            self.projected = tensor if tensor.ndim == 3 else self.projected
        out = func(*args, **kwargs)
        if func in SOFTMAX and out.ndim == 4 and out.shape[-1] == out.shape[-2]:
            self.pending = out
        elif func is F.layer_norm:
            self.normed = out
        return out

    def _is_pending(self, tensor: Any) -> bool:
        """Whether a tensor is the last softmax; dropout that drops nothing returns an alias."""
        if self.pending is None or not isinstance(tensor, Tensor):
            return False
        same = tensor.data_ptr() == self.pending.data_ptr()
        return tensor is self.pending or (same and tensor.shape == self.pending.shape)

    def _attend(self, fused: Callable[..., Tensor], call: AttentionCall) -> Tensor:
        query, key, value, mask = call[:4]
        other = call.is_causal or call.enable_gqa or call.dropout_p
        if other or query.shape[-2] != key.shape[-2]:
            # Not the self-attention of an image encoder.
            return fused(**call._asdict())
        factor = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        scores = (query * factor) @ key.transpose(-2, -1)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(dim=-1)
        out = weights @ value
        with torch.no_grad():
            check_output(self._name(), out, fused(**call._asdict()))
        self._record(weights)
        self.latest = weights
        return out

    def _multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Without asking for weights the function calls scaled_dot_product_attention: ours.

        The weights that it would return are a view made after their use, which has no gradient.
        """
        wants_weights = kwargs.get("need_weights", True)
        module = self.stack[-1] if self.stack else None
        tokens = None
        if module is not None and getattr(module.module, "batch_first", False):
            # The module turned the sequence to the front; the tensor that it was given is kept, not
            # a view of it, which would have no gradient.
            tokens = next((v for v in module.values if isinstance(v, Tensor)), None)
        fused = F.scaled_dot_product_attention

        def explicit(*inner: Any, **named: Any) -> Tensor:
            self.projected = tokens
            return self._attend(fused, AttentionCall(*inner, **named))

        F.scaled_dot_product_attention = explicit
        try:
            out, _ = func(*args, **{**kwargs, "need_weights": False})
        finally:
            F.scaled_dot_product_attention = fused
        weights, self.latest = self.latest, None
        if not wants_weights or weights is None:
            return out, None
        return out, weights.mean(dim=1) if kwargs.get("average_attn_weights", True) else weights

    def _name(self) -> str:
        """Of the innermost running module that has parameters: the attention module."""
        for running in reversed(self.stack):
            if next(running.module.parameters(), None) is not None:
                return running.name
        return "the model"

    def _record(self, weights: Tensor | None) -> None:
        assert weights is not None
        inputs = self.projected
        expected = (weights.shape[0], weights.shape[-1])
        known = inputs is not None and inputs.shape[:2] == expected
        self.recorder.add(
            self._name(), weights, lambda: self._layout(weights), inputs if known else None
        )

    def _layout(self, weights: Tensor) -> Layout:
        block = next((r for r in reversed(self.stack) if hasattr(r.module, "shift_size")), None)
        if block is not None:
            return self._window_layout(block, weights)
        if weights.shape[0] != self.recorder.batch:
            raise CaptureError(
                f"{self._name()} attends within {weights.shape[0] // self.recorder.batch} groups "
                "of tokens per image, and their position is unknown for this kind of model."
            )
        (height, width), (y, x) = self.size, self.anatomy.patch
        prefix = self.anatomy.prefix
        for grid in ((height // y, width // x), (ceil_div(height, y), ceil_div(width, x))):
            if len(prefix) + grid[0] * grid[1] == weights.shape[-1]:
                return Layout(prefix, grid, self.anatomy.patch, self.size)
        raise CaptureError(
            f"{self._name()} has {weights.shape[-1]} tokens, but {len(prefix)} prefix tokens and "
            f"patches of {y} x {x} pixels in an image of {height} x {width} make another number: "
            "the position of its tokens is unknown."
        )

    def _window_layout(self, block: _Running, weights: Tensor) -> Layout:
        windows = self.projected
        if windows is None or windows.shape[:2] != (weights.shape[0], weights.shape[-1]):
            raise CaptureError(f"{block.name}: what its queries were computed from was not seen.")
        window = _pair(block.module.window_size)
        full = _pair(block.module.shift_size)
        for source in self._sources():
            tokens, grid = source
            single = [ceil_div(g, w) == 1 for g, w in zip(grid, window, strict=True)]
            partial = (full[0] * (not single[0]), full[1] * (not single[1]))
            for shift in dict.fromkeys((full, partial)):
                for pad_first in (True, False):
                    index = window_index(grid, window, shift, pad_first=pad_first)
                    if _fits(tokens, windows, index):
                        return self._placed(grid, window, shift, index)
        raise CaptureError(
            f"{block.name}: the order of its windows (size {window}, shift {full}) is unknown, so "
            "its tokens cannot be placed in the image."
        )

    def _sources(self) -> Iterator[tuple[Tensor, Grid]]:
        """Tokens of the first image, row by row, that the windows may have been cut from."""
        given = [v for r in reversed(self.stack) for v in r.values if isinstance(v, Tensor)]
        for tensor in [self.normed, *given]:
            if tensor is None or tensor.shape[0] != self.recorder.batch:
                continue
            if tensor.ndim == 4:
                yield tensor[0].flatten(0, 1), (tensor.shape[1], tensor.shape[2])
            elif tensor.ndim == 3:
                for grid in self._sizes(tensor.shape[1]):
                    yield tensor[0], grid

    def _sizes(self, tokens: int) -> Iterator[Grid]:
        """Grids of this number of tokens among the arguments of running modules."""
        for value in (value for running in reversed(self.stack) for value in running.values):
            match value:
                case (int(rows), int(columns)) if rows * columns == tokens:
                    yield rows, columns

    def _placed(self, grid: Grid, window: Grid, shift: Grid, index: Tensor) -> Layout:
        assert self.projected is not None
        device = self.projected.device
        # A merging halves the grid, rounding up, so the stride is a power of two of patches.
        steps = 0
        first = [size // patch for size, patch in zip(self.size, self.anatomy.patch, strict=True)]
        while ceil_div(first[0], 2**steps) > grid[0] or ceil_div(first[1], 2**steps) > grid[1]:
            steps += 1
        allowed = shift_regions(grid, window, shift)
        return Layout(
            (),
            grid,
            (self.anatomy.patch[0] * 2**steps, self.anatomy.patch[1] * 2**steps),
            self.size,
            window,
            shift,
            index.to(device),
            None if allowed is None else allowed.to(device),
        )


def _fits(tokens: Tensor, windows: Tensor, index: Tensor) -> bool:
    """Whether the windows of the first image are its tokens in this order."""
    if tokens.shape[-1] != windows.shape[-1] or windows.shape[1] != index.shape[1]:
        return False
    if windows.shape[0] % index.shape[0] or int(index.max()) + 1 != tokens.shape[0]:
        return False
    real = index >= 0
    found = windows[: index.shape[0]].detach()[real]
    return torch.equal(found, tokens.detach()[index[real]])


def _pair(size: Any) -> Grid:
    if isinstance(size, tuple | list):
        return int(size[0]), int(size[1])
    return int(size), int(size)


def window_index(grid: Grid, window: Grid, shift: Grid, *, pad_first: bool) -> Tensor:
    """The cell in every slot, or `PADDING`: (w t).

    `pad_first`: the grid is padded to whole windows and then rolled (torchvision, transformers).
    Otherwise it is rolled and then padded (timm).
    """
    rows, columns = grid
    cells = torch.arange(rows * columns).view(rows, columns)
    back = (-shift[0], -shift[1])
    if pad_first:
        placed = _pad(cells, window).roll(back, (0, 1))
    else:
        placed = _pad(cells.roll(back, (0, 1)), window)
    return _windows(placed, window)


def shift_regions(grid: Grid, window: Grid, shift: Grid) -> Tensor | None:
    """The pairs of slots that the mask of shifted windows allows: (w t s). None: all of them.

    Rows of the rolled grid fall into three regions, before the last window, in it, and wrapped
    around; so do columns; tokens attend within their own region.
    """
    if not any(shift):
        return None
    region = torch.zeros(1, 1, dtype=torch.int64)
    for axis in (0, 1):
        size = ceil_div(grid[axis], window[axis]) * window[axis]
        place = torch.arange(size)
        step = torch.zeros(size, dtype=torch.int64)
        if shift[axis]:
            step = (place >= size - window[axis]).long() + (place >= size - shift[axis]).long()
        region = region * 3 + (step[:, None] if axis == 0 else step[None])
    slots = _windows(region, window)
    allowed = slots[:, :, None] == slots[:, None, :]
    return None if bool(allowed.all()) else allowed


def _windows(cells: Tensor, window: Grid) -> Tensor:
    """A grid of whole windows (y x), window by window: (w t)."""
    return partition(cells[None, None], window).view(-1, window[0] * window[1])


def _pad(cells: Tensor, window: Grid) -> Tensor:
    return pad_to_multiple(cells - PADDING, window) + PADDING  # which fills with zeros
