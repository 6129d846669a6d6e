"""Nothing is lost: a killed or stopped run ends in the very weights of one that was not."""

import os
import random
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from finetune_runs import stop_after
from forked_runs import ForkedTraining, fork, join, train_forked
from small_runs import RICH, assert_same_bits, last_tensors, metrics, small_config, status, words
from small_tasks import DISTILLED, OTHER_TASKS, TASKS
from started_runs import start, start_training, torchrun, wait_for_step

from vision.checkpoints.native.checkpoint import read_checkpoint, write_checkpoint
from vision.checkpoints.native.checkpoint_folder import latest
from vision.cli.app import main
from vision.config import ConfigError
from vision.training import loop
from vision.training.loop import train
from vision.training.run.run_folder import PREEMPTED

MUON = ["optimizer.name=muon", "optimizer.learning_rate=2e-3", "optimizer.rest_learning_rate=1e-3"]


def kill_and_resume(
    folder: Path, settings: list[str], steps: list[int], model: str | None = None
) -> None:
    """Kill the run (workers too) after each of these steps; then let it end. With the name of a
    model, `train.py` is started as a user does.
    """
    for step in steps:
        process: subprocess.Popen[str] | ForkedTraining
        if model is None:
            process = ForkedTraining(folder, *settings)
        else:
            process = start(sys.executable, "train.py", *words(folder, *settings, model=model))
        wait_for_step(folder, step, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert train(small_config(folder, *settings, model=model or "vit_mini")) == 0


@pytest.mark.parametrize(
    ("workers", "steps", "optimizer", "model"),
    [
        pytest.param(0, [4], [], "vit_mini", id="in this process", marks=pytest.mark.slow),
        pytest.param(2, [11], [], "vit_mini", id="two workers"),
        pytest.param(0, [8], [*MUON, "channels_last=true", "precision=bf16"], None, id="muon"),
    ],
)
def test_run_killed_in_an_epoch_ends_in_the_same_bits(
    tmp_path: Path, workers: int, steps: list[int], optimizer: list[str], model: str | None
) -> None:
    settings = [*RICH, *optimizer, "max_batch_per_device=4", f"loader.workers={workers}"]
    assert train(small_config(tmp_path / "whole", *settings)) == 0
    kill_and_resume(tmp_path / "killed", settings, steps, model)
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "killed"))
    for split in ("train", "val", "val_ema"):
        whole, killed = (metrics(tmp_path / name, split) for name in ("whole", "killed"))
        for event in (*whole, *killed):
            event.pop("images_per_second", None)
        assert whole == killed


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=() if task == "distill" else pytest.mark.slow)
        for task in OTHER_TASKS
    ],
)
def test_run_of_another_task_killed_in_an_epoch_ends_in_the_same_bits(
    tmp_path: Path, task: str
) -> None:
    settings = [*RICH, *TASKS[task](tmp_path), "max_batch_per_device=4", "precision=bf16"]
    assert train(small_config(tmp_path / "whole", *settings)) == 0
    kill_and_resume(tmp_path / "killed", settings, [8])
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "killed"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["vit_mini", "swin_mini", "swinv2_mini"])
def test_run_killed_many_times_at_random_ends_in_the_same_bits(tmp_path: Path, model: str) -> None:
    settings = [*RICH, "max_batch_per_device=4", "checkpoint.every=1steps"]
    steps = sorted(random.Random(model).sample(range(1, 19), 4))
    assert train(small_config(tmp_path / "whole", *settings, model=model)) == 0
    kill_and_resume(tmp_path / "killed", settings, steps, model)
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "killed"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_run_killed_in_the_middle_of_checkpoint_writes_ends_in_the_same_bits(
    tmp_path: Path, workers: int
) -> None:
    large = ["model.width=256", "max_batch_per_device=4"]  # so that a write takes a while
    settings = [*RICH, *large, "checkpoint.every=1steps", f"loader.workers={workers}"]
    assert train(small_config(tmp_path / "whole", *settings)) == 0
    halves = sum(killed_while_saving(tmp_path / "killed", settings) for _ in range(4))
    assert halves >= 2  # else the test kills at the wrong moments
    assert train(small_config(tmp_path / "killed", *settings)) == 0
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "killed"))
    assert not half_written(tmp_path / "killed")


def half_written(folder: Path) -> list[Path]:
    return list((folder / "run" / "checkpoints").glob(".*.partial"))


def killed_while_saving(folder: Path, settings: list[str]) -> bool:
    """Kill the run once it writes a checkpoint; whether it left half of one."""
    before = half_written(folder)
    process = start_training(folder, *settings)
    while not set(half_written(folder)) - set(before):
        assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return bool(set(half_written(folder)) - set(before))


def test_second_interrupt_ends_the_run_at_once_and_it_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = loop.forward_backward

    def interrupted_twice(*arguments: Any) -> Any:
        if arguments[-1] == 7:
            signal.raise_signal(signal.SIGINT)  # a request to stop after the step
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    assert train(small_config(tmp_path / "whole", *RICH)) == 0
    monkeypatch.setattr(loop, "forward_backward", interrupted_twice)
    assert main(["train", *words(tmp_path / "ended", *RICH)]) == 128 + signal.SIGINT
    assert "interrupted" in capsys.readouterr().err
    assert status(tmp_path / "ended")["status"] == "failed"
    assert status(tmp_path / "ended")["step"] == 7  # nothing more was done, nor saved
    monkeypatch.undo()
    assert train(small_config(tmp_path / "ended", *RICH)) == 0
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "ended"))


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_run_asked_to_stop_saves_exits_75_and_goes_on_to_the_same_bits(
    tmp_path: Path, number: signal.Signals
) -> None:
    settings = [*RICH, "duration=150steps", "checkpoint.every=150steps", "loader.workers=1"]
    settings += ["evaluate_every=150steps"]
    process = start_training(tmp_path / "stopped", *settings)
    wait_for_step(tmp_path / "stopped", 3, process)
    os.killpg(process.pid, number)  # as a terminal or a scheduler does: to the workers as well
    output, _ = process.communicate(timeout=120)
    assert process.returncode == PREEMPTED, output
    stopped = status(tmp_path / "stopped")
    assert stopped["status"] == "preempted"
    assert 3 <= stopped["step"] < 150
    assert f"Stopped after step {stopped['step']} ({number.name})" in output
    if number is signal.SIGTERM:
        assert train(small_config(tmp_path / "whole", *settings)) == 0
        assert train(small_config(tmp_path / "stopped", *settings)) == 0
        assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "stopped"))


def test_newest_checkpoint_damaged_falls_back_to_the_one_before_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*RICH, "checkpoint.every=2steps"]
    assert train(small_config(tmp_path / "whole", *settings)) == 0
    process = ForkedTraining(tmp_path / "broken", *settings)
    wait_for_step(tmp_path / "broken", 9, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    newest = sorted((tmp_path / "broken" / "run" / "checkpoints").glob("step_*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    assert train(small_config(tmp_path / "broken", *settings)) == 0
    assert newest.name in capsys.readouterr().out
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "broken"))


def test_run_with_timms_muon_is_not_resumed_with_this_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions had timm's under the name muon; it stores what its variant nmuon does."""
    stop_after(monkeypatch, [2])
    settings = ["duration=8steps", "optimizer.name=nmuon"]
    assert train(small_config(tmp_path, *settings)) == PREEMPTED
    (file,) = latest(tmp_path / "run" / "checkpoints")
    stored = read_checkpoint(file)
    stored.record["config"]["optimizer"]["name"] = "muon"
    write_checkpoint(file, stored.tensors, stored.record)
    again = small_config(tmp_path, "duration=8steps", "optimizer.name=muon", "allow_changes=true")
    with pytest.raises(ConfigError, match=r"started with timm's muon .*another name"):
        train(again)


def two_processes(folder: Path, parallel: str, settings: list[str], model: str) -> str:
    """Train in two processes, DDP's under torchrun; returns what they say."""
    if parallel == "ddp":
        process = torchrun(folder, *settings, model=model)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output
    config, said = small_config(folder, *settings, model=model), folder.with_name("said")
    codes = join(fork(2, train_forked, config, output=said))
    assert codes == [0, 0], said.read_text()
    return said.read_text()


@pytest.mark.parametrize(
    ("parallel", "model", "settings"),
    [
        ("ddp", "vit_mini", []),
        pytest.param("fsdp", "swin_mini", [], marks=pytest.mark.slow),
        pytest.param("ddp", "vit_mini", MUON, marks=pytest.mark.slow),
        ("fsdp", "swin_mini", MUON),
        pytest.param("ddp", "swin_mini", [], marks=pytest.mark.slow),
        pytest.param("fsdp", "vit_mini", [], marks=pytest.mark.slow),
        pytest.param("fsdp", "vit_mini", MUON, marks=pytest.mark.slow),
        pytest.param("fsdp", "swinv2_mini", [], marks=pytest.mark.slow),
    ],
)
def test_two_processes_learn_what_one_learns(
    tmp_path: Path, parallel: str, model: str, settings: list[str]
) -> None:
    """Without mixing and dropout, which are drawn per process."""
    settings = [*settings, "ema=0.9", "duration=8steps", f"parallel={parallel}"]
    settings += ["channels_last=true", "flip_test=true"]
    assert train(small_config(tmp_path / "one", *settings, model=model)) == 0
    # Each of the two takes its half in two parts, too.
    parts = [*settings, "max_batch_per_device=2"]
    output = two_processes(tmp_path / "two", parallel, parts, model)
    one, two = last_tensors(tmp_path / "one"), last_tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    for name in one:
        assert two[name].float().allclose(one[name].float(), rtol=1e-3, atol=1e-5), name
    for split, name in product(("train", "val", "val_ema"), ("loss", "loss_flipped")):
        if (split, name) != ("train", "loss_flipped"):
            losses = [[e[name] for e in metrics(tmp_path / n, split)] for n in ("one", "two")]
            assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert output.count("Finished.") == 1  # only one process speaks


@pytest.mark.parametrize(
    ("parallel", "task", "more"),
    [
        ("fsdp", "distill", DISTILLED),
        pytest.param("ddp", "distill", DISTILLED, marks=pytest.mark.slow),
        pytest.param("ddp", "distill", [], marks=pytest.mark.slow),
    ],
)
def test_two_processes_learn_another_task_as_one_does(
    tmp_path: Path, parallel: str, task: str, more: list[str]
) -> None:
    settings = [*TASKS[task](tmp_path), *more]
    test_two_processes_learn_what_one_learns(tmp_path, parallel, "vit_mini", settings)


def test_run_of_two_processes_goes_on_in_one(tmp_path: Path) -> None:
    settings = ["duration=8steps", "checkpoint.every=2steps"]
    assert train(small_config(tmp_path / "one", *settings)) == 0
    both = fork(2, train_forked, small_config(tmp_path / "two", *settings))
    wait_for_step(tmp_path / "two", 4, both[0])
    for process in both:
        process.kill()
    join(both)
    assert train(small_config(tmp_path / "two", *settings)) == 0
    one, two = last_tensors(tmp_path / "one"), last_tensors(tmp_path / "two")
    for name in one:
        assert two[name].float().allclose(one[name].float(), rtol=1e-3, atol=1e-5), name
