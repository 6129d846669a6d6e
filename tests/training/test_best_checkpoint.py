"""The best checkpoint of a run that was killed or stopped is that of one that was not, always."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finetune_runs import base_run, stop_after, tuned_config, weights_of
from small_runs import assert_same_bits, last_tensors, metrics, small_config, status

from vision.checkpoints.native.checkpoint import read_checkpoint, write_checkpoint
from vision.checkpoints.native.checkpoint_folder import BEST, latest, step_path
from vision.checkpoints.native.header import read_record
from vision.training import loop
from vision.training.configs import TrainConfig
from vision.training.loop import train
from vision.training.run.run_folder import PREEMPTED

STEPS = 12
SETTINGS = [
    "ema=0.5",
    f"duration={STEPS}steps",
    "evaluate_every=2steps",
    "checkpoint.every=3steps",
    "checkpoint.best=loss",
    "optimizer.learning_rate=0.05",  # the loss rises and falls
]
Trace = dict[int, int | None]
"""Step of the best checkpoint in the folder when each step begins; that of the end is the last."""


class Killed(BaseException):
    """Ends a run at an exact instant, as SIGKILL does."""


def some(usual: list[int], every: range) -> list[Any]:
    """The usual values, and the others for the tests that may take minutes."""
    return [n if n in usual else pytest.param(n, marks=pytest.mark.slow) for n in every]


def config_of(folder: Path) -> TrainConfig:
    return small_config(folder, *SETTINGS)


def checkpoints(folder: Path) -> Path:
    return folder / "run" / "checkpoints"


def best_step(folder: Path) -> int | None:
    file = checkpoints(folder) / BEST
    return read_record(file)["step"] if file.exists() else None


def trace(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[int, Trace]:
    """Train, or resume; returns the exit code and the best checkpoints that were seen."""
    found: Trace = {}
    original = loop.forward_backward

    def noted(*arguments: Any) -> Any:
        found[arguments[-1]] = best_step(folder)
        return original(*arguments)

    with monkeypatch.context() as noting:
        noting.setattr(loop, "forward_backward", noted)
        code = train(config_of(folder))
    found[STEPS] = best_step(folder)
    return code, found


def kill_before(
    monkeypatch: pytest.MonkeyPatch, name: str, happens: Callable[..., bool], config: TrainConfig
) -> None:
    """Kill a run just before a call of a function of the loop."""
    original = getattr(loop, name)

    def killing(*arguments: Any, **named: Any) -> Any:
        if happens(*arguments):
            raise Killed
        return original(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(loop, name, killing)
        with pytest.raises(Killed):
            train(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """A run that nothing happened to, with its best checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        code, found = trace(monkeypatch, folder)
    assert code == 0
    losses = {event["step"]: event["loss"] for event in metrics(folder, "val_ema")}
    for step, best in found.items():  # by definition
        evaluated = [s for s in losses if s <= step]
        assert best == (min(evaluated, key=lambda s: losses[s]) if evaluated else None)
    assert len(set(found.values())) > 3 and found[STEPS] != STEPS
    return folder, found


def improvements(found: Trace) -> list[int]:
    """The steps whose evaluation was the best so far."""
    return sorted({step for step in found.values() if step is not None})


def assert_same_run(whole: tuple[Path, Trace], folder: Path, found: Trace) -> None:
    """The same best checkpoint from the resume on, and the same end."""
    assert found == {step: best for step, best in whole[1].items() if step in found}
    ends = [read_checkpoint(checkpoints(place) / BEST) for place in (whole[0], folder)]
    assert_same_bits(ends[0].tensors, ends[1].tensors)
    assert_same_bits(last_tensors(whole[0]), last_tensors(folder))
    last = [read_record(latest(checkpoints(place))[0]) for place in (whole[0], folder)]
    for name in ("step", "best", "evaluated"):
        assert ends[0].record[name] == ends[1].record[name], name
        assert last[0][name] == last[1][name], name
    assert last[0]["best_step"] == last[1]["best_step"] == ends[1].record["step"]
    assert status(folder)["status"] == "finished"
    assert status(folder)["best"] == status(whole[0])["best"]
    for split in ("val", "val_ema"):
        assert metrics(folder, split) == metrics(whole[0], split)


@pytest.mark.parametrize("number", some([1], range(3)))
@pytest.mark.parametrize("function", ["mark_best", pytest.param("prune", marks=pytest.mark.slow)])
def test_run_killed_before_it_marks_a_checkpoint_as_the_best_marks_it_when_resumed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: tuple[Path, Trace],
    number: int,
    function: str,
) -> None:
    step = improvements(whole[1])[number]

    def after_the_write(*_: Any) -> bool:
        return step_path(checkpoints(tmp_path), step).exists()

    kill_before(monkeypatch, function, after_the_write, config_of(tmp_path))
    code, found = trace(monkeypatch, tmp_path)
    assert code == 0
    assert min(found) == step
    assert_same_run(whole, tmp_path, found)


@pytest.mark.parametrize("step", some([4, 6, STEPS], range(2, STEPS + 1, 2)))
def test_run_stopped_in_a_step_that_is_evaluated_evaluates_it_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, Trace], step: int
) -> None:
    stop_after(monkeypatch, [step - 1])
    assert train(config_of(tmp_path)) == PREEMPTED
    assert status(tmp_path)["status"] == "preempted" and status(tmp_path)["step"] == step
    assert all(event["step"] < step for event in metrics(tmp_path, "val") if step > 2)
    code, found = trace(monkeypatch, tmp_path)
    assert code == 0
    assert_same_run(whole, tmp_path, found)


def test_run_killed_before_it_stores_a_repeated_evaluation_logs_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, Trace]
) -> None:
    step = improvements(whole[1])[1]
    with monkeypatch.context() as stopping:
        stop_after(stopping, [step - 1])
        assert train(config_of(tmp_path)) == PREEMPTED
    kill_before(monkeypatch, "write_checkpoint", lambda *_: True, config_of(tmp_path))
    assert metrics(tmp_path, "val")[-1]["step"] == step
    code, found = trace(monkeypatch, tmp_path)
    assert code == 0
    assert_same_run(whole, tmp_path, found)


@pytest.mark.parametrize("step", some([8, STEPS], range(4, STEPS + 1)))
def test_run_that_falls_back_to_an_older_checkpoint_has_the_best_one_of_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, Trace], step: int
) -> None:
    kill_before(
        monkeypatch,
        "forward_backward" if step < STEPS else "prune",
        lambda *given: given[-1] == step,
        config_of(tmp_path),
    )
    newest, older, *_ = latest(checkpoints(tmp_path))
    newest.write_bytes(newest.read_bytes()[:-100])  # the best one is the same file, if it is it
    code, found = trace(monkeypatch, tmp_path)
    assert code == 0
    assert min(found) == int(older.stem.removeprefix("step_"))
    assert_same_run(whole, tmp_path, found)


def test_run_that_falls_back_to_before_its_first_evaluation_has_no_best_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["checkpoint.every=1steps"]
    config = small_config(tmp_path, *SETTINGS, *more)
    kill_before(monkeypatch, "forward_backward", lambda *given: given[-1] == 2, config)
    newest = latest(checkpoints(tmp_path))[0]
    newest.write_bytes(newest.read_bytes()[:-100])
    kill_before(monkeypatch, "forward_backward", lambda *given: given[-1] == 1, config)
    assert best_step(tmp_path) is None


def test_best_one_that_was_removed_is_made_again_or_missed_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_after(monkeypatch, [2, 4])
    assert train(config_of(tmp_path)) == PREEMPTED
    (checkpoints(tmp_path) / BEST).unlink()
    assert train(config_of(tmp_path)) == PREEMPTED
    assert best_step(tmp_path) == 2
    (checkpoints(tmp_path) / BEST).unlink()
    step_path(checkpoints(tmp_path), 2).unlink()
    capsys.readouterr()
    assert train(config_of(tmp_path)) == 0
    assert "step_00000002.safetensors" in capsys.readouterr().out
    assert best_step(tmp_path) is not None


def without_best_step(folder: Path) -> None:
    """Make the checkpoints of a run those of a version that did not record the best step."""
    files = {path.stat().st_ino: path for path in latest(checkpoints(folder))}
    for path in files.values():
        stored = read_checkpoint(path)
        best = checkpoints(folder) / BEST
        same = best.exists() and best.samefile(path)
        del stored.record["best_step"]
        write_checkpoint(path, stored.tensors, stored.record)
        if same:
            write_checkpoint(best, stored.tensors, stored.record)


@pytest.mark.parametrize("step", some([7], range(2, STEPS)))
def test_run_of_a_version_without_the_best_step_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, Trace], step: int
) -> None:
    kill_before(
        monkeypatch, "forward_backward", lambda *given: given[-1] == step, config_of(tmp_path)
    )
    without_best_step(tmp_path)
    code, found = trace(monkeypatch, tmp_path)
    assert code == 0
    assert_same_run(whole, tmp_path, found)


def test_run_of_a_version_without_the_best_step_killed_before_it_marked_it_marks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, Trace]
) -> None:
    step = improvements(whole[1])[1]
    last: list[bool] = []

    def second(*_: Any) -> bool:
        last.append(True)
        return len(last) == 2

    kill_before(monkeypatch, "mark_best", second, config_of(tmp_path))
    without_best_step(tmp_path)
    code, found = trace(monkeypatch, tmp_path)
    assert code == 0 and min(found) == step
    assert_same_run(whole, tmp_path, found)


def test_fine_tuning_after_a_probe_that_was_killed_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = base_run(tmp_path / "source")
    more = ["recipe=probe_then_finetune", "probe_first.duration=6steps", "duration=4steps"]
    more += ["evaluate_every=3steps", "checkpoint.best=loss"]
    assert train(tuned_config(tmp_path / "whole", source, *more)) == 0
    config = tuned_config(tmp_path / "killed", source, *more)
    probe = "run/probe/checkpoints/step_00000006.safetensors"
    kill_before(monkeypatch, "mark_best", lambda *_: (tmp_path / "killed" / probe).exists(), config)
    assert train(config) == 0
    ends = [weights_of(tmp_path / name / "run" / "probe") for name in ("whole", "killed")]
    assert_same_bits(*ends)
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "killed"))
