"""The search itself, with runs that are functions: suggestions that can be recomputed after a kill
at any place, batches, duplicates, failures, pruning, and the files of a study.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

from vision.config import ConfigError, parse
from vision.sweeps.configs import SearchConfig
from vision.sweeps.search import SearchOutcome, Trial, search
from vision.sweeps.search_space import Choices, Interval, Point, Space, Steps
from vision.sweeps.search_study import TrialResult

SPACE: Space = {
    "rate": Interval(1e-5, 1e-1, log=True),
    "layers": Interval(1, 12, integer=True),
    "kind": Choices(("vit", "swin")),
    "drop": Steps((0.0, 0.1, 0.2)),
}
PARTS = 4
"""Evaluations of a run."""


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the search may catch it."""


def config(**more: Any) -> SearchConfig:
    values = {
        "n_trials": 12,
        "parallel": 1,
        "seed": 0,
        "sampler": "tpe",
        "startup_trials": 4,
        "direction": None,
        "pruner": "none",
        "percentile": 25.0,
        "halving_factor": 2,
        "prune_after": 2,
        "prune_from": 0.25,
        "retry_failed": False,
    }
    return parse(SearchConfig, {**values, **more})


def quality(point: Point) -> float:
    """Best at rate = 1e-3, eight layers, swin."""
    distance = (math.log10(float(point["rate"])) + 3) ** 2 + (int(point["layers"]) - 8) ** 2 / 30
    return 1 / (1 + distance + (point["kind"] == "vit") + float(point["drop"]))


class Runs:
    """Runs whose results are in files, as those of a training; killed after a number of them."""

    def __init__(
        self,
        root: Path,
        value: Callable[[Point], Any] = quality,
        kill_after: float = math.inf,
    ) -> None:
        self.root, self.value, self.left = root, value, kill_after
        self.started: list[Trial] = []

    def folder(self, trial: Trial) -> Path:
        return self.root / "+".join(f"{k}-{v}" for k, v in trial.point.items())

    def run(self, trials: Sequence[Trial]) -> None:
        self.started += trials
        for trial in trials:
            if self.left == 0:
                raise Killed
            self.left -= 1
            result = self.result(trial)
            if result is not None:
                self.folder(trial).mkdir(parents=True, exist_ok=True)
                self.folder(trial).joinpath("result.json").write_text(json.dumps(result))

    def result(self, trial: Trial) -> dict[str, Any] | None:
        value = self.value(trial.point)
        if value is None:
            return None
        if value == "failed":
            return {"state": "failed"}
        values = value if isinstance(value, tuple) else (value,)
        curve = []
        for step in range(1, PARTS + 1):
            so_far = values[0] * step / PARTS
            curve.append((step, so_far))
            bounds = [bound for part, bound in trial.bounds if part <= step / PARTS]
            if bounds and so_far < bounds[-1] and step < PARTS:
                return {"state": "pruned", "values": [so_far], "curve": curve}
        return {"state": "finished", "values": values, "curve": curve}

    def read(self, trial: Trial) -> TrialResult | None:
        file = self.folder(trial) / "result.json"
        if not file.exists():
            return None
        stored = json.loads(file.read_text())
        curve = tuple((step, value) for step, value in stored.get("curve", ()))
        return TrialResult(stored["state"], tuple(stored.get("values", ())), curve, PARTS)


def study(
    runs: Runs,
    settings: SearchConfig,
    space: Space = SPACE,
    directions: Sequence[Any] = ("maximize",),
    **base: Any,
) -> SearchOutcome:
    return search(settings, space, directions, runs, runs.root, base)


def files(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): file.read_text()
        for file in sorted(folder.rglob("*.json"))
        if file.is_file()
    }


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills are simulated here, so that nothing has to reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.mark.parametrize("pruner", ["none", "median", "halving"])
@pytest.mark.parametrize("parallel", [1, 3])
def test_study_killed_after_any_run_has_the_trials_of_an_uninterrupted_one(
    tmp_path: Path, pruner: str, parallel: int
) -> None:
    settings = config(pruner=pruner, parallel=parallel)
    whole = Runs(tmp_path / "whole")
    expected = study(whole, settings)
    assert len(expected.trials) == 12 and len(expected.best) == 1
    for ended in range(len(whole.started)):
        assert_same_after_kill(tmp_path / str(ended), ended, settings, expected, whole)


@pytest.mark.parametrize(
    "sampler", ["random", "nsgaii", pytest.param("gp", marks=pytest.mark.slow), "grid"]
)
def test_study_of_any_sampler_survives_a_kill(tmp_path: Path, sampler: str) -> None:
    space = {**SPACE, "rate": Choices(("1e-4", "1e-3"))} if sampler == "grid" else SPACE
    space = {**space, "layers": Steps((2, 4, 6))} if sampler == "grid" else space
    settings = config(sampler=sampler, parallel=3, startup_trials=3)
    whole = Runs(tmp_path / "whole")
    expected = study(whole, settings, space)
    assert_same_after_kill(tmp_path / "killed", 7, settings, expected, whole, space)


def assert_same_after_kill(
    folder: Path,
    ended: int,
    settings: SearchConfig,
    expected: SearchOutcome,
    whole: Runs,
    space: Space = SPACE,
) -> None:
    with pytest.raises(Killed):
        study(Runs(folder, kill_after=ended), settings, space)
    resumed = Runs(folder)
    assert study(resumed, settings, space) == expected
    assert len(resumed.started) == len(whole.started) - ended
    assert files(folder) == files(whole.root)


def test_study_killed_again_and_again_has_the_same_trials(tmp_path: Path) -> None:
    settings = config(parallel=3, pruner="median")
    expected = study(Runs(tmp_path / "whole"), settings)
    for _ in range(4):
        with pytest.raises(Killed):
            study(Runs(tmp_path / "killed", kill_after=2), settings)
    assert study(Runs(tmp_path / "killed"), settings) == expected


def test_trials_follow_from_the_seed(tmp_path: Path) -> None:
    points = [
        [trial.point for trial in study(Runs(tmp_path / name), config(seed=seed)).trials]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert points[0] == points[1] != points[2]


def test_trials_of_a_batch_differ_and_depend_on_earlier_batches_only(tmp_path: Path) -> None:
    settings = config(parallel=4, startup_trials=4)

    def changed(point: Point) -> float:
        """The same in the first batch, other results in the second."""
        return quality(point) if point in first else 2 - quality(point)

    expected = study(Runs(tmp_path / "a"), settings)
    first = [trial.point for trial in expected.trials[:4]]
    other = study(Runs(tmp_path / "b", changed), settings)
    same = [a.point == b.point for a, b in zip(expected.trials, other.trials, strict=True)]
    assert same == [True] * 8 + [False] * 4
    assert len({tuple(trial.point.items()) for trial in expected.trials[4:8]}) == 4


def test_tpe_learns_from_results(tmp_path: Path) -> None:
    def last_values(sampler: str) -> float:
        found = study(Runs(tmp_path / sampler), config(sampler=sampler, n_trials=40)).trials[-15:]
        return sum(quality(trial.point) for trial in found)

    assert last_values("tpe") > 1.5 * last_values("random")


def test_larger_number_of_trials_continues_an_ended_study(tmp_path: Path) -> None:
    expected = study(Runs(tmp_path / "whole"), config(n_trials=12, parallel=3))
    study(Runs(tmp_path / "grown"), config(n_trials=7, parallel=3))
    grown = Runs(tmp_path / "grown")
    assert study(grown, config(n_trials=12, parallel=3)) == expected
    assert [trial.number for trial in grown.started] == [7, 8, 9, 10, 11]


def test_equal_points_are_run_once_and_share_their_result(tmp_path: Path) -> None:
    space = {"kind": Choices(("vit", "swin"))}
    runs = Runs(tmp_path, lambda point: float(point["kind"] == "swin"))
    outcome = study(runs, config(sampler="random", n_trials=9, parallel=3), space)
    assert len(runs.started) == 2 and len(outcome.trials) == 9
    for trial in outcome.trials:
        assert trial.result is not None
        assert trial.result.values == (float(trial.point["kind"] == "swin"),)
        if trial.same_as is not None:
            assert outcome.trials[trial.same_as].point == trial.point


def test_grid_has_every_point_once_in_order(tmp_path: Path) -> None:
    space = {"drop": Steps((0.0, 0.1, 0.2)), "layers": Steps((2, 4)), "kind": SPACE["kind"]}
    runs = Runs(tmp_path, lambda point: float(point["drop"]))
    outcome = study(runs, config(sampler="grid", n_trials=100, parallel=5), space)
    points = [tuple(trial.point.values()) for trial in outcome.trials]
    drops, layers, kinds = ("0.0", "0.1", "0.2"), ("2", "4"), ("vit", "swin")
    assert points == [(d, n, kind) for d in drops for n in layers for kind in kinds]
    assert outcome.best == [8]


def test_failed_trials_are_counted_and_the_study_continues(tmp_path: Path) -> None:
    def value(point: Point) -> Any:
        return "failed" if point["kind"] == "vit" else math.nan if int(point["layers"]) > 9 else 0.5

    settings = config(sampler="random")
    expected = study(Runs(tmp_path / "whole", value), settings)
    states = [trial.result.state for trial in expected.trials if trial.result is not None]
    assert states.count("failed") > 0 and len(states) == 12
    best = expected.trials[expected.best[0]]
    assert best.point["kind"] == "swin" and int(best.point["layers"]) <= 9
    again = Runs(tmp_path / "whole", value)
    assert study(again, settings).best == expected.best
    assert again.started == []
    retried = Runs(tmp_path / "whole", quality)
    study(retried, settings.model_copy(update={"retry_failed": True}))
    assert {trial.number for trial in retried.started} == {
        number for number, state in enumerate(states) if state == "failed"
    }


def test_stopped_trials_stop_the_study_and_are_resumed(tmp_path: Path) -> None:
    settings = config(parallel=3)
    expected = study(Runs(tmp_path / "whole"), settings)
    stop_at = expected.trials[4].point
    runs = Runs(tmp_path / "stopped", lambda point: None if point == stop_at else quality(point))
    stopped = study(runs, settings)
    assert [trial.number for trial in stopped.unfinished] == [4]
    assert list(stopped.trials) == list(expected.trials[:3])
    assert len(json.loads((runs.root / "study.json").read_text())["trials"]) == 3
    resumed = Runs(tmp_path / "stopped")
    assert study(resumed, settings) == expected
    assert [trial.number for trial in resumed.started] == [4, *range(6, 12)]


@pytest.mark.parametrize("sampler", ["tpe", "nsgaii"])
def test_several_objectives_have_a_pareto_front(tmp_path: Path, sampler: str) -> None:
    def value(point: Point) -> tuple[float, float]:
        return quality(point), float(point["layers"])

    settings = config(sampler=sampler, n_trials=20, parallel=2)
    expected = study(Runs(tmp_path / "a", value), settings, directions=("maximize", "minimize"))
    values = [trial.result.values for trial in expected.trials if trial.result is not None]
    front = {
        number
        for number, (good, cost) in enumerate(values)
        if not any((g >= good and c <= cost) and (g, c) != (good, cost) for g, c in values)
    }
    assert set(expected.best) == front and len(front) > 1
    runs = Runs(tmp_path / "b", value, kill_after=11)
    with pytest.raises(Killed):
        study(runs, settings, directions=("maximize", "minimize"))
    resumed = study(Runs(tmp_path / "b", value), settings, directions=("maximize", "minimize"))
    assert resumed == expected


def test_pruned_trials_are_not_run_again_and_not_the_best(tmp_path: Path) -> None:
    settings = config(pruner="median", sampler="random")
    runs = Runs(tmp_path)
    outcome = study(runs, settings)
    states = [trial.result.state for trial in outcome.trials if trial.result is not None]
    assert states[:2] == ["finished", "finished"] and "pruned" in states
    assert states[outcome.best[0]] == "finished"
    assert max(map(quality, (trial.point for trial in outcome.trials))) == quality(
        outcome.trials[outcome.best[0]].point
    )
    again = Runs(tmp_path)
    assert study(again, settings) == outcome and again.started == []


def test_study_of_other_settings_is_refused(tmp_path: Path) -> None:
    study(Runs(tmp_path), config(parallel=3), duration="1epochs")
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.parallel: 3 → 2"):
        study(Runs(tmp_path), config(parallel=2), duration="1epochs")
    with pytest.raises(ConfigError, match='duration: "1epochs" → "2epochs"'):
        study(Runs(tmp_path), config(parallel=3), duration="2epochs")
    other = {**SPACE, "rate": Interval(1e-5, 1.0, log=True)}
    with pytest.raises(ConfigError, match=r"params\.rate\.high: 0\.1 → 1\.0"):
        study(Runs(tmp_path), config(parallel=3), other, duration="1epochs")


@pytest.mark.parametrize(
    ("more", "space", "directions", "remedy"),
    [
        ({}, {}, ("maximize",), "interval"),
        ({"sampler": "grid"}, SPACE, ("maximize",), "rate: .*choice"),
        ({"pruner": "median"}, SPACE, ("maximize", "minimize"), "pruner=none"),
    ],
)
def test_impossible_search_is_refused(
    tmp_path: Path, more: dict[str, Any], space: Space, directions: tuple[str, ...], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        study(Runs(tmp_path / "study"), config(**more), space, directions)
    assert not (tmp_path / "study").exists()


def test_halving_without_a_first_rung_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prune_from = 0\.0"):
        config(pruner="halving", prune_from=0.0)


def test_journal_is_read_by_optuna(tmp_path: Path) -> None:
    def value(point: Point) -> Any:
        return "failed" if point["kind"] == "vit" and int(point["layers"]) < 4 else quality(point)

    settings = config(pruner="median", sampler="random", n_trials=20)
    outcome = study(Runs(tmp_path / "study", value), settings)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study" / "journal.log"))
    storage = optuna.storages.JournalStorage(backend)
    loaded = optuna.load_study(study_name="study", storage=storage)
    names = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
    for ours, theirs in zip(outcome.trials, loaded.trials, strict=True):
        assert ours.result is not None
        assert names[theirs.state.name] == ours.result.state
        assert {k: SPACE[k].text(v) for k, v in theirs.params.items()} == ours.point
        assert (theirs.values is None) == (ours.result.state == "failed")
    assert loaded.best_trial.number == outcome.best[0]


def test_summary_names_trials_and_the_best(tmp_path: Path) -> None:
    outcome = study(Runs(tmp_path), config())
    summary = json.loads((tmp_path / "study.json").read_text())
    assert summary["best"] == list(outcome.best)
    for stored, trial in zip(summary["trials"], outcome.trials, strict=True):
        assert (tmp_path / stored["folder"]).is_dir()
        assert stored["point"] == trial.point
        assert stored["values"] == pytest.approx([quality(trial.point)])
