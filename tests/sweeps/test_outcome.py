"""The objective of a run, against numbers written by hand, and its errors in other processes."""

import json
import pickle
from pathlib import Path

import pytest
from small_runs import small_config

from vision.config import ConfigError
from vision.sweeps.outcome import RunFailedError, RunPreemptedError, read_outcome
from vision.training.run.run_folder import Run

EVALUATIONS = [
    {"step": 1, "split": "val", "loss": 3.0, "top1": 0.1},
    {"step": 1, "split": "val_ema", "loss": 4.0, "top1": 0.2},
    {"step": 2, "split": "val", "loss": 1.0, "top1": 0.3},
    {"step": 2, "split": "val_ema", "loss": 2.0, "top1": 0.4},
    {"step": 3, "split": "val", "loss": 2.0, "top1": 0.6},
    {"step": 3, "split": "val_ema", "loss": 3.0, "top1": 0.5},
]


@pytest.mark.parametrize(
    ("words", "objective"),
    [
        (["ema=0.9", "checkpoint.best=loss"], 2.0),
        (["ema=0.9", "checkpoint.best=top1"], 0.5),
        (["ema=0.9", "checkpoint.best=loss", "objective=val/top1"], 0.3),
        (["checkpoint.best=top1"], 0.6),
        (["checkpoint.best=top1", "objective=[val/loss,val/top1]"], (2.0, 0.6)),
    ],
)
def test_objective_is_the_metric_of_the_best_checkpoint(
    tmp_path: Path, words: list[str], objective: object
) -> None:
    run, config = Run(tmp_path), small_config(tmp_path, *words)
    assert read_outcome(run, config).status == "new"
    assert read_outcome(run, config).objective is None
    run.write("config.json", config.model_dump(mode="json"))
    run.write("status.json", {"status": "finished", "step": 3})
    run.metrics.write_text("".join(f"{json.dumps(event)}\n" for event in EVALUATIONS))
    assert read_outcome(run, config).status == "finished"
    assert read_outcome(run, config).objective == objective


@pytest.mark.parametrize(
    ("word", "remedy"),
    [("val/top3", "top1"), ("top1", "val/top1"), ("val_ema/top1", "set ema"), ("[]", "at least 1")],
)
def test_unknown_objective_is_refused_with_the_remedy(
    tmp_path: Path, word: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        small_config(tmp_path, f"objective={word}", "ema=null")


@pytest.mark.parametrize("kind", [RunFailedError, RunPreemptedError])
def test_error_of_a_run_keeps_its_message_between_processes(kind: type[Exception]) -> None:
    assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"
