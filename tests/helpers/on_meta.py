"""Code for GPUs on a machine without one: tensors on `meta`, where nothing has contents.

A tensor that was left on the CPU meets one on `meta`; a synchronisation asks for contents.
"""

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKAGE = Path(__file__).parents[2] / "vision"
META = torch.device("meta")
aten = torch.ops.aten


class OnMeta(TorchDispatchMode):
    """Within, tensors on `meta` meet no others, and whoever asks for their contents is noted.

    Numbers asked for are `answer`. Tensors with a single number may be on the CPU, as for a GPU.
    """

    def __init__(self, answer: int = 1) -> None:
        super().__init__()
        self.answer = answer
        self.waits: list[str] = []
        """Functions that waited for the device, as `file.py: function`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if tensor.device != META]
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense and not here:
            self.waits.append(_caller())
            return self.answer
        if packet in (aten._to_copy, aten.copy_):
            target = kwargs.get("device") if packet is aten._to_copy else args[0].device
            if target == torch.device("cpu") and tensors[-1].device == META:
                if not kwargs.get("non_blocking"):
                    self.waits.append(_caller())
                return torch.ones(tensors[-1].shape, dtype=kwargs.get("dtype") or tensors[-1].dtype)
            blocking = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            if target == META and tensors[-1].device != META and blocking:
                self.waits.append(_caller())
            return func(*args, **kwargs)
        if packet is aten.lift_fresh and not here:  # numbers of Python, copied to the device
            self.waits.append(_caller())
        if any(tensor.ndim for tensor in here) and len(here) < len(tensors):
            raise AssertionError(f"{func}: a tensor on the CPU meets one on `meta` ({_caller()})")
        return func(*args, **kwargs)


def _caller() -> str:
    """The innermost function of this package."""
    for frame in reversed(traceback.extract_stack()):
        if Path(frame.filename).is_relative_to(PACKAGE):
            return f"{Path(frame.filename).name}: {frame.name}"
    return "elsewhere"
