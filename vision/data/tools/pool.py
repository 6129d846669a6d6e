"""Map a function over many indices in several processes: in order, with bounded memory."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")

_CHUNK = 32
_function: Callable[[int], Any] | None = None


def ordered_map(function: Callable[[int], R], indices: Sequence[int], workers: int) -> Iterator[R]:
    """Yield function(index) for each index, in order; workers=0 computes in this process.

    The function is sent to each process once. Only a few chunks are computed ahead, so memory stays
    bounded for millions of results.
    """
    if workers == 0:
        yield from map(function, indices)
        return
    context = multiprocessing.get_context("spawn")  # forking a process that has threads may hang
    chunks = (indices[i : i + _CHUNK] for i in range(0, len(indices), _CHUNK))
    with ProcessPoolExecutor(workers, context, _start, (function,)) as executor:
        waiting: deque[Future[list[R]]] = deque()
        try:
            for chunk in chunks:
                waiting.append(executor.submit(_run, chunk))
                if len(waiting) >= 4 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _start(function: Callable[[int], Any]) -> None:
    global _function
    _function = function


def _run(chunk: Sequence[int]) -> list[Any]:
    assert _function is not None
    return [_function(index) for index in chunk]
