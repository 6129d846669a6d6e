"""Requests to stop a run, by signals."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """A request to stop by SIGTERM, SIGINT or SIGUSR1; false until there is one."""

    signal: str = ""

    def __bool__(self) -> bool:
        return bool(self.signal)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the request; a second interrupt from the keyboard ends the process at once."""
        name = signal.Signals(number).name
        if name == self.signal == "SIGINT":
            raise KeyboardInterrupt
        self.signal = name


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Within, signals become a request that the loop handles after its step."""
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
