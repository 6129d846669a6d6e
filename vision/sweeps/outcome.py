"""The outcome of a training run: what its job returns to Hydra or raises, and its result.

| run       | job                       | exit code of a single run        |
|-----------|---------------------------|----------------------------------|
| finished  | returns its objective     | 0                                |
| pruned    | returns its objective     | 0                                |
| preempted | raises RunPreemptedError  | 75; the same command resumes     |
| failed    | raises the error itself,  | 2 for a mistake in the settings, |
|           | in a sweep RunFailedError | 1 for anything else              |

A run that was finished before returns the stored objective without training. A job never raises
SystemExit: it would end a sweep of Hydra's basic launcher and lose the result of a submitit job.

Results are read from the folders of runs without torch: config.json, status.json, metrics.jsonl
and, where a run was killed, the header of its newest checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vision.config import ConfigError, UserError
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import Run, better
from vision.training.run.run_settings import flat, is_free

Objective = float | tuple[float, ...]
"""The value of one metric, or those of several."""
Split = Literal["auto", "val", "val_ema"]
Select = Literal["best", "last"]


class RunPreemptedError(UserError):
    """A run was asked to stop, and saved; the same command resumes it."""


class RunFailedError(UserError):
    """A run of a sweep failed. Unlike some errors it can be pickled: only its message is kept."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended, or stands, and its objective so far."""

    status: Literal["new", "running", "finished", "pruned", "preempted", "failed"]
    objective: Objective | None
    """None before the first evaluation."""


def read_outcome(run: Run, config: TrainConfig) -> RunOutcome:
    """The outcome of the run with a config, from its folder."""
    status = run.status().get("status", "new")
    events = evaluations(run)
    values = []
    for name in objective_names(config):
        split, _, metric = name.partition("/")
        # The same value as in `vision compare`: that of best.safetensors.
        numbers = numbers_of(events, config.checkpoint.best, config.ema is not None, split)
        values.append(numbers.get(metric))
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return RunOutcome(status, None)
    return RunOutcome(status, known[0] if isinstance(config.objective, str) else tuple(known))


def objective_names(config: TrainConfig) -> tuple[str, ...]:
    """The metrics that a search optimises, such as `val/top1`."""
    if config.objective == "auto":
        return (f"{'val' if config.ema is None else 'val_ema'}/{config.checkpoint.best}",)
    return (config.objective,) if isinstance(config.objective, str) else config.objective


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    folder: Path
    seed: int
    settings: Mapping[str, Any]
    """Settings that change what is learned, without the seed, by dotted names."""
    status: str
    """finished, preempted, failed or running; a run that was killed stays at running."""
    step: int
    steps: int | None
    """Length of the run; None, as below, if an older version wrote it."""
    value: float | None
    """Value of the metric; None before the first evaluation."""
    seconds: float | None
    parameters: int | None
    numbers: Mapping[str, float]
    """All numbers of that evaluation; empty before the first one."""

    @property
    def finished(self) -> bool:
        """Whether the run has done all its steps."""
        return self.status == "finished"


def find_runs(places: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The folders of runs at some places: runs, folders that contain runs, or patterns. Also
    returns the folders without any run.
    """
    if not places:
        raise ConfigError("runs: name at least one, such as: vision compare outputs/*")
    found: dict[Path, Path] = {}
    without = []
    for place in places:
        matches = _matches(Path(place))
        if not matches:
            raise ConfigError(f"runs: '{place}' does not exist; give a folder or a pattern.")
        for match in matches:
            below = _runs_below(match)
            for run in below:  # a run counts once, even if a link such as `latest` points to it
                if run.resolve() not in found or not run.is_symlink():
                    found[run.resolve()] = run
            if not below:
                without.append(match)
    if not found:
        raise ConfigError(f"runs: no run in {', '.join(map(str, without))}.")
    return list(found.values()), without


def _matches(path: Path) -> list[Path]:
    if path.exists():
        return [path]
    root = Path(path.anchor)
    return sorted(root.glob(str(path.relative_to(root))))


def _runs_below(path: Path) -> list[Path]:
    if (path / "config.json").is_file() and (path / "status.json").is_file():
        return [path]
    found = path.rglob("status.json") if path.is_dir() else ()
    return sorted(file.parent for file in found if file.with_name("config.json").is_file())


def evaluations(run: Run) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl with numbers on validation images."""
    return [event for event in run.events() if event["split"] != "train"]


def read_result(
    run: Run, events: Sequence[Mapping[str, Any]], metric: str, split: Split, select: Select
) -> Result:
    """The result of a run in a metric, given its evaluations."""
    settings = flat(run.stored_settings())
    status = dict(run.status()) or {"status": "running", "step": 0}
    if status["status"] == "running":  # written at its start; a checkpoint is newer
        record = run.newest_record()
        status |= {k: record[k] for k in ("step", "seconds", "parameters") if k in record}
    averaged = settings.get("ema") is not None
    numbers = numbers_of(events, settings["checkpoint.best"], averaged, split, select)
    return Result(
        folder=run.folder,
        seed=settings.get("seed", 0),
        settings={k: v for k, v in settings.items() if k != "seed" and not is_free(k)},
        status=status["status"],
        step=status["step"],
        steps=status.get("steps"),
        value=numbers.get(metric),
        seconds=status.get("seconds"),
        parameters=status.get("parameters"),
        numbers=numbers,
    )


def numbers_of(
    events: Sequence[Mapping[str, Any]],
    metric: str,
    averaged: bool,
    split: str = "auto",
    select: Select = "best",
) -> Mapping[str, Any]:
    """The numbers of the evaluation of best.safetensors, which `checkpoint.best` decides on the
    averaged weights if there are any, or of the last one; empty if there is none.
    """
    decided = "val_ema" if averaged else "val"
    step, best = None, None
    for event in events if select == "best" else ():
        if event["split"] == decided and (best is None or better(metric, event[metric], best)):
            step, best = event["step"], event[metric]
    weights = decided if split == "auto" else split
    found = [e for e in events if e["split"] == weights and step in (None, e["step"])]
    return found[-1] if found else {}
