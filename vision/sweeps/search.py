"""A search: batches of trials, each chosen by the results of the batches before.

outputs/<study>/<setting-value__…>/ is an ordinary run. These runs are the only truth: a study that
was killed asks for its points again, reads the results of the runs that have ended, and continues
with the trials that it would have had.

    study.json     settings, trials and the best of them, written after each batch
    journal.log    the same for Optuna's dashboard
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from vision.config import ConfigError
from vision.files import write_text
from vision.sweeps.configs import Direction, SearchConfig
from vision.sweeps.search_pruning import Bounds, Curve, pruning_bounds
from vision.sweeps.search_space import Interval, Point, Space, as_dict, grid_size
from vision.sweeps.search_study import SearchStudy, TrialResult
from vision.training.run.run_folder import read_json
from vision.training.run.run_settings import changes

SUMMARY = "study.json"
JOURNAL = "journal.log"
GIVE_UP = 3
"""First trials that fail before the study is given up."""
REWRITTEN = f"Remove {SUMMARY}: the search writes it again from its journal."
UNFIXED = ("n_trials", "retry_failed")
"""Settings of a search that may differ when it is resumed."""


@dataclass(frozen=True)
class Trial:
    """A point that is or was tried."""

    number: int
    point: Point
    bounds: Bounds
    """Bounds of pruning, from the batches before."""
    result: TrialResult | None = None
    """None before the trial has ended."""
    same_as: int | None = None
    """The earlier trial at the same point, which is not run again."""


class Runner(Protocol):
    """Runs of trials, each in a folder that follows from its point."""

    def run(self, trials: Sequence[Trial]) -> None:
        """Start or resume the runs of a batch, and wait for them."""

    def read(self, trial: Trial) -> TrialResult | None:
        """The result in the folder of a trial; None if its run has not ended."""

    def folder(self, trial: Trial) -> Path:
        """The folder of a trial's run."""


@dataclass(frozen=True)
class SearchOutcome:
    """A study as far as it went."""

    trials: Sequence[Trial]
    """Those of all complete batches."""
    best: Sequence[int]
    """Numbers of the best trials; several only with several objectives."""
    unfinished: Sequence[Trial] = ()
    """Trials of the last batch that were stopped; the same command resumes them."""


def search(
    config: SearchConfig,
    space: Space,
    directions: Sequence[Direction],
    runner: Runner,
    study_folder: Path,
    base: Mapping[str, Any],
) -> SearchOutcome:
    """Run the trials of a study that have not been run.

    `base` are the settings that all trials have in common.
    """
    check_space(config, space, directions)
    settings = _settings(config, space, directions, base)
    _check_unchanged(study_folder, settings)
    study = SearchStudy(config, space, directions)
    trials: list[Trial] = []
    known: dict[tuple[tuple[str, str], ...], Trial] = {}
    total = min(config.n_trials, grid_size(space)) if config.sampler == "grid" else config.n_trials
    unfinished: list[Trial] = []
    while len(trials) < total and not unfinished and not _all_failed(trials):
        points = study.ask(min(config.parallel, total - len(trials)))
        bounds = _bounds(config, trials, directions)
        batch = []
        for number, point in enumerate(points, len(trials)):
            trial = Trial(number, point, bounds)
            first = known.setdefault(tuple(point.items()), trial)
            batch.append(replace(trial, same_as=None if first is trial else first.number))
        new = [trial for trial in batch if trial.same_as is None]
        results = {trial.number: runner.read(trial) for trial in new}
        todo = [trial for trial in new if _is_due(results[trial.number], config)]
        if todo:
            if not (study_folder / SUMMARY).exists():  # the first trial: settings are fixed now
                _write_summary(study_folder, settings, SearchOutcome((), ()), runner)
            runner.run(todo)
            results |= {trial.number: runner.read(trial) for trial in todo}
        unfinished = [trial for trial in new if results[trial.number] is None]
        if not unfinished:
            results |= {trial.number: trial.result for trial in trials}
            for trial in batch:
                source = trial.number if trial.same_as is None else trial.same_as
                trials.append(replace(trial, result=results[source]))
            study.tell([t.result for t in trials[-len(batch) :] if t.result is not None])
        if todo or len(trials) >= total:
            _write_summary(study_folder, settings, SearchOutcome(trials, study.best()), runner)
            study.write_journal(study_folder / JOURNAL)
    return SearchOutcome(trials, study.best(), unfinished)


def check_space(config: SearchConfig, space: Space, directions: Sequence[Direction]) -> None:
    """Refuse what no sampler or pruner can work with."""
    if not space:
        raise ConfigError(
            "hydra/sweeper=search: no setting has a range of values; write for example "
            "'optimizer.learning_rate=tag(log,interval(1e-5,1e-2))'."
        )
    intervals = [key for key, dimension in space.items() if isinstance(dimension, Interval)]
    if config.sampler == "grid" and intervals:
        raise ConfigError(
            f"{intervals[0]}: sampler=grid needs values that can be counted: choice(a,b) or "
            "range(0,10,2) instead of interval(…)."
        )
    if len(directions) > 1 and config.pruner != "none":
        raise ConfigError(
            f"hydra.sweeper.pruner={config.pruner}: with {len(directions)} objectives no trial is "
            "better than another in all; use pruner=none."
        )


def _all_failed(trials: Sequence[Trial]) -> bool:
    """Whether the first trials have all failed, as they do after a mistake in what they share."""
    results = [trial.result for trial in trials if trial.result is not None]
    return len(results) >= GIVE_UP and not any(result.usable for result in results)


def _is_due(result: TrialResult | None, config: SearchConfig) -> bool:
    """Whether a trial is to be run, given the result of an earlier call."""
    return result is None or (result.state == "failed" and config.retry_failed)


def _bounds(
    config: SearchConfig, trials: Sequence[Trial], directions: Sequence[Direction]
) -> Bounds:
    finished: list[Curve] = []
    pruned: list[Curve] = []
    for trial in trials:
        if trial.result is not None and trial.result.usable and trial.same_as is None:
            curve = [(step / trial.result.steps, value) for step, value in trial.result.curve]
            (finished if trial.result.state == "finished" else pruned).append(curve)
    return pruning_bounds(config, finished, pruned, directions[0])


def _settings(
    config: SearchConfig,
    space: Space,
    directions: Sequence[Direction],
    base: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that decides the trials of a study, by the names of the settings."""
    fixed = {k: v for k, v in config.model_dump(mode="json").items() if k not in UNFIXED}
    params = {key: as_dict(dimension) for key, dimension in space.items()}
    sweeper = {**fixed, "direction": list(directions), "params": params}
    settings: dict[str, Any] = json.loads(json.dumps({**base, "hydra": {"sweeper": sweeper}}))
    return settings


def _check_unchanged(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to continue a study whose trials would be others."""
    stored = read_json(folder / SUMMARY, REWRITTEN)
    if stored and (lines := changes(stored["settings"], settings)):
        raise ConfigError(
            f"the study {folder} was started with other settings:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nChoose another name for the new study."
        )


def _write_summary(
    folder: Path, settings: Mapping[str, Any], outcome: SearchOutcome, runner: Runner
) -> None:
    trials = [
        {
            "number": trial.number,
            "point": dict(trial.point),
            "state": trial.result.state,
            "values": [v if math.isfinite(v) else None for v in trial.result.values],
            "folder": runner.folder(trial).name,
            "same_as": trial.same_as,
        }
        for trial in outcome.trials
        if trial.result is not None
    ]
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"settings": settings, "best": list(outcome.best), "trials": trials}
    write_text(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
