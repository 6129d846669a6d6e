"""Requests to stop a run, by signals."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from vision.training.run.run_folder import PREEMPTED

if TYPE_CHECKING:
    from vision.training.run.distributed import World

T = TypeVar("T")

_PATIENCE = 3.0
"""Seconds that a library may keep a request from being raised, where it is to be raised at once."""

_AGAIN = 0.05
"""Seconds after which an interrupt that was dropped is raised again."""


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
            raise Stopped(name)
        if os.environ.get("RANK", "0") == "0":  # directly: a print may be interrupted by itself
            again = " Ctrl-C again ends it at once." if name == "SIGINT" else ""
            text = f"\n{name}: saving after the step at hand; the same command resumes.{again}\n"
            os.write(2, text.encode())

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, a request raises `Stopped` wherever the program is: there is nothing to save. A
        library that does not return to Python, as in a rendezvous, is not waited for.
        """
        self.raising = True
        try:
            if self:
                raise Stopped
            with _ended_if_stuck() if _in_main_thread() else nullcontext():
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
    with _handled_by(request, signal.SIGTERM, signal.SIGINT, *_USR1):
        yield request


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Within, before a training has its own `stop_requests`, SIGTERM and SIGUSR1 raise `Stopped`.
    An interrupt from the keyboard stays what it is.
    """
    with _handled_by(StopRequest(raising=True), signal.SIGTERM, *_USR1):
        yield


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Within, an interrupt from the keyboard is raised again where Python drops it, as it does with
    whatever a destructor or a weak reference's callback raises.
    """
    if not _in_main_thread():
        yield
        return
    hook_before = sys.unraisablehook

    # A timer of the system, not a thread: to start one takes the hook long enough for the interrupt
    # to come while it runs, where it would be dropped once more.
    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if dropped.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        else:
            hook_before(dropped)

    alarm_before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = hook_before
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm_before)


def say_stopped(reason: str) -> None:
    """Print, in the main process of a run, that it ends before the next step."""
    if os.environ.get("RANK", "0") == "0":
        print(
            f"Stopped before the next step ({reason}): there is nothing to save. The same command "
            "starts or resumes the run.",
            flush=True,
        )


def _in_main_thread() -> bool:
    """Whether this is the thread that gets signals; a Python program may train in another one."""
    return threading.current_thread() is threading.main_thread()


_USR1 = [signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []  # not on Windows


@contextmanager
def _handled_by(request: StopRequest, *numbers: signal.Signals) -> Iterator[None]:
    if not _in_main_thread():
        yield
        return
    before = {number: signal.signal(number, request.handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ended_if_stuck() -> Iterator[None]:
    """Within, a request ends the process if Python does not get to raise it.

    Handlers run between two instructions of Python in the main thread. A thread of its own hears of
    the signal at once, through the file that the system's handler writes the number to.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    left = threading.Event()

    def watch() -> None:
        while byte := os.read(reader, 1):
            number = signal.Signals(byte[0])
            if number in (signal.SIGTERM, *_USR1) and not left.wait(_PATIENCE):
                say_stopped(number.name)
                os._exit(PREEMPTED)

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)
