"""Requests to stop a run, by signals."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vision.training.run.distributed import World

T = TypeVar("T")


class Stopped(BaseException):
    """A request to stop, where the work at hand is given up and repeated after a resume.

    Not an Exception: like an interrupt, it must not be taken for an error of that work.
    """


@dataclass
class StopRequest:
    """A request to stop by SIGTERM, SIGINT or SIGUSR1; false until there is one."""

    signal: str = ""
    raising: bool = False
    """Whether a request is raised at once, rather than remembered."""
    passed: Callable[[], None] = field(default=lambda: None)
    """Called after every batch of `until`."""

    def __bool__(self) -> bool:
        return bool(self.signal)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the request; a second interrupt from the keyboard ends the process at once."""
        name = signal.Signals(number).name
        if name == self.signal == "SIGINT":
            raise KeyboardInterrupt
        self.signal = name
        if self.raising:
            raise Stopped
        if os.environ.get("RANK", "0") == "0":  # directly: a print may be interrupted by itself
            again = " Ctrl-C again ends it at once." if name == "SIGINT" else ""
            text = f"\n{name}: saving after the step at hand; the same command resumes.{again}\n"
            os.write(2, text.encode())

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, a request raises `Stopped` wherever the program is: there is nothing to save."""
        self.raising = True
        try:
            if self:
                raise Stopped
            yield
        except RuntimeError as error:
            if self:  # another process has stopped already, and closed its connection
                raise Stopped from error
            raise
        finally:
            self.raising = False

    @contextmanager
    def watched(self, passed: Callable[[], None]) -> Iterator[None]:
        """Within, `passed` is called after every batch of `until`."""
        self.passed = passed
        try:
            yield
        finally:
            self.passed = lambda: None

    def until(self, batches: Iterable[T], world: "World") -> Iterator[T]:
        """The batches, until any process is asked to stop: then `Stopped` is raised in all of them,
        before the same batch. All must have the same number of batches.
        """
        for batch in batches:
            if any(world.any(bool(self))):
                raise Stopped
            yield batch
            self.passed()


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Within, signals become a request that is handled after the step or batch at hand."""
    request = StopRequest()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGUSR1"):  # not on Windows
        numbers.append(signal.SIGUSR1)
    before = {number: signal.signal(number, request.handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
