"""Several processes of a run, forked from this one: without the time that imports take."""

import multiprocessing as mp
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

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


def _call(
    rank: int, size: int, port: int, output: Path | None, call: Callable[..., Any], arguments: Any
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    call(*arguments)
