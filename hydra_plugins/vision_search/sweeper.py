"""`hydra/sweeper=search`: trials of a training, chosen by the results of earlier ones.

Hydra composes and launches the trials; see `vision.sweeps.search` for how they are chosen.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from hydra_plugins.vision_search.sweep_grammar import read_space
from vision.config import ConfigError, parse
from vision.sweeps.configs import SearchConfig
from vision.sweeps.outcome import RunFailedError, RunPreemptedError, objective_names
from vision.sweeps.search import SearchOutcome, Trial, check_space, search
from vision.sweeps.search_space import Dimension, Interval, points_to_check
from vision.sweeps.search_study import TrialResult, import_optuna
from vision.sweeps.search_trials import common_settings, find_directions, read_trial
from vision.training.configs import TrainConfig
from vision.training.run.lock import refuse_if_locked
from vision.training.run.run_folder import Run


@dataclass
class SearchSweeperConfig:
    """Settings of `hydra/sweeper=search`; their meaning is in `vision/sweeps/configs.py`."""

    _target_: str = "hydra_plugins.vision_search.sweeper.SearchSweeper"
    _convert_: str = "all"
    params: dict[str, Any] = field(default_factory=dict)
    """Settings with several values, as on the command line: {seed: "range(0,3)"}."""
    n_trials: int = 20
    parallel: int = 1
    seed: int = 0
    sampler: str = "tpe"
    startup_trials: int = 10
    direction: Any = None
    pruner: str = "none"
    percentile: float = 25.0
    halving_factor: int = 3
    prune_after: int = 5
    prune_from: float = 0.1
    retry_failed: bool = False


ConfigStore.instance().store(group="hydra/sweeper", name="search", node=SearchSweeperConfig)


class SearchSweeper(Sweeper):
    """Runs batches of trials through any launcher, and continues a study that was killed."""

    def __init__(self, params: Mapping[str, Any] | None, **settings: Any) -> None:
        self.params = dict(params or {})
        self._given = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Parse the settings and prepare the launcher: ours runs a batch side by side."""
        try:
            self.settings = parse(SearchConfig, self._given)
        except ConfigError as error:  # raised here, because Hydra words those of a constructor
            lines = [f"hydra.sweeper.{line}" for line in str(error).splitlines()]
            raise ConfigError("\n".join(lines)) from error
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config.copy()  # launcher=plan changes the folder of the sweep in its own
        given = any("hydra.launcher.parallel=" in word for word in config.hydra.overrides.hydra)
        if config.hydra.launcher.get("parallel") == 1 and not given:
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.launcher.parallel = self.settings.parallel
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Check the settings, then run the study; returns the objectives of the best trials."""
        from vision.cli.app import COMMANDS
        from vision.cli.application import Job
        from vision.cli.composition import Composer
        from vision.cli.sweep_checks import check_jobs

        assert self.config is not None and self.hydra_context is not None
        import_optuna()
        hydra = self.config.hydra
        assert isinstance(self.task_function, Job)
        command = COMMANDS[self.task_function.command]
        if command.config is not TrainConfig:
            raise ConfigError("hydra/sweeper=search is for train, which has an objective.")
        composer = Composer(hydra.job.config_name, tuple(hydra.overrides.hydra))
        words = [f"{key}={value}" for key, value in self.params.items()]
        overrides, mistakes = composer.read([*words, *arguments])
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        space, fixed = read_space(overrides)
        # An unknown setting is let through to the parser, which knows what may have been meant.
        lenient = {key: key if composer.options(key) else f"++{key.lstrip('+')}" for key in space}
        points = [
            [*fixed.values(), *_typed({lenient[key]: value for key, value in point.items()})]
            for point in points_to_check(space)
        ]
        try:
            checked = check_jobs(command, composer, points)
        except ConfigError as error:
            raise ConfigError("\n".join([str(error), *_integer_advice(space, error)])) from error
        configs = [point.config for point in checked]
        directions = find_directions(self.settings, configs)
        check_space(self.settings, space, directions)
        folder = Path(hydra.sweep.dir)
        planned = hydra.runtime.choices["hydra/launcher"] == "plan"
        trials = LaunchedTrials(self, list(fixed.values()))
        with TemporaryDirectory() as nowhere:
            outcome = search(
                self.settings,
                space,
                directions,
                trials,
                Path(nowhere) if planned else folder,
                common_settings(configs),
            )
        return None if planned else _conclude(outcome, trials, configs[0], folder)


class LaunchedTrials:
    """Trials as jobs of a launcher; their results are in the folders of their runs."""

    def __init__(self, sweeper: SearchSweeper, fixed: Sequence[str]) -> None:
        self._sweeper = sweeper
        self._fixed = list(fixed)
        self._runs: dict[int, tuple[Run, TrainConfig]] = {}
        self.errors: dict[int, str] = {}
        """Messages of the jobs that failed, by the number of the trial."""

    def run(self, trials: Sequence[Trial]) -> None:
        """Launch a batch. Each job gets its folder, which may not depend on how often or in which
        order a launcher was called.
        """
        from vision.cli.composition import quoted

        for trial in trials:
            refuse_if_locked(self._find(trial)[0])
        assert self._sweeper.launcher is not None
        batch = [
            [*self._words(trial), f"hydra.sweep.subdir={quoted(self.folder(trial).name)}"]
            for trial in trials
        ]
        returned: Sequence[JobReturn] = self._sweeper.launcher.launch(batch, trials[0].number)
        for trial, job in zip(trials, returned, strict=True):
            self.errors.pop(trial.number, None)
            if job.status is JobStatus.FAILED:
                self.errors[trial.number] = _message(job)

    def read(self, trial: Trial) -> TrialResult | None:
        """The result of a trial. One that failed before it had a status has none in its folder."""
        run, config = self._find(trial)
        if trial.number in self.errors and not run.status():
            return TrialResult("failed")
        return read_trial(run, config)

    def folder(self, trial: Trial) -> Path:
        """The folder of a trial's run."""
        return self._find(trial)[0].folder

    def status(self, trial: Trial) -> str:
        """The status of a trial's run."""
        return str(self._find(trial)[0].status().get("status", "new"))

    def command(self, trial: Trial) -> str:
        """The command that trains with the settings of a trial, in a folder of its own."""
        words = [word for word in self._fixed if not word.startswith(("name=", "output="))]
        return shlex.join(["python", "train.py", *words, *_typed(trial.point)])

    def _words(self, trial: Trial) -> list[str]:
        bounds = ",".join(f"[{part!r},{bound!r}]" for part, bound in trial.bounds)
        prune = [f"prune={{bounds:[{bounds}]}}"] if bounds else []
        return [*self._fixed, *_typed(trial.point), *prune]

    def _find(self, trial: Trial) -> tuple[Run, TrainConfig]:
        if trial.number not in self._runs:
            from vision.cli.sweep_checks import compose_jobs

            context, config = self._sweeper.hydra_context, self._sweeper.config
            assert context is not None and config is not None
            job = compose_jobs(context, config, [self._words(trial)], trial.number)[0]
            self._runs[trial.number] = Run(job.folder), parse(TrainConfig, job.settings)
        return self._runs[trial.number]


def _typed(point: Mapping[str, str]) -> list[str]:
    """The words of a point."""
    return [f"{key}={value}" for key, value in point.items()]


def _integer_advice(space: Mapping[str, Dimension], error: ConfigError) -> list[str]:
    """How to write the intervals that should have been of integers."""
    return [
        f"{key}: for integers write {key}=int(interval({d.low:g},{d.high:g}))."
        for key, d in space.items()
        if isinstance(d, Interval) and f"{key}: should be a valid integer" in str(error)
    ]


def _message(job: JobReturn) -> str:
    """What a job that failed says; Hydra raises it, after some text for programmers."""
    with redirect_stderr(StringIO()):
        try:
            return str(job.return_value)
        except Exception as error:
            return str(error)


def _conclude(
    outcome: SearchOutcome, trials: LaunchedTrials, config: TrainConfig, folder: Path
) -> Any:
    """Print how the study ended, and the best command; raises what makes the exit code."""
    states = Counter(t.result.state for t in outcome.trials if t.result is not None)
    counts = ", ".join(f"{number} {state}" for state, number in states.items())
    print(f"\nStudy {folder}: {len(outcome.trials)} trials ({counts or 'none has ended'}).")
    for number, text in sorted(trials.errors.items()):
        print(f"  trial {number} failed: {text}")
    for number in outcome.best:
        best = outcome.trials[number]
        assert best.result is not None
        pairs = zip(objective_names(config), best.result.values, strict=True)
        values = ", ".join(f"{name} = {value:.6g}" for name, value in pairs)
        print(f"Best: trial {number}, {values}\n  {trials.command(best)}")
    print(f"Compare with: vision compare {folder} format=html output={folder / 'study.html'}")
    for trial in outcome.unfinished:
        if trials.status(trial) != "preempted" and trial.number in trials.errors:
            raise RunFailedError(
                f"trial {trial.number} ({trials.folder(trial)}) was killed: "
                f"{trials.errors[trial.number]}. The same command resumes it."
            )
    if outcome.unfinished:
        raise RunPreemptedError("the study was stopped; the same command resumes it.")
    if not outcome.best:
        raise RunFailedError(
            "no trial has finished. After the cause is removed, hydra.sweeper.retry_failed=true "
            "tries them again."
        )
    return [outcome.trials[n].result for n in outcome.best]
