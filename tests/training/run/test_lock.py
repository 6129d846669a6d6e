"""A run's folder belongs to one training at a time, and to nobody once that one is dead."""

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from forked_runs import ForkedTraining
from small_runs import folder_of_images, small_config, words
from started_runs import wait_for_step

from vision.cli.app import main
from vision.cli.composition import compose
from vision.config import ConfigError, parse
from vision.files import this_process, write_text
from vision.training.configs import TrainConfig
from vision.training.loop import train
from vision.training.run.distributed import World
from vision.training.run.lock import refuse_if_locked, run_lock
from vision.training.run.run_folder import Run

ALONE = World(0, 1, torch.device("cpu"))
FORK = multiprocessing.get_context("fork")  # a new interpreter would take seconds to load torch


def hold_with_a_child(folder: Path) -> None:
    """Take the lock, fork as a loader does, and stay."""
    with run_lock(Run(folder), ALONE):
        FORK.Process(target=time.sleep, args=(60,), daemon=True).start()
        write_text(folder / "status.json", '{"status": "running"}')  # seen as a whole or not at all
        time.sleep(60)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_run_started_twice_is_refused_with_the_holder_and_the_first_is_not_disturbed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["duration=2000steps", "checkpoint.every=2000steps", "evaluate_every=2000steps"]
    first = ForkedTraining(tmp_path, *settings)
    wait_for_step(tmp_path, 1, first)
    assert main(["train", *words(tmp_path, *settings)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
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
        with run_lock(Run(tmp_path / "run"), ALONE):
            pass
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_run_that_fails_before_it_starts_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fewer than one global batch"):
        train(small_config(tmp_path, "batch_size=64"))
    assert list(tmp_path.iterdir()) == []


def test_run_on_a_folder_that_fails_before_it_starts_leaves_nothing(tmp_path: Path) -> None:
    images = folder_of_images(tmp_path / "images", 4)
    data = ["data=folder", f"data.root={images}", "data.val_fraction=0.5", "batch_size=64"]
    given = words(tmp_path / "out", *data, shapes=False)
    with pytest.raises(ConfigError, match=r"choose batch_size=4 or smaller"):
        train(parse(TrainConfig, compose("train", given)[0]))
    assert not (tmp_path / "out" / "run").exists()


def test_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output: the run's folder .*file/run cannot be used"):
        train(small_config(tmp_path / "file"))


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, as NFS and Lustre can be."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)


@pytest.mark.usefixtures("no_locks")
def test_run_on_a_file_system_without_locks_is_held_by_a_living_process_alone(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run")
    holder = FORK.Process(target=hold_with_a_child, args=(run.folder,))
    holder.start()
    wait_for(run.folder / "status.json")
    with (
        pytest.raises(ConfigError, match=f"by process {holder.pid} on .*another name"),
        run_lock(run, ALONE),
    ):
        pass
    with pytest.raises(ConfigError, match=f"by process {holder.pid} on"):
        refuse_if_locked(run)
    (child,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    os.kill(int(child), signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    with run_lock(run, ALONE):  # though its parent has not asked for its exit code yet
        assert len(list(run.folder.glob(".lock-*"))) == 1
    holder.join()
    assert not list(run.folder.glob(".lock-*"))


@pytest.mark.usefixtures("no_locks")
def test_number_of_a_dead_holder_that_another_process_has_got_does_not_hold_the_lock(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run")
    run.write("status.json", {"status": "running"})
    stale = this_process()._replace(start=this_process().start - 1)
    file = run.folder / f".lock-{stale.text}"
    file.write_text("process 1 on here")
    os.utime(file, (time.time() + 9999,) * 2)  # whatever its age
    with run_lock(run, ALONE):
        assert not file.exists()


@pytest.mark.usefixtures("no_locks")
def test_holder_on_another_machine_is_refused_with_the_file_to_remove_whatever_its_age(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run")
    run.write("status.json", {"status": "running"})
    file = run.folder / f".lock-{this_process()._replace(machine='other').text}"
    file.write_text("process 7 on node3")
    os.utime(file, (0, 0))
    with pytest.raises(ConfigError) as error, run_lock(run, ALONE):
        pass
    assert "process 7 on node3" in str(error.value)
    assert f"remove the file {file}" in str(error.value)
    assert sorted(run.folder.glob(".lock-*")) == [file]
    file.unlink()
    with run_lock(run, ALONE):
        pass


@pytest.mark.usefixtures("no_locks")
def test_file_system_without_locks_trains_and_leaves_no_lock(tmp_path: Path) -> None:
    assert train(small_config(tmp_path, "duration=2steps")) == 0
    assert not list((tmp_path / "run").glob(".lock-*"))
