"""Trials of a search as training runs: what they optimise, and their results in their folders."""

from collections.abc import Sequence
from typing import Any

from vision.config import ConfigError
from vision.evaluation.configs import LOWER_IS_BETTER
from vision.sweeps.configs import Direction, SearchConfig
from vision.sweeps.outcome import evaluations, objective_names, read_outcome
from vision.sweeps.search_study import TrialResult, TrialState
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import Run, better
from vision.training.run.run_settings import flat, is_free


def find_directions(search: SearchConfig, configs: Sequence[TrainConfig]) -> list[Direction]:
    """Whether each objective is minimised or maximised; refused if trials have different ones."""
    names = objective_names(configs[0])
    other = next((c for c in configs if objective_names(c) != names), None)
    if other is not None:
        raise ConfigError(
            f"objective: trials cannot be compared, one has {', '.join(names)}, another "
            f"{', '.join(objective_names(other))}; set objective, such as val/top1."
        )
    usual: list[Direction] = [
        "minimize" if name.partition("/")[2] in LOWER_IS_BETTER else "maximize" for name in names
    ]
    given = list(search.direction) if search.direction is not None else usual
    if len(given) != len(names):
        raise ConfigError(
            f"hydra.sweeper.direction: {len(given)} for {len(names)} objectives "
            f"({', '.join(names)}); give one for each, or null."
        )
    pruned_by = f"{'val' if configs[0].ema is None else 'val_ema'}/{configs[0].checkpoint.best}"
    if search.pruner != "none" and (names != (pruned_by,) or given != usual):
        raise ConfigError(
            f"hydra.sweeper.pruner={search.pruner}: runs are pruned by checkpoint.best "
            f"({pruned_by}), but the objective is {', '.join(names)}, {', '.join(given)}. Use "
            "objective=auto hydra.sweeper.direction=null, or pruner=none."
        )
    return given


def common_settings(configs: Sequence[TrainConfig]) -> dict[str, Any]:
    """The settings, by dotted names, that are the same in all trials and change what is learned."""
    first, *others = [flat(config.model_dump(mode="json")) for config in configs]
    return {
        key: value
        for key, value in first.items()
        if not is_free(key) and all(key in o and o[key] == value for o in others)
    }


def read_trial(run: Run, config: TrainConfig) -> TrialResult | None:
    """The result of a trial; None if its run has not ended. Refused if it had other settings."""
    status = run.status()
    if not status:
        return None
    run.decision(config)
    outcome = read_outcome(run, config)
    if outcome.status == "failed":
        interrupted = str(status.get("reason", "")).startswith("KeyboardInterrupt")
        return None if interrupted else TrialResult("failed")
    if outcome.status not in ("finished", "pruned"):
        return None
    if outcome.objective is None:
        return TrialResult("failed")  # a run without an evaluation
    state: TrialState = "finished" if outcome.status == "finished" else "pruned"
    if isinstance(outcome.objective, tuple):
        return TrialResult(state, outcome.objective)
    return TrialResult(state, (outcome.objective,), _curve(run, config), status["steps"])


def _curve(run: Run, config: TrainConfig) -> tuple[tuple[int, float], ...]:
    """The best value of the objective after each evaluation."""
    split, _, metric = objective_names(config)[0].partition("/")
    curve: list[tuple[int, float]] = []
    for event in evaluations(run):
        if event["split"] == split:
            value = event[metric]
            if curve and not better(metric, value, curve[-1][1]):
                value = curve[-1][1]
            curve.append((event["step"], value))
    return tuple(curve)
