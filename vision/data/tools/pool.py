"""Map a function over many indices in several processes: in order, with bounded memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

R = TypeVar("R")

_CHUNK = 32


@dataclass(frozen=True)
class _Results(Dataset[R], Generic[R]):
    """The results of a function, by index."""

    function: Callable[[int], R]

    def __getitem__(self, index: int) -> R:
        return self.function(index)


def ordered_map(function: Callable[[int], R], indices: Sequence[int], workers: int) -> Iterator[R]:
    """Yield function(index) for each index, in order; workers=0 computes in this process.

    The function is sent to each process once. Only a few chunks are computed ahead, so memory stays
    bounded for millions of results.
    """
    loader: DataLoader[R] = DataLoader(
        _Results(function),
        batch_size=_CHUNK,
        sampler=indices,
        num_workers=workers,
        collate_fn=list,
        # Forking a process that has threads may hang.
        multiprocessing_context="spawn" if workers else None,
        generator=torch.Generator(),  # the default draws from the global one
    )
    return chain.from_iterable(loader)
