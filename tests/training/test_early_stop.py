"""Early stopping: against a replay of the evaluations, and exact under resume."""

from pathlib import Path
from typing import Any

import pytest
from finetune_runs import stop_after
from small_runs import assert_same_bits, last_tensors, metrics, small_config, status

from vision.config import ConfigError
from vision.sweeps.outcome import read_outcome
from vision.training.configs import TrainConfig
from vision.training.loop import train
from vision.training.run.run_folder import Run
from vision.training.state import TrainState

PLATEAU = [
    "optimizer.learning_rate=1e-7",  # nothing improves for long
    "schedule.warmup=0steps",
    "schedule.warmup_from=0",
    "schedule.end_at=0",
    "evaluate_every=2steps",
    "checkpoint.every=5steps",
    "duration=30steps",
]


def stopping(folder: Path, patience: int, delta: float, *more: str) -> TrainConfig:
    early = "stop_early={patience:%d,min_delta:%g}" % (patience, delta)  # noqa: UP031
    return small_config(folder, *PLATEAU, early, *more)


def expected_end(
    values: list[tuple[int, float]], patience: int, delta: float, lower: bool = False
) -> int:
    """The step after which Keras' EarlyStopping would end the run, replayed."""
    reference, waited = None, 0
    for step, value in values:
        gain = None if reference is None else (reference - value if lower else value - reference)
        if gain is None or gain > delta:
            reference, waited = value, 0
        else:
            waited += 1
            if waited == patience:
                return step
    return values[-1][0]


@pytest.mark.parametrize(
    ("patience", "delta", "more"),
    [
        (2, 0.0, []),
        (3, 1e-7, ["checkpoint.best=loss"]),
        (3, 0.05, ["ema=0.5", "optimizer.learning_rate=2e-2", "evaluate_every=1steps"]),
    ],
    ids=["top1", "loss", "ema"],
)
def test_a_run_ends_where_its_evaluations_say(
    patience: int, delta: float, more: list[str], tmp_path: Path
) -> None:
    config = stopping(tmp_path, patience, delta, *more)
    assert train(config) == 0
    assert train(small_config(tmp_path / "whole", *PLATEAU, *more)) == 0
    split, metric = ("val" if config.ema is None else "val_ema"), config.checkpoint.best
    values = [(e["step"], e[metric]) for e in metrics(tmp_path / "whole", split)]
    end = expected_end(values, patience, delta, lower=metric == "loss")
    assert end < 30
    found = status(tmp_path)
    assert (found["status"], found["step"], found["steps"]) == ("finished", end, 30)
    assert metric in found["reason"]
    assert "stop_early" in found["reason"]
    assert [e["step"] for e in metrics(tmp_path, split)] == [s for s, _ in values if s <= end]
    outcome = read_outcome(Run(tmp_path / "run"), config)  # what a sweep gets
    assert (outcome.status, outcome.objective) == ("finished", found["best"])


@pytest.mark.parametrize("kills", [[3], [4, 6], [7]])
def test_a_resumed_run_ends_at_the_same_step_with_the_same_files(
    kills: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["optimizer.learning_rate=3e-3"]
    assert train(stopping(tmp_path / "a", 3, 0.3, *more)) == 0
    stop_after(monkeypatch, kills)
    config = stopping(tmp_path / "b", 3, 0.3, *more)
    for _ in kills:
        assert train(config) == 75
    assert train(config) == 0
    first, second = status(tmp_path / "a"), status(tmp_path / "b")
    assert 2 < first["step"] < 30
    timed = ("seconds",)
    assert {k: v for k, v in first.items() if k not in timed} == {
        k: v for k, v in second.items() if k not in timed
    }
    assert_same_bits(last_tensors(tmp_path / "a"), last_tensors(tmp_path / "b"))
    names = [sorted(f.name for f in (tmp_path / x / "run/checkpoints").iterdir()) for x in "ab"]
    assert f"step_{first['step']:08d}.safetensors" in names[0]
    assert names[0][-1] == names[1][-1]


def test_a_run_killed_before_it_is_finished_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stopping(tmp_path, 2, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(TrainState, "reason_to_end", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config)
    before = last_tensors(tmp_path)
    assert train(config) == 0
    assert status(tmp_path)["step"] == 6
    assert_same_bits(before, last_tensors(tmp_path))


def test_a_finished_run_goes_on_with_another_patience(tmp_path: Path) -> None:
    assert train(stopping(tmp_path, 1, 0.5)) == 0
    early = status(tmp_path)["step"]
    assert train(stopping(tmp_path, 1, 0.5)) == 0  # finished already
    assert status(tmp_path)["step"] == early
    with pytest.raises(ConfigError, match=r"stop_early\.patience: 1 → 4"):
        train(stopping(tmp_path, 4, 0.5))
    assert train(stopping(tmp_path, 4, 0.5, "allow_changes=true")) == 0
    assert status(tmp_path)["step"] == early + 6


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{patience:0,min_delta:0}", "patience"),
        ("{patience:2,min_delta:-1}", "min_delta"),
        ("{patience:2}", "min_delta"),
        ("5", "stop_early"),
    ],
)
def test_wrong_settings_are_refused(value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(tmp_path, f"stop_early={value}")


def test_weights_beside_balanced_sampling_are_refused(tmp_path: Path) -> None:
    balanced: dict[str, Any] = {"loss.class_weights": "balanced", "data.sampling": "balanced"}
    with pytest.raises(ConfigError, match=r"class_weights = balanced and data\.sampling"):
        small_config(tmp_path, *(f"{name}={value}" for name, value in balanced.items()))
