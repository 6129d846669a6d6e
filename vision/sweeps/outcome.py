"""The outcome of a training run: what its job returns to Hydra's sweepers, or raises.

| run       | job                       | exit code of a single run        |
|-----------|---------------------------|----------------------------------|
| finished  | returns its objective     | 0                                |
| pruned    | returns its objective     | 0                                |
| preempted | raises RunPreemptedError  | 75; the same command resumes     |
| failed    | raises the error itself,  | 2 for a mistake in the settings, |
|           | in a sweep RunFailedError | 1 for anything else              |

A run that was finished before returns the stored objective without training. A job never raises
SystemExit: it would end a sweep of Hydra's basic launcher and lose the result of a submitit job.
"""

from dataclasses import dataclass
from typing import Literal

from vision.config import UserError
from vision.sweeps.results import evaluations, read_result
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import Run

Objective = float | tuple[float, ...]
"""The value of one metric, or those of several."""


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
        weights: Literal["val", "val_ema"] = "val_ema" if split == "val_ema" else "val"
        values.append(read_result(run, events, metric, weights, "best").value if events else None)
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return RunOutcome(status, None)
    return RunOutcome(status, known[0] if isinstance(config.objective, str) else tuple(known))


def objective_names(config: TrainConfig) -> tuple[str, ...]:
    """The metrics that a search optimises, such as `val/top1`."""
    if config.objective == "auto":
        return (f"{'val' if config.ema is None else 'val_ema'}/{config.checkpoint.best}",)
    return (config.objective,) if isinstance(config.objective, str) else config.objective
