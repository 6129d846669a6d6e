"""Bytes of the tensors that are alive, on any device and on `meta` alike."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Within, count the storages that operations make until they are freed."""

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.limit = limit
        """More bytes than these at a time raise a MemoryError."""
        self._known: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that were made elsewhere."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in self._known:
                continue
            self._known.add(storage)
            size = storage.nbytes()
            weakref.finalize(storage, self._free, size)
            self.now += size
            self.peak = max(self.peak, self.now)
        if self.peak > self.limit:
            raise MemoryError(f"more than {self.limit:.0f} bytes")

    def start_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def _free(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result
