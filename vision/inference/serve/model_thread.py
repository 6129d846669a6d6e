"""One thread that runs the models, and the queue of requests before it.

Requests for the same function that wait at the same time are run as one batch. A batch that is not
full waits a moment, but only while further requests have arrived and are still being decoded: a
single client never waits.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class BusyError(Exception):
    """The queue is full, or the thread has stopped."""


@dataclass(frozen=True, eq=False)
class WaitingRequest:
    """A request that waits."""

    function: Callable[[Sequence[Any]], Sequence[Any]]
    item: Any
    future: "Future[Any]"
    arrived: float


class ModelThread:
    """The only thread in which a model runs."""

    def __init__(self, batch_size: int, wait: float, limit: int) -> None:
        self.batch_size, self.wait, self.limit = batch_size, wait, limit
        self._waiting: deque[WaitingRequest] = deque()
        self._changed = threading.Condition()
        self._announced = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """Refuse what still waits, and wait for the batch that runs."""
        with self._changed:
            self._stopped = True
            for job in self._waiting:
                job.future.cancel()
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """For as long as a request is prepared that will be submitted."""
        with self._changed:
            self._announced += 1
        try:
            yield
        finally:
            with self._changed:
                self._announced -= 1
                self._changed.notify_all()

    def submit(self, function: Callable[[Sequence[T]], Sequence[R]], item: T) -> "Future[R]":
        """Add a request; items of equal functions are passed to it together."""
        future: Future[R] = Future()
        with self._changed:
            if self._stopped or len(self._waiting) >= self.limit:
                raise BusyError(f"{len(self._waiting)} requests wait already.")
            self._waiting.append(WaitingRequest(function, item, future, time.monotonic()))
            self._changed.notify_all()
        return future

    def call(self, function: Callable[[], R]) -> "Future[R]":
        """Add a request that runs alone."""
        return self.submit(lambda items: [function()], None)

    def _work(self) -> None:
        while jobs := self._next():
            # A request whose client is gone is not run.
            _run([job for job in jobs if job.future.set_running_or_notify_cancel()])
            del jobs  # what it holds must not stay until the next request

    def _next(self) -> list[WaitingRequest]:
        """The oldest request and those that can run with it; empty when the thread shall end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopped)
            if self._stopped:
                return []
            first = self._waiting[0]
            end = first.arrived + self.wait
            while self._announced and len(self._alike(first)) < self.batch_size:
                left = end - time.monotonic()
                if left <= 0 or self._stopped:
                    break
                self._changed.wait(left)
            jobs = self._alike(first)[: self.batch_size]
            chosen = set(map(id, jobs))
            self._waiting = deque(job for job in self._waiting if id(job) not in chosen)
            return jobs

    def _alike(self, first: WaitingRequest) -> list[WaitingRequest]:
        return [job for job in self._waiting if job.function == first.function]


def _run(jobs: Sequence[WaitingRequest]) -> None:
    """Run requests together; an error is the result of each of them."""
    if not jobs:
        return
    try:
        results = jobs[0].function([job.item for job in jobs])
    except Exception as error:
        for job in jobs:
            job.future.set_exception(error)
    else:
        for job, result in zip(jobs, results, strict=True):
            job.future.set_result(result)
