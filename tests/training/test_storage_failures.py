"""A disk that is full, or cannot be written to, in the middle of a run: nothing stored is lost."""

import os
import resource
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from small_runs import assert_same_bits, last_tensors, metrics, status, words

from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import latest
from vision.cli.app import main
from vision.training import loop
from vision.training.run.log import Reporter

SETTINGS = ["ema=0.9", "duration=8steps", "checkpoint.every=3steps", "evaluate_every=8steps"]


def train(folder: Path) -> int:
    """The command as a user types it; returns its exit code."""
    return main(["train", *words(folder, *SETTINGS)])


def fill(folder: Path) -> None:
    """Leave no byte free."""
    with (folder / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(folder).f_bavail == 0


def before_call(number: int, original: Callable[..., Any], event: Callable[[], None]) -> Any:
    """The function, with something that happens just before its call of this number."""
    calls = iter(range(1, 1000))

    def run(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            event()
        return original(*arguments, **named)

    return run


def stored_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a run, each of which can be read in full."""
    return [read_checkpoint(p).record["step"] for p in latest(folder / "run" / "checkpoints")]


def assert_goes_on(folder: Path, whole: Path) -> None:
    """Once there is room again, the same command ends in the weights of an undisturbed run."""
    assert train(folder) == 0
    assert train(whole) == 0
    assert_same_bits(last_tensors(whole), last_tensors(folder))
    losses = [[event["loss"] for event in metrics(place)] for place in (whole, folder)]
    assert losses[0] == losses[1]


def test_disk_full_at_a_checkpoint_keeps_the_one_before_and_goes_on_later(
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filling = before_call(2, loop.write_checkpoint, lambda: fill(disk))
    monkeypatch.setattr(loop, "write_checkpoint", filling)
    assert train(disk) == 1
    message = capsys.readouterr().err
    assert "step_00000006.safetensors cannot be written: No space left on device" in message
    assert "What was stored before is untouched. Free some space" in message
    assert len(message.splitlines()) == 1
    assert stored_steps(disk) == [3]
    (disk / "ballast").unlink()
    assert_goes_on(disk, tmp_path / "whole")


def test_disk_full_at_a_line_of_the_log_says_so_and_goes_on_later(
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = Reporter.write

    def long_line(self: Reporter, step: int, split: str, numbers: dict[str, float]) -> None:
        """A line that needs a new page of the disk, at the fifth step."""
        if step == 5 and not (disk / "ballast").exists():
            fill(disk)
            numbers = {**numbers, **{f"more{n}": 1.0 for n in range(500)}}
        original(self, step, split, numbers)

    monkeypatch.setattr(Reporter, "write", long_line)
    assert train(disk) == 1
    message = capsys.readouterr().err
    assert "metrics.jsonl cannot be written: No space left on device" in message
    assert len(message.splitlines()) == 1
    assert stored_steps(disk) == [3]
    (disk / "ballast").unlink()
    monkeypatch.undo()
    assert_goes_on(disk, tmp_path / "whole")


def test_disk_read_only_at_a_checkpoint_keeps_the_one_before_and_goes_on_later(
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoints = disk / "run" / "checkpoints"

    def protect() -> None:
        subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", checkpoints], check=True)

    monkeypatch.setattr(loop, "write_checkpoint", before_call(2, loop.write_checkpoint, protect))
    try:
        code = train(disk)
    finally:
        subprocess.run(["umount", checkpoints], check=True)
    message = capsys.readouterr().err
    assert code == 1
    assert "step_00000006.safetensors cannot be written: Read-only file system" in message
    assert len(message.splitlines()) == 1
    assert stored_steps(disk) == [3]
    assert status(disk)["status"] == "failed"
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert train(disk) == 2
    assert "cannot be used: Read-only file system" in capsys.readouterr().err
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert_goes_on(disk, tmp_path / "whole")


def test_limit_of_file_size_at_a_checkpoint_keeps_the_one_before_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Needs no rights: the system refuses to write more than so many bytes into any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limiting = before_call(
        2,
        loop.write_checkpoint,
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1])),
    )
    monkeypatch.setattr(loop, "write_checkpoint", limiting)
    try:
        code = train(tmp_path / "limited")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = capsys.readouterr().err
    assert code == 1
    assert "step_00000006.safetensors cannot be written: File too large" in message
    assert len(message.splitlines()) == 1
    assert stored_steps(tmp_path / "limited") == [3]
    assert status(tmp_path / "limited")["status"] == "failed"
    assert "File too large" in status(tmp_path / "limited")["reason"]
    assert_goes_on(tmp_path / "limited", tmp_path / "whole")


def test_limit_of_file_size_before_a_run_starts_is_a_failure_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra writes its settings first."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        code = train(tmp_path / "limited")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = capsys.readouterr().err
    assert code == 1  # not 2: the settings are right
    assert "File too large" in message and len(message.splitlines()) == 1
    assert train(tmp_path / "limited") == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_folder_without_write_permission_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o555)
    try:
        assert train(tmp_path) == 2
    finally:
        tmp_path.chmod(0o755)
    assert "cannot be used: Permission denied" in capsys.readouterr().err
