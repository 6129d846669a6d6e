"""Whatever happens to a writer, its file holds the old content or the new one."""

import errno
import fcntl
import multiprocessing
import os
import random
import resource
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vision import files as atomic
from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.native import checkpoint as native
from vision.checkpoints.native.checkpoint import read_checkpoint, write_checkpoint
from vision.checkpoints.native.checkpoint_folder import mark_best
from vision.files import remove_leftovers, replacing, write_all

FORK = multiprocessing.get_context("fork")  # a new interpreter would take seconds to load torch


def store(path: Path, step: int, items: int = 1000) -> None:
    write_checkpoint(
        path, {f"w{i}": torch.full((items,), float(step)) for i in range(4)}, {"step": step}
    )


def stored_step(path: Path) -> int:
    """The step of a checkpoint, all of whose tensors must be of that step."""
    tensors, record = read_checkpoint(path)
    assert len(tensors) == 4
    assert all(bool((tensor == record["step"]).all()) for tensor in tensors.values())
    return int(record["step"])


def partial_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.endswith(".partial")]


def in_child(function: Callable[[], None]) -> int:
    """The exit code of a process that runs a function; minus the signal if one killed it."""
    child = FORK.Process(target=function)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def kill_me(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# The instants of a write, in order: which call is replaced by a kill, at its how-manieth use, and
# which step is found afterwards.
INSTANTS = {
    "before the first byte": (native, "write_all", 0, 1),
    "after the header": (native, "write_all", 1, 1),
    "among the tensors": (native, "write_all", 3, 1),
    "before the checksums": (native, "write_all", 5, 1),
    "before the sync": (os, "fsync", 0, 1),
    "before the renaming": (Path, "replace", 0, 1),
    "after the renaming": (atomic, "sync_folder", 0, 2),
}


@pytest.mark.parametrize("instant", INSTANTS)
def test_writer_killed_at_this_instant_leaves_a_whole_file(instant: str, tmp_path: Path) -> None:
    owner, name, uses, expected = INSTANTS[instant]
    path = tmp_path / "a.safetensors"
    store(path, 1)
    real = getattr(owner, name)
    left = uses

    def until_killed(*arguments: object, **options: object) -> object:
        nonlocal left
        if left == 0:
            kill_me()
        left -= 1
        return real(*arguments, **options)

    def write() -> None:
        setattr(owner, name, until_killed)
        store(path, 2)

    assert in_child(write) == -signal.SIGKILL
    assert stored_step(path) == expected
    assert len(partial_files(tmp_path)) == (expected == 1)
    store(path, 3)
    assert stored_step(path) == 3
    assert list(tmp_path.iterdir()) == [path]


def test_killed_while_marking_the_best_leaves_the_best_before(tmp_path: Path) -> None:
    first, second = tmp_path / "step_1.safetensors", tmp_path / "step_2.safetensors"
    store(first, 1)
    store(second, 2)
    best = mark_best(first)

    def mark() -> None:
        Path.replace = kill_me  # type: ignore[assignment,method-assign]
        mark_best(second)

    assert in_child(mark) == -signal.SIGKILL
    assert stored_step(best) == 1 and len(partial_files(tmp_path)) == 1
    store(first, 3)
    assert sorted(tmp_path.iterdir()) == [best, first, second]
    assert stored_step(second) == 2  # its second name was removed, not the file


def write_on_and_on(path: Path) -> None:
    step = 0
    while True:
        step += 1
        store(path, step, items=500_000)


def kill_while_writing(path: Path, delay: float) -> bool:
    """Kill a process that writes without pause; whether it was in the middle of a file."""
    child = FORK.Process(target=write_on_and_on, args=(path,))
    child.start()
    while not path.exists():
        assert child.is_alive()
        time.sleep(0.001)
    time.sleep(delay)
    child.kill()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert stored_step(path) >= 1
    return bool(partial_files(path.parent))


@pytest.mark.parametrize("seed", range(3))
def test_writer_killed_at_a_random_moment_leaves_a_whole_file(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    kill_while_writing(path, random.Random(seed).uniform(0, 0.2))
    store(path, 99)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_writer_killed_at_thirty_random_moments_always_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    delays = random.Random(0)
    hits = sum(kill_while_writing(path, delays.uniform(0, 0.5)) for _ in range(30))
    assert hits >= 10  # else the test kills at the wrong moments
    store(path, 99)
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_leaves_the_file_before_and_no_other(disk: Path) -> None:
    path = disk / "a.safetensors"
    store(path, 1)
    with pytest.raises(
        CheckpointError, match=r"a\.safetensors cannot be written: No space"
    ) as caught:
        store(path, 2, items=2_000_000)
    assert caught.value.errno == errno.ENOSPC
    assert "Free some space" in str(caught.value)
    assert stored_step(path) == 1
    assert list(disk.iterdir()) == [path]
    store(path, 3)
    assert stored_step(path) == 3


def test_folder_on_a_read_only_disk_is_named(disk: Path) -> None:
    path = disk / "a.safetensors"
    store(path, 1)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(
        CheckpointError, match=r"a\.safetensors cannot be written: Read-only.*permis"
    ):
        store(path, 2)
    assert stored_step(path) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_folder_without_write_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    store(path, 1)
    tmp_path.chmod(0o555)
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be written: Permission"):
        store(path, 2)
    tmp_path.chmod(0o755)
    assert stored_step(path) == 1


@pytest.mark.parametrize("limit", [0, 100, 20_000])
def test_limit_of_the_file_size_leaves_the_file_before(limit: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    store(path, 1)

    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(
            CheckpointError, match=r"a\.safetensors cannot be written: File too large"
        ):
            store(path, 2, items=10_000)

    assert in_child(write) == 0
    assert stored_step(path) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_limit_one_byte_below_the_size_leaves_the_file_before(tmp_path: Path) -> None:
    """The system then writes all but the last byte without complaint."""
    path = tmp_path / "a.safetensors"
    store(path, 2, items=10_000)
    limit = path.stat().st_size - 1
    store(path, 1)

    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(CheckpointError, match="File too large"):
            store(path, 2, items=10_000)

    assert in_child(write) == 0
    assert stored_step(path) == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("parent", ["none", "file"])
def test_missing_folder_is_told(parent: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"a\.safetensors cannot be written: .*create it first"
    ):
        store(tmp_path / parent / "a.safetensors", 1)


def test_interrupt_in_the_middle_removes_the_unfinished_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    store(path, 1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store(path, 2)
    monkeypatch.undo()
    assert stored_step(path) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_file_of_a_living_writer_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    with replacing(first) as file:
        write_all(file, b"half")
        store(second, 1)
        assert len(partial_files(tmp_path)) == 1
        write_all(file, b" and half")
    assert first.read_bytes() == b"half and half"
    assert stored_step(second) == 1


def test_only_our_own_leftovers_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / ".a.safetensors.0123abcd.partial"
    others = [tmp_path / name for name in (".download.partial", "a.0123abcd.partial", ".notes")]
    for path in (leftover, *others):
        path.touch()
    assert remove_leftovers(tmp_path) == [leftover]
    assert sorted(tmp_path.iterdir()) == sorted(others)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_leftover_without_locks_is_removed_when_its_writer_has_ended_whatever_its_age(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"

    def die() -> None:
        with replacing(path) as file:
            write_all(file, b"half")
            kill_me()

    assert in_child(die) == -signal.SIGKILL
    (leftover,) = partial_files(tmp_path)
    with replacing(tmp_path / "b") as file:
        living = Path(os.fsdecode(file.name))
        os.utime(living, (0, 0))
        store(path, 1)
        assert not leftover.exists() and living.exists()
    assert stored_step(path) == 1


@pytest.mark.usefixtures("no_locks")
def test_leftover_of_another_machine_without_locks_is_known_by_its_age(tmp_path: Path) -> None:
    other = atomic.this_process()._replace(machine="other").text
    names = [f".a.safetensors.0000000{i}" for i in range(2)]
    new, newer = (tmp_path / f"{name}.partial" for name in (names[0], f"{names[0]}-{other}"))
    old, older = (tmp_path / f"{name}.partial" for name in (names[1], f"{names[1]}-{other}"))
    for file in (new, newer, old, older):
        file.touch()
    for file in (old, older):
        os.utime(file, (time.time() - 7200,) * 2)
    path = tmp_path / "a.safetensors"
    store(path, 1)
    assert sorted(tmp_path.iterdir()) == sorted([new, newer, path])
    assert stored_step(path) == 1


def test_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain", tmp_path / "a.safetensors"
    plain.touch()
    store(path, 1)
    assert path.stat().st_mode == plain.stat().st_mode


def test_data_is_on_the_disk_before_the_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    store(path, 1)
    events: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        events.append(f"sync {kind}, step {stored_step(path)}")
        real_sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    store(path, 2)
    assert events == ["sync file, step 1", "rename", "sync folder, step 2"]


def test_writing_does_not_touch_any_generator(tmp_path: Path) -> None:
    before = torch.get_rng_state(), random.getstate()
    store(tmp_path / "a.safetensors", 1)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
