"""Data workers that die, and data workers whose parent dies: nothing hangs, nothing is left."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_runs import ForkedTraining
from small_runs import words
from started_runs import start

from vision.data import batches

TRAIN = """
import json, multiprocessing, os, signal, sys
from pathlib import Path

if __name__ == "__main__":
    from vision.cli.app import main
    from vision.training import loop

    folder, victim, *words = sys.argv[1:]
    real = loop.forward_backward

    def killing(*given):
        if given[-1] == 2:  # after an evaluation: the workers of both loaders are alive
            pids = sorted(child.pid for child in multiprocessing.active_children())
            Path(folder, "pids").write_text(json.dumps(pids))
            os.kill(os.getpid() if victim == "parent" else pids[int(victim)], signal.SIGKILL)
        return real(*given)

    loop.forward_backward = killing
    sys.exit(main(["train", *words]))
"""
SETTINGS = ["duration=20steps", "evaluate_every=2steps", "loader.prefetch=1", "loader.workers=2"]


def train(folder: Path, victim: str, method: str) -> tuple[int, str]:
    """Exit code and output of a run of which a process is killed in its third step; one that hangs
    is an error.
    """
    script = folder / "train.py"
    script.write_text(TRAIN)
    settings = words(folder, *SETTINGS, f"loader.start_method={method}")
    process = start(sys.executable, str(script), str(folder), victim, *settings)
    try:
        output = process.communicate(timeout=200)[0]
    except subprocess.TimeoutExpired:
        for pid in filter(is_alive, pids(folder)):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        raise
    return process.returncode, output


def pids(folder: Path) -> list[int]:
    """The workers of both loaders."""
    file = folder / "pids"
    return [int(word) for word in file.read_text().strip("[]").split(",")] if file.exists() else []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_all_end(workers: list[int]) -> None:
    """Wait for the workers, not for ever."""
    assert len(workers) == 4
    deadline = time.monotonic() + 100
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline, "workers are still there"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize(
    ("victim", "method"),
    [
        pytest.param("0", "fork", id="training"),
        pytest.param("-1", "fork", id="validation", marks=pytest.mark.slow),
        pytest.param("0", "forkserver", id="forkserver", marks=pytest.mark.slow),
        pytest.param("0", "spawn", id="spawn", marks=pytest.mark.slow),
    ],
)
def test_run_with_a_dead_worker_ends_with_advice(tmp_path: Path, victim: str, method: str) -> None:
    code, output = train(tmp_path, victim, method)
    assert time.time() - (tmp_path / "pids").stat().st_mtime < 60  # since the kill; 3 to 8 s alone
    assert code == 1, output
    assert "Traceback" not in output
    (message,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert "one of the 2 data workers died" in message and "loader.workers=0" in message
    assert_all_end(pids(tmp_path))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize(
    "method", ["forkserver", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fork", "spawn"))]
)
def test_workers_of_a_run_that_was_killed_end(tmp_path: Path, method: str) -> None:
    train(tmp_path, "parent", method)
    assert_all_end(pids(tmp_path))


def limit_files_of_workers() -> None:
    real = batches.start_worker

    def limited(worker: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        real(worker)

    batches.start_worker = limited


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits files as on Linux")
def test_run_without_shared_memory_ends_with_advice(tmp_path: Path) -> None:
    process = ForkedTraining(tmp_path, *SETTINGS, first=limit_files_of_workers)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 1, output
    (message,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert "shared memory" in message and "File too large" in message and "shm-size" in message
    assert "Traceback" not in output
