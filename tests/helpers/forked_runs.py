"""Several processes of a run, forked from this one: without the time that imports take."""

import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from small_runs import words

from vision.cli.app import main
from vision.training.configs import TrainConfig
from vision.training.loop import train


def fork(
    size: int, call: Callable[..., Any], *arguments: Any, output: Path | None = None
) -> list[ForkProcess]:
    """Call a function in some processes as torchrun would; what they print goes to a file."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        mp.get_context("fork").Process(
            target=_call, args=(rank, size, port, output, call, arguments)
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return processes


def join(processes: list[ForkProcess]) -> list[int | None]:
    """Wait for processes of a run; their exit codes."""
    for process in processes:
        process.join(240)
    return [process.exitcode for process in processes]


def train_forked(config: TrainConfig) -> None:
    """Train, and exit with the code of `train.py`."""
    sys.exit(train(config))


class ForkedTraining:
    """`train.py` in a process and a session of its own, with the methods of `Popen` that tests use;
    for those to which the start of an interpreter does not matter. What is to be patched in it is
    patched by `first`.
    """

    def __init__(self, folder: Path, *more: str, first: Callable[[], object] | None = None) -> None:
        self._said = folder.with_name(f"{folder.name}.said")
        self._said.touch()
        self._process = mp.get_context("fork").Process(
            target=_command, args=(self._said, words(folder, *more), first)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = 240) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("train.py", timeout)
        return self.returncode

    def communicate(self, timeout: float = 240) -> tuple[str, None]:
        """All that was said, and nothing apart from it."""
        self.wait(timeout)
        return self._said.read_text(), None

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def _command(said: Path, given: list[str], first: Callable[[], object] | None) -> None:
    os.setsid()
    _say_into(said)
    if first is not None:
        first()
    sys.exit(main(["train", *given]))


def _say_into(file: Path) -> None:
    """Everything that this process says; pytest has put files of its own in place of the usual."""
    number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(number, 1)
    os.dup2(number, 2)
    sys.stdout = sys.stderr = os.fdopen(number, "w", buffering=1)


def _call(
    rank: int, size: int, port: int, output: Path | None, call: Callable[..., Any], arguments: Any
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if output is not None:
        _say_into(output)
    call(*arguments)
