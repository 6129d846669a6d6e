"""A study that can be replayed. Optuna's only door.

The study lives in memory. Trial n depends on the seed, n and the results of earlier batches: the
sampler is made anew for each batch, from the seed and the number of the batch. Whoever asks again
and reports the same results gets the same points, so nothing but the runs has to be stored.
"""

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from vision.config import ConfigError
from vision.files import replacing, write_all
from vision.sweeps.configs import Direction, SearchConfig
from vision.sweeps.search_space import Choices, Dimension, Interval, Space, grid_point

if TYPE_CHECKING:
    import optuna

FEWEST = 5
"""Results that importances are estimated from, as Optuna's manual advises."""
TrialState = Literal["finished", "pruned", "failed"]


@dataclass(frozen=True)
class TrialResult:
    """The end of a trial."""

    state: TrialState
    values: tuple[float, ...] = ()
    """The objectives, so far for a pruned trial; empty for one that failed."""
    curve: tuple[tuple[int, float], ...] = ()
    """Best value of a single objective after each evaluation, by step."""
    steps: int = 0
    """Length of the whole run."""

    @property
    def usable(self) -> bool:
        """Whether there are values to learn from; a NaN, say, is a failure."""
        return (
            self.state != "failed"
            and bool(self.values)
            and all(math.isfinite(value) for value in self.values)
        )


def import_optuna() -> Any:
    """Optuna without its messages; refused with the remedy where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            "hydra/sweeper=search needs Optuna: pip install 'vit-swin[search]'."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


class SearchStudy:
    """Points batch by batch: `ask` for them, then report their results, from the first batch on."""

    def __init__(self, config: SearchConfig, space: Space, directions: Sequence[Direction]) -> None:
        self._optuna = import_optuna()
        self._config = config
        self._space = space
        self._distributions = {key: _distribution(d) for key, d in space.items()}
        self._directions = list(directions)
        self._study: optuna.Study = self._optuna.create_study(directions=self._directions)
        self._asked: list[optuna.Trial] = []
        self._batch = 0
        self._told: list[tuple[dict[str, Any], TrialResult]] = []
        self._journal: _Journal | None = None

    def ask(self, count: int) -> list[dict[str, str]]:
        """The points of the next batch."""
        seed = _batch_seed(self._config.seed, self._batch)
        self._study.sampler = self._sampler(seed)
        self._batch += 1
        self._asked = []
        for _ in range(count):
            if self._config.sampler == "grid":
                self._study.enqueue_trial(self._grid_params(len(self._study.trials)))
            self._asked.append(self._study.ask(self._distributions))
        return [
            {key: d.text(trial.params[key]) for key, d in self._space.items()}
            for trial in self._asked
        ]

    def tell(self, results: Sequence[TrialResult]) -> None:
        """Report the results of the batch, in the order of its points."""
        state = self._optuna.trial.TrialState
        for trial, result in zip(self._asked, results, strict=True):
            self._told.append((trial.params, result))
            if not result.usable:
                self._study.tell(trial, state=state.FAIL)
            elif result.state == "pruned":
                for step, value in result.curve:
                    trial.report(value, step)
                self._study.tell(trial, state=state.PRUNED)
            else:
                self._study.tell(trial, list(result.values))
        self._asked = []

    def best(self) -> list[int]:
        """Numbers of the best trials: one, or the Pareto front of several objectives."""
        if len(self._directions) > 1:
            return sorted(trial.number for trial in self._study.best_trials)
        finished = [
            (n, result.values[0])
            for n, (_, result) in enumerate(self._told)
            if result.usable and result.state == "finished"
        ]
        sign = 1 if self._directions[0] == "minimize" else -1
        return [min(finished, key=lambda pair: (sign * pair[1], pair[0]))[0]] if finished else []

    def write_journal(self, file: Path) -> None:
        """Export the study for Optuna's dashboard; nothing here reads it again."""
        if self._journal is None:
            self._journal = _Journal(self._optuna, file.parent.name, self._directions)
        for params, result in self._told[len(self._journal.study.trials) :]:
            self._journal.add(params, self._distributions, result)
        with replacing(file) as written:
            write_all(written, self._journal.content())

    def _grid_params(self, number: int) -> dict[str, Any]:
        """The nth point of the grid. (Optuna's own sampler draws them in a random order.)"""
        point = grid_point(self._space, number)
        choices = {key for key, dimension in self._space.items() if isinstance(dimension, Choices)}
        return {key: text if key in choices else float(text) for key, text in point.items()}

    def _sampler(self, seed: int) -> "optuna.samplers.BaseSampler":
        samplers = self._optuna.samplers
        startup = self._config.startup_trials
        match self._config.sampler:
            case "random" | "grid":
                return samplers.RandomSampler(seed=seed)
            case "nsgaii":
                return samplers.NSGAIISampler(seed=seed, population_size=max(startup, 2))
            case "gp":
                return samplers.GPSampler(seed=seed, n_startup_trials=startup)
            case _:
                return samplers.TPESampler(seed=seed, n_startup_trials=startup)


class _Journal:
    """A journal of Optuna in a temporary folder. It grows line by line, so that a copy of it takes
    the place of the exported file.
    """

    def __init__(self, optuna: Any, name: str, directions: Sequence[Direction]) -> None:
        self._optuna = optuna
        self._folder = TemporaryDirectory()
        self._file = Path(self._folder.name) / "journal.log"
        backend = optuna.storages.journal.JournalFileBackend(str(self._file))
        storage = optuna.storages.JournalStorage(backend)
        self.study = optuna.create_study(
            storage=storage, study_name=name or "study", directions=list(directions)
        )

    def add(
        self, params: dict[str, Any], distributions: dict[str, Any], result: TrialResult
    ) -> None:
        """Append a trial that has ended."""
        states = self._optuna.trial.TrialState
        ended = states.PRUNED if result.state == "pruned" else states.COMPLETE
        self.study.add_trial(
            self._optuna.create_trial(
                state=ended if result.usable else states.FAIL,
                values=list(result.values) if result.usable else None,
                params=params,
                distributions=distributions,
                intermediate_values=dict(result.curve),
            )
        )

    def content(self) -> bytes:
        """The bytes of the journal."""
        return self._file.read_bytes()


def importances(
    trials: Sequence[tuple[Mapping[str, Any], float]], space: Space, direction: Direction
) -> dict[str, float]:
    """The part of each setting in what makes good results good, the largest first; empty where
    there are too few results.

    PED-ANOVA (Watanabe et al., IJCAI 2023) compares the settings of the best tenth, and at least of
    the best five, with those of all.
    """
    if len(trials) <= FEWEST or len({value for _, value in trials}) < 2:
        return {}
    optuna = import_optuna()
    distributions = {key: _distribution(dimension) for key, dimension in space.items()}
    study = optuna.create_study(direction=direction)
    for params, value in trials:
        study.add_trial(
            optuna.create_trial(value=value, params=dict(params), distributions=distributions)
        )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(
        target_quantile=max(0.1, FEWEST / len(trials))
    )
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _distribution(dimension: Dimension) -> "optuna.distributions.BaseDistribution":
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if isinstance(dimension, Choices):
        return CategoricalDistribution(dimension.values)
    if isinstance(dimension, Interval):
        if dimension.integer:
            return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    low, high = dimension.values[0], dimension.values[-1]
    if all(isinstance(value, int) for value in dimension.values):
        return IntDistribution(int(low), int(high), step=int(dimension.step))
    return FloatDistribution(low, high, step=dimension.step)


def _batch_seed(seed: int, batch: int) -> int:
    """The seed of a batch's sampler."""
    digest = hashlib.blake2b(repr((seed, "search", batch)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
