"""The processes that make batches: their number, their signals, their death and their parent's."""

import atexit
import os
import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import active_children, get_start_method, parent_process
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Literal
from weakref import WeakSet

from vision.config import UserError

_workers: WeakSet[BaseProcess] = WeakSet()
"""Of all loaders of this process."""


_NO_SHARED_MEMORY = re.compile(r"unable to (?:resize|write to|open|mmap).*<.*/?torch_.*>.*: (.*)")


class DeadWorkerError(UserError, RuntimeError):
    """A worker that died, or failed, for lack of memory."""


def resolve_workers(
    setting: Literal["auto"] | int, processes: int = 1, on_cpu: bool = False
) -> int:
    """Return the number of workers for each of the `processes` on this machine.

    With `on_cpu` the model itself runs on the CPU and needs most of it.
    """
    if setting != "auto":
        return setting
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    share = cores // processes
    return max(0, min(2, share - 1)) if on_cpu else max(1, min(16, share))


def resolve_start_method(setting: str) -> str:
    """Return the start method of workers; auto: the one that Python has on this system."""
    return get_start_method() if setting == "auto" else setting


@contextmanager
def noted_workers() -> Iterator[list[BaseProcess]]:
    """Within, workers may be started: the yielded list gets them, and SIGCHLD keeps its handler.

    Torch's handler raises an error wherever the program is when a worker dies, and again whenever
    another one ends, also while they are being shut down. Without it the death is noticed where a
    batch is waited for, within five seconds.
    """
    before, handler = set(active_children()), signal.getsignal(signal.SIGCHLD)
    started: list[BaseProcess] = []
    try:
        yield started
    finally:
        started += (child for child in active_children() if child not in before)
        _workers.update(started)
        if handler is not None and signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)


def kill_workers(workers: Iterable[BaseProcess]) -> None:
    """End those workers that are still there.

    They ignore SIGTERM, and may wait for ever for a lock that a dead one held. Python would wait
    for them when it exits.
    """
    wanted = set(workers)
    for child in active_children():  # only those of this process itself, which may be a worker
        if child in wanted:
            child.kill()


# Torch registers later, and so before this, what asks its workers to end. Python waits after both.
atexit.register(kill_workers, _workers)


def start_worker(worker: int) -> None:
    """Prepare a worker, in its process."""
    # Ctrl-C goes to every process of a terminal, and schedulers send their signals to every process
    # of a job. The training process handles them, and may still need batches.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):  # no SIGUSR1 on Windows
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process as soon as the one that started it was killed: nobody waits for it any more,
    and it may hold a lock.

    Torch compares the number of the parent process every five seconds, which is that of a server
    where the start method is forkserver.
    """
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def dead_worker(error: BaseException, workers: int) -> DeadWorkerError | None:
    """The error to raise in place of one by which torch reports the death of one of its workers.

    An error that a worker raised itself is passed on by torch as "Caught …".
    """
    if full := _NO_SHARED_MEMORY.search(str(error)):
        return DeadWorkerError(
            f"one of the {workers} data workers got no shared memory for a batch: {full[1]}. In a "
            "container start it with more (docker run --shm-size=8g), or choose fewer "
            "loader.workers, a smaller loader.prefetch, or loader.workers=0, which needs none."
        )
    lost = isinstance(error, EOFError | ConnectionError)
    if not lost and ("DataLoader worker" not in str(error) or "Caught" in str(error)):
        return None
    return DeadWorkerError(
        f"one of the {workers} data workers died. Often the machine has run out of memory: choose "
        "fewer loader.workers, or a smaller loader.prefetch or loader.memory. In a container "
        "shared memory may be too small: start it with more (docker run --shm-size=8g). With "
        "loader.workers=0 the error itself is shown."
    )
