"""The thread of the models: batches, limits, errors, and its end."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError

import pytest

from vision.inference.serve.model_thread import BusyError, ModelThread


class Doubling:
    """A function of batches that waits until it is allowed to begin."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.allowed = threading.Event(), threading.Event()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.begun.set()
        assert self.allowed.wait(20)
        self.batches.append(list(items))
        return [2 * item for item in items]


@pytest.fixture
def thread() -> Iterator[ModelThread]:
    started = ModelThread(batch_size=4, wait=0.2, limit=8)
    started.start()
    yield started
    started.stop()


def test_requests_that_wait_together_run_together(thread: ModelThread) -> None:
    double = Doubling()
    first = thread.submit(double, 0)
    assert double.begun.wait(20)
    rest = [thread.submit(double, item) for item in range(1, 7)]
    double.allowed.set()
    assert [future.result(20) for future in (first, *rest)] == [0, 2, 4, 6, 8, 10, 12]
    assert double.batches == [[0], [1, 2, 3, 4], [5, 6]]


def test_different_functions_do_not_share_a_batch(thread: ModelThread) -> None:
    one, other = Doubling(), Doubling()
    first = thread.submit(one, 0)
    assert one.begun.wait(20)
    futures = [thread.submit((one, other)[item % 2], item) for item in range(1, 5)]
    one.allowed.set()
    other.allowed.set()
    assert [future.result(20) for future in (first, *futures)] == [0, 2, 4, 6, 8]
    assert (one.batches, other.batches) == ([[0], [2, 4]], [[1, 3]])


def test_batch_waits_for_what_is_announced_only(thread: ModelThread) -> None:
    double = Doubling()
    double.allowed.set()
    begin = time.monotonic()
    assert thread.submit(double, 1).result(20) == 2
    assert time.monotonic() - begin < 0.15
    with thread.announced():
        first = thread.submit(double, 2)
        time.sleep(0.02)
        second = thread.submit(double, 3)
    assert (first.result(20), second.result(20)) == (4, 6)
    assert double.batches == [[1], [2, 3]]


def test_full_queue_refuses_and_a_cancelled_request_is_not_run(thread: ModelThread) -> None:
    double = Doubling()
    thread.submit(double, 0)
    assert double.begun.wait(20)
    waiting = [thread.submit(double, item) for item in range(1, 9)]
    with pytest.raises(BusyError):
        thread.submit(double, 9)
    assert waiting[0].cancel() and thread.waiting == 8
    double.allowed.set()
    assert waiting[-1].result(20) == 16
    assert all(1 not in batch for batch in double.batches)


def test_error_is_the_result_of_its_batch_and_work_continues(thread: ModelThread) -> None:
    def fail() -> int:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        thread.call(fail).result(20)
    assert thread.call(lambda: 7).result(20) == 7


def test_stop_cancels_what_waits() -> None:
    thread, double = ModelThread(2, 0, 10), Doubling()
    thread.start()
    running = thread.submit(double, 1)
    assert double.begun.wait(20)
    waiting = [thread.submit(double, item) for item in range(4)]
    threading.Timer(0.1, double.allowed.set).start()
    thread.stop()
    assert running.result(0) == 2
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(0)
    with pytest.raises(BusyError):
        thread.submit(double, 5)
