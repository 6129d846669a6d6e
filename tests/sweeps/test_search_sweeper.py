"""`hydra/sweeper=search` on the command line: mistakes are refused before the first trial, small
studies of real runs, their resumption, pruning, and exit codes.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import words

from vision.cli.app import main
from vision.cli.composition import compose
from vision.config import parse
from vision.evaluation.configs import LOWER_IS_BETTER
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import PREEMPTED

ROOT = Path(__file__).parents[2]
RATE = "optimizer.learning_rate=tag(log,interval(1e-4,1e-1))"

SHORT = ["duration=2epochs", "evaluate_every=1epochs", "checkpoint.every=1epochs"]


def study_words(folder: Path, *more: str) -> list[str]:
    """A study of small runs in this process."""
    search = ["hydra.sweeper.startup_trials=2", *words(folder / "out", "name=study", *SHORT)]
    return ["-m", "hydra/sweeper=search", "hydra/launcher=basic", *search, *more]


def run_study(folder: Path, *more: str) -> int:
    return main(["train", *study_words(folder, *more)])


def summary(folder: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((folder / "out" / "study" / "study.json").read_text())
    return stored


def status(folder: Path, trial: dict[str, Any]) -> dict[str, Any]:
    run = folder / "out" / "study" / trial["folder"]
    stored: dict[str, Any] = json.loads((run / "status.json").read_text())
    return stored


MISTAKES = {
    "hydra.sweeper.n_trial=3": "Did you mean 'n_trials'",
    "hydra.sweeper.sampler=tpee": r"hydra\.sweeper\.sampler: .*'tpe'",
    "hydra.sweeper.n_trials=0": r"hydra\.sweeper\.n_trials: .*greater",
    "hydra.sweeper.pruner=halving hydra.sweeper.prune_from=0.0": r"prune_from = 0\.0",
    "hydra.sweeper.sampler=grid": r"optimizer\.learning_rate: .*choice",
    "hydra.sweeper.direction=[minimize,minimize]": "2 for 1 objectives",
    "hydra.sweeper.pruner=median objective=val/loss": "objective=auto",
    "hydra.sweeper.pruner=median 'objective=[val/top1,val/loss]'": "pruner=none",
    "batch_size=interval(4,16)": r"batch_size=int\(interval\(4,16\)\)",
    "'model.heads=choice(2,x)'": r"model\.heads: .*integer",
    "'optimizer.learning_rat=interval(1,2)'": r"Did you mean 'optimizer\.learning_rate'",
    "'optimizer.learning_rate=interval(2,1)'": "smaller",
    "'optimizer.learning_rate=interval(-1,1)'": r"optimizer\.learning_rate: .*greater than 0",
    "'optimizer.weight_decay=tag(log,interval(0,1))'": "above 0",
    "'optimizer.weight_decay=tag(lg,interval(0.1,1))'": "Did you mean 'log'",
    "'seed=tag(log,range(1,3))'": "interval",
    "'model=choice(vit_mini,vit_minni)'": "Did you mean 'vit_mini'",
    "'checkpoint.best=choice(top1,loss)'": "objective",
    "optimizer.learning_rate=0.1": "no setting has a range",
}


@pytest.mark.parametrize(
    "given",
    [  # by default every second
        pytest.param(given, marks=[pytest.mark.slow] * (number % 2))
        for number, given in enumerate(MISTAKES)
    ],
)
def test_mistake_is_refused_before_the_first_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    # Every word is tried alone to find the wrong one: the fewer, the sooner it is found.
    few = ["-m", "hydra/sweeper=search", "hydra/launcher=basic", f"output={tmp_path / 'out'}"]
    code = main(["train", *few, "duration=2epochs", RATE, *shlex.split(given)])
    said = capsys.readouterr()
    assert re.search(MISTAKES[given], said.err), said.err
    assert code == 2 and "Traceback" not in said.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("search=scrach", "Did you mean 'scratch'"),
        ("search=scratch hydra.sweeper.n_trial=3", "Did you mean 'n_trials'"),
        ("search=scratch model.dpeth=3 'model.width=interval(1,2)'", r"model\.depth"),
    ],
)
def test_mistake_beside_a_ready_search_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, remedy: str
) -> None:
    more = [f"output={tmp_path / 'out'}", "hydra/launcher=plan"]
    assert main(["train", *more, *shlex.split(given)]) == 2
    said = capsys.readouterr().err
    assert re.search(remedy, said) and "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["finetune", "scratch"])
def test_ready_search_shows_its_first_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    more = ["hydra/launcher=plan", "hydra.sweeper.parallel=3", f"output={tmp_path / 'out'}"]
    assert main(["train", f"search={name}", *more]) == 0
    assert capsys.readouterr().out.count("--- #") == 3
    assert not (tmp_path / "out").exists()


def test_search_without_optuna_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert run_study(tmp_path, RATE) == 2
    assert "pip install 'vit-swin[search]'" in capsys.readouterr().err


def test_sweep_of_wandb_names_settings_and_a_metric_that_exist() -> None:
    """As `wandb agent` calls train.py: with each parameter as name=value."""
    sweep = yaml.safe_load((ROOT / "docs" / "wandb_sweep.yaml").read_text())
    assert "${args_no_hyphens}" in sweep["command"] and (ROOT / sweep["program"]).is_file()
    fixed = [word for word in sweep["command"] if not word.startswith("${")]
    for end in ("min", "max"):
        swept = [f"{key}={values[end]}" for key, values in sweep["parameters"].items()]
        settings, _ = compose("train", [*fixed, *swept, f"objective={sweep['metric']['name']}"])
        parsed = parse(TrainConfig, settings)
    assert parsed.log.project == sweep["project"]
    assert sweep["metric"]["goal"] == "maximize" and parsed.checkpoint.best not in LOWER_IS_BETTER


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that the runs of a study have written."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != "journal.log"
    }


def test_study_is_resumed_and_extended_without_repeating_a_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drop = "model.drop_path=range(0,0.3,0.1)"
    assert run_study(tmp_path, RATE, drop, "hydra.sweeper.n_trials=2") == 0
    said = capsys.readouterr().out
    first = summary(tmp_path)
    assert [trial["state"] for trial in first["trials"]] == ["finished"] * 2
    best = first["trials"][first["best"][0]]
    assert best["values"] == [max(trial["values"][0] for trial in first["trials"])]
    point = " ".join(f"{key}={value}" for key, value in best["point"].items())
    assert re.search(
        rf"Best: trial {best['number']}, val/top1 = .*\n  python train.py .*{point}", said
    )
    before = contents(tmp_path)
    assert run_study(tmp_path, RATE, drop, "hydra.sweeper.n_trials=2") == 0
    assert contents(tmp_path) == before
    assert run_study(tmp_path, RATE, drop, "hydra.sweeper.n_trials=3") == 0
    extended = summary(tmp_path)
    assert extended["trials"][:2] == first["trials"] and len(extended["trials"]) == 3
    after = contents(tmp_path)
    assert all(after[name] == before[name] for name in before if "study.json" not in name)


def test_trial_worse_than_earlier_ones_is_pruned_and_can_be_trained_to_its_end(
    tmp_path: Path,
) -> None:
    # The second trial hardly learns.
    fixed = ["checkpoint.best=loss", "schedule.shape=constant"]
    given = ["optimizer.learning_rate=choice(1e-2,2e-6)", *fixed]
    prune = ["pruner=median", "prune_after=1", "prune_from=0.2", "sampler=grid", "n_trials=2"]
    given += [f"hydra.sweeper.{word}" for word in prune]
    assert run_study(tmp_path, *given) == 0
    good, bad = summary(tmp_path)["trials"]
    assert (good["state"], bad["state"]) == ("finished", "pruned")
    assert summary(tmp_path)["best"] == [0]
    ended = status(tmp_path, bad)
    assert ended["status"] == "pruned" and 0 < ended["step"] < ended["steps"]
    assert bad["values"] == [ended["best"]]
    before = contents(tmp_path)
    assert run_study(tmp_path, *given) == 0
    assert contents(tmp_path) == before
    folder = tmp_path / "out" / "study" / bad["folder"]
    alone = [*words(tmp_path / "out"), *SHORT, f"hydra.run.dir={folder}"]
    assert main(["train", *alone, *fixed, "optimizer.learning_rate=2e-6"]) == 0
    assert status(tmp_path, bad)["status"] == "finished"


def test_failed_trials_do_not_stop_a_study_unless_all_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = ["optimizer.learning_rate=choice(1e30,1e-3)", "hydra.sweeper.sampler=grid"]
    assert run_study(tmp_path / "some", *some, "optimizer.clip=none") == 0
    assert [t["state"] for t in summary(tmp_path / "some")["trials"]] == ["failed", "finished"]
    assert summary(tmp_path / "some")["best"] == [1]
    every = ["optimizer.learning_rate=choice(1e30,1e31,1e32,1e33)", "hydra.sweeper.sampler=grid"]
    assert run_study(tmp_path / "all", *every, "optimizer.clip=none") == 1
    assert len(summary(tmp_path / "all")["trials"]) == 3
    said = capsys.readouterr()
    assert "trial 2 failed: " in said.out and "not a finite number" in said.out
    assert "hydra.sweeper.retry_failed=true" in said.err


def test_preempted_study_exits_75_and_resumes_to_the_same_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vision.training.loop as loop

    given = [RATE, "hydra.sweeper.n_trials=2"]
    assert run_study(tmp_path / "whole", *given) == 0
    update, calls = loop.update, []

    def stopping(*arguments: Any) -> None:
        update(*arguments)
        calls.append(1)
        if len(calls) == 13:  # within the second trial of ten steps
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "update", stopping)
        assert run_study(tmp_path / "stopped", *given) == PREEMPTED
    assert len(summary(tmp_path / "stopped")["trials"]) == 1
    assert run_study(tmp_path / "stopped", *given) == 0
    assert summary(tmp_path / "stopped") == summary(tmp_path / "whole")


def test_search_over_several_objectives_names_the_pareto_front(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["objective=[val/top1,val/loss]", "optimizer.learning_rate=choice(1e-3,1e-2)"]
    assert run_study(tmp_path, *given, "hydra.sweeper.sampler=grid") == 0
    stored = summary(tmp_path)
    assert stored["settings"]["hydra"]["sweeper"]["direction"] == ["maximize", "minimize"]
    values = [trial["values"] for trial in stored["trials"]]
    front = [n for n, (a, b) in enumerate(values) if not any(c >= a and d < b for c, d in values)]
    assert stored["best"] == front
    assert "val/loss = " in capsys.readouterr().out


def start(folder: Path, *given: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    program = "import sys; from vision.cli.app import main; sys.exit(main(sys.argv[1:]))"
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-c", program, "train", *study_words(folder, *given)],
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the study and its runs."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "launcher"), [(1, "basic"), (3, "local")], ids=["one", "three"]
)
def test_study_killed_at_every_tenth_of_its_duration_has_the_same_trials(
    tmp_path: Path, parallel: int, launcher: str
) -> None:
    given = [RATE, "model.drop_path=interval(0,0.3)", f"hydra/launcher={launcher}"]
    given += [f"hydra.sweeper.{w}" for w in ("n_trials=12", f"parallel={parallel}")]
    given += ["hydra.sweeper.pruner=median", "hydra.sweeper.prune_after=3"]
    began = time.monotonic()
    assert start(tmp_path / "whole", *given).wait() == 0
    duration = time.monotonic() - began
    expected = summary(tmp_path / "whole")
    assert len(expected["trials"]) == 12
    for tenth in range(1, 10):
        folder = tmp_path / str(tenth)
        process = start(folder, *given)
        try:
            process.wait(duration * tenth / 10)
        except subprocess.TimeoutExpired:
            kill(process)
        assert start(folder, *given).wait() == 0, (folder / "said").read_text()
        assert summary(folder) == expected


@pytest.mark.slow
def test_study_killed_between_two_suggestions_has_the_same_trials(tmp_path: Path) -> None:
    given = [RATE, "model.drop_path=interval(0,0.3)", "hydra.sweeper.n_trials=12"]
    assert start(tmp_path / "whole", *given).wait() == 0
    process = start(tmp_path / "killed", *given)
    file = tmp_path / "killed" / "out" / "study" / "study.json"
    while not file.exists() or len(json.loads(file.read_text())["trials"]) < 6:
        assert process.poll() is None
        time.sleep(0.001)
    kill(process)
    assert start(tmp_path / "killed", *given).wait() == 0
    assert summary(tmp_path / "killed") == summary(tmp_path / "whole")
