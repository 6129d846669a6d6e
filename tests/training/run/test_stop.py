"""A request to stop is answered within one batch, wherever the run is, and costs nothing."""

import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_runs import base_run, tuned_config
from small_runs import RICH, assert_same_bits, last_tensors, metrics, small_config, status, words
from started_runs import start

from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import BEST
from vision.training import job
from vision.training.loop import train
from vision.training.run import log
from vision.training.run.distributed import World
from vision.training.run.run_folder import PREEMPTED
from vision.training.run.stop import Stopped, StopRequest, stop_requests
from vision.training.tasks import probe, task

ALONE = World(0, 1, torch.device("cpu"))
SETTINGS = [*RICH, "duration=12steps", "evaluate_every=4steps", "checkpoint.every=5steps"]
BATCHES = 3
"""Of the validation images, for each of the two sets of weights."""


def stop_at(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, number: int) -> list[int]:
    """Ask for a stop when the batch of this number is drawn; returns the numbers that were drawn.

    `name` is a function of the module that returns batches; all its calls count.
    """
    original, drawn = getattr(module, name), []

    def stopping(*given: Any) -> Iterator[Any]:
        for batch in original(*given):
            if len(drawn) == number:
                signal.raise_signal(signal.SIGTERM)
            drawn.append(len(drawn))
            yield batch

    monkeypatch.setattr(module, name, stopping)
    return drawn


def assert_same_run(whole: Path, other: Path) -> None:
    assert status(other)["status"] == "finished"
    assert status(other)["best"] == status(whole)["best"]
    assert_same_bits(last_tensors(whole), last_tensors(other))
    ends = [read_checkpoint(p / "run" / "checkpoints" / BEST).tensors for p in (whole, other)]
    assert_same_bits(*ends)
    for split in ("train", "val", "val_ema"):
        expected, found = metrics(whole, split), metrics(other, split)
        for event in (*expected, *found):
            event.pop("images_per_second", None)
        assert found == expected


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train(small_config(folder, *SETTINGS)) == 0
    return folder


@pytest.mark.parametrize(
    ("batch", "step"),
    [
        pytest.param(0, 4, id="the first batch of the first evaluation"),
        pytest.param(2 * BATCHES + 4, 8, id="the average in the second"),
        pytest.param(4 * BATCHES + 2, 12, id="the last evaluation"),
    ],
)
def test_run_stopped_in_an_evaluation_repeats_it_and_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, batch: int, step: int
) -> None:
    config = small_config(tmp_path, *SETTINGS)
    with monkeypatch.context() as stopping:
        drawn = stop_at(stopping, task, "evaluation_batches", batch)
        assert train(config) == PREEMPTED
    assert drawn[-1] == batch  # no further one
    assert status(tmp_path)["status"] == "preempted" and status(tmp_path)["step"] == step
    with monkeypatch.context() as stopping:  # and again, in the repeated evaluation
        drawn = stop_at(stopping, task, "evaluation_batches", 1)
        assert train(config) == PREEMPTED
    assert drawn[-1] == 1
    assert status(tmp_path)["step"] == step
    assert train(config) == 0
    assert_same_run(whole, tmp_path)


def test_probe_stopped_while_features_are_computed_or_evaluated_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, more = base_run(tmp_path / "source"), ["tune=head", "ema=0.9"]
    assert train(tuned_config(tmp_path / "whole", source, *more)) == 0
    config = tuned_config(tmp_path / "stopped", source, *more)
    run = tmp_path / "stopped" / "run"
    with monkeypatch.context() as stopping:
        drawn = stop_at(stopping, probe, "evaluation_batches", 2)
        assert train(config) == PREEMPTED
    assert drawn[-1] == 2
    assert "there is nothing to save" in capsys.readouterr().out
    assert not (run / "status.json").exists()
    assert not list((tmp_path / "stopped" / ".features").glob("*.npy"))
    with monkeypatch.context() as stopping:
        drawn = stop_at(stopping, probe, "evaluation_requests", 1)
        assert train(config) == PREEMPTED
    assert drawn[-1] == 1
    assert status(tmp_path / "stopped")["status"] == "preempted"
    assert train(config) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize("name", ["build_source", "build_model", "build_optimizer"])
def test_run_stopped_while_it_is_built_ends_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    def building(*given: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the run is still being built")

    config = small_config(tmp_path, "duration=4steps")
    with monkeypatch.context() as stopping:
        stopping.setattr(job, name, building)
        assert train(config) == PREEMPTED
        assert "SIGTERM" in capsys.readouterr().out
        assert not (tmp_path / "run").exists()
    assert train(config) == 0


def test_run_stopped_while_its_tracker_starts_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "duration=4steps")
    with monkeypatch.context() as stopping:
        stopping.setattr(log, "_start_wandb", lambda *_: signal.raise_signal(signal.SIGTERM))
        assert train(config) == PREEMPTED
    assert "SIGTERM" in capsys.readouterr().out
    assert not (tmp_path / "run" / "status.json").exists()
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert train(config) == 0


STOPPED_AT_IMPORT = """
import signal, sys
wanted = sys.argv.pop(1)
class Import:
    def find_spec(name, *_):
        if name == wanted:
            signal.raise_signal(signal.SIGTERM)
sys.meta_path.insert(0, Import)
from vision.cli.app import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("module", ["hydra", "vision.training.loop", "torch"])
def test_run_stopped_while_modules_are_imported_ends_at_once(tmp_path: Path, module: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOPPED_AT_IMPORT)
    process = start(sys.executable, str(script), module, *words(tmp_path, "duration=4steps"))
    output = process.communicate(timeout=60)[0]
    assert process.returncode == PREEMPTED, output
    (line,) = output.splitlines()
    assert "SIGTERM" in line and "nothing to save" in line
    assert sorted(tmp_path.iterdir()) == [script]


STUCK = """
import ctypes, signal, threading
from vision.training.run import stop
stop._PATIENCE = 0.1
def send():  # to this thread: the main one is not even interrupted
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
with stop.stop_requests() as request, request.at_once():
    threading.Timer(0.1, send).start()
    ctypes.CDLL(None).sleep(60)
"""


def test_request_ends_a_process_whose_libraries_do_not_return_to_python() -> None:
    process = start(sys.executable, "-c", STUCK)
    assert "SIGTERM" in process.communicate(timeout=30)[0]
    assert process.returncode == PREEMPTED


DROPPED = """
import signal, sys, time, weakref
from vision.cli import app
class Thing: pass
def interrupted(_):
    signal.raise_signal(signal.SIGINT)  # Python drops what a callback raises
def work(words, home):
    thing = Thing()
    reference = weakref.ref(thing, interrupted)
    del thing
    for _ in range(600):
        time.sleep(0.1)
app._dispatch = work
# Where tests run in the background, a shell may have set interrupts to be ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(app.main(["info"]))
"""


def test_interrupt_that_a_callback_gets_ends_the_command_nevertheless() -> None:
    process = start(sys.executable, "-c", DROPPED)
    assert process.communicate(timeout=50)[0] == "interrupted\n"
    assert process.returncode == 130


ALONE_AT_THE_MEETING = """
import sys
from vision.cli.app import main
from vision.training.run import distributed
real = distributed.rendezvous
def noted(*given):
    print("meeting", flush=True)
    return real(*given)
distributed.rendezvous = noted
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_run_stopped_while_it_waits_for_another_process_ends_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}
    for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    script = tmp_path / "train.py"
    script.write_text(ALONE_AT_THE_MEETING)
    process = start(sys.executable, str(script), *words(tmp_path, "duration=4steps"))
    assert process.stdout is not None and process.stdout.readline() == "meeting\n"
    time.sleep(1)
    before = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == PREEMPTED, output
    assert time.monotonic() - before < 15
    assert output.count("nothing to save") == (rank == 0) and "Traceback" not in output


def test_resumed_run_stopped_while_it_is_built_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    config = small_config(tmp_path, *SETTINGS)
    with monkeypatch.context() as stopping:
        stop_at(stopping, task, "evaluation_batches", 1)
        assert train(config) == PREEMPTED
        before = status(tmp_path)
        stopping.setattr(job, "build_model", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        assert train(config) == PREEMPTED
    assert status(tmp_path) == before
    assert train(config) == 0
    assert_same_run(whole, tmp_path)


def test_request_is_raised_at_once_only_where_nothing_is_to_be_saved() -> None:
    with stop_requests() as stop:
        with pytest.raises(Stopped), stop.at_once():
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == "SIGTERM"
        with pytest.raises(Stopped), stop.at_once():  # asked before
            pytest.fail("not stopped")


def test_error_of_a_connection_that_another_process_closed_is_a_stop_after_a_request() -> None:
    stop = StopRequest()
    with pytest.raises(RuntimeError, match="closed"), stop.at_once():
        raise RuntimeError("Connection closed by peer")

    def fail() -> None:
        stop.signal = "SIGTERM"
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(Stopped), stop.at_once():
        fail()


def test_batches_end_in_all_processes_when_another_one_is_asked_to_stop() -> None:
    class Other(World):
        def any(self, *flags: bool) -> list[bool]:
            return [True for _ in flags]

    assert list(StopRequest().until([1, 2], ALONE)) == [1, 2]
    with pytest.raises(Stopped):
        list(StopRequest().until([1, 2], Other(0, 2, ALONE.device)))


STOPPED_IN_RANK_1 = """
import os, signal, sys
from vision.cli.app import main
from vision.training.tasks import task
real = task.evaluation_batches
def stopping(*given):
    for number, batch in enumerate(real(*given)):
        if os.environ["RANK"] == "1" and number == 1:
            signal.raise_signal(signal.SIGTERM)
        yield batch
task.evaluation_batches = stopping
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_processes_stop_at_the_same_batch_of_an_evaluation_when_one_is_asked(
    tmp_path: Path,
) -> None:
    def run(folder: Path, script: str) -> str:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script]
        process = start(sys.executable, *launch, *words(folder, *SETTINGS))
        return process.communicate(timeout=280)[0]

    script = tmp_path / "train.py"
    script.write_text(STOPPED_IN_RANK_1)
    run(tmp_path / "whole", "train.py")
    output = run(tmp_path / "stopped", str(script))
    assert status(tmp_path / "stopped")["status"] == "preempted", output
    assert "Stopped after step 4 (signal to another process)" in output
    output = run(tmp_path / "stopped", "train.py")
    assert "after step 4." in output
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_first_interrupt_says_at_once_what_happens(capfd: pytest.CaptureFixture[str]) -> None:
    with stop_requests() as stop:
        signal.raise_signal(signal.SIGINT)
        said = capfd.readouterr().err
        assert stop and "saving after the step at hand" in said and "again ends it" in said
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_batches_that_pass_are_counted_while_watched() -> None:
    stop, passed = StopRequest(), list[int]()
    with stop.watched(lambda: passed.append(1)):
        assert list(stop.until([1, 2, 3], ALONE)) == [1, 2, 3]
    assert len(passed) == 3
    assert list(stop.until([1], ALONE)) == [1] and len(passed) == 3
