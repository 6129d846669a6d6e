"""A run's folder belongs to one training at a time, and to nobody once that one is dead."""

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_runs import small_config, words
from started_runs import start_training, wait_for_step

from vision.config import ConfigError
from vision.files import write_text
from vision.training.loop import train
from vision.training.run.distributed import World
from vision.training.run.run_folder import Run, run_lock

ROOT = Path(__file__).parents[3]
ALONE = World(0, 1, torch.device("cpu"))
FORK = multiprocessing.get_context("fork")  # a new interpreter would take seconds to load torch


def hold_with_a_child(folder: Path) -> None:
    """Take the lock, fork as a loader does, and stay."""
    with run_lock(Run(folder), ALONE):
        FORK.Process(target=time.sleep, args=(60,), daemon=True).start()
        write_text(folder / "status.json", "{}")  # seen as a whole or not at all
        time.sleep(60)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_run_started_twice_is_refused_with_the_holder_and_the_first_is_not_disturbed(
    tmp_path: Path,
) -> None:
    settings = ["duration=2000steps", "checkpoint.every=2000steps", "evaluate_every=2000steps"]
    first = start_training(tmp_path, *settings)
    wait_for_step(tmp_path, 1, first)
    second = subprocess.run(
        [sys.executable, "train.py", *words(tmp_path, *settings)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert second.returncode == 2
    (line,) = second.stderr.splitlines()
    assert f"is being trained at this moment, by process {first.pid} on {socket.gethostname()}" in (
        line
    )
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 75, output


def test_lock_of_a_killed_process_is_free_at_once_though_its_children_live(tmp_path: Path) -> None:
    holder = FORK.Process(target=hold_with_a_child, args=(tmp_path / "run",))
    holder.start()
    wait_for(tmp_path / "run" / "status.json")
    with (
        pytest.raises(ConfigError, match=f"by process {holder.pid} on"),
        run_lock(Run(tmp_path / "run"), ALONE),
    ):
        pass
    (child,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    try:
        os.kill(int(child), 0)  # it is there
        with run_lock(Run(tmp_path / "run"), ALONE) as warning:
            assert warning == ""
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_run_that_fails_before_it_starts_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fewer than one global batch"):
        train(small_config(tmp_path, "batch_size=64"), "x")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output: the run's folder .*file/run cannot be used"):
        train(small_config(tmp_path / "file"), "x")


def test_file_system_without_locks_gives_a_warning_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    assert train(small_config(tmp_path, "duration=2steps"), "x") == 0
    assert "cannot be locked here" in capsys.readouterr().out
