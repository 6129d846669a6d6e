"""An early end of a run that does not improve any more (`stop_early`).

Decided by the state that checkpoints store: a run that is killed and resumed ends at the same step.
"""

from vision.training.job import TrainingJob
from vision.training.run.run_folder import LOWER_IS_BETTER, better


def note_improvement(job: TrainingJob, value: float) -> None:
    """Note the value of an evaluation if it is better than the last improvement by more than
    `stop_early.min_delta`.
    """
    state, metric, settings = job.state, job.config.checkpoint.best, job.config.stop_early
    if state.improvement is not None:
        delta = 0.0 if settings is None else settings.min_delta
        last = state.improvement[0]
        wanted = last - delta if metric in LOWER_IS_BETTER else last + delta
        if not better(metric, value, wanted):
            return
    state.improvement = (value, state.step)


def stops_early(job: TrainingJob) -> bool:
    """Whether the evaluation of this step is the last of `stop_early.patience` in a row without an
    improvement.
    """
    state, settings = job.state, job.config.stop_early
    if settings is None or state.improvement is None or state.evaluated < state.step:
        return False
    every = job.schedule.evaluate_every
    return state.evaluated // every - state.improvement[1] // every >= settings.patience


def reason_to_end(job: TrainingJob) -> str:
    """Why a run ended before its last step; empty if it did not."""
    settings = job.config.stop_early
    if settings is None or job.state.step == job.schedule.total:
        return ""
    gain = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
    number = f"{settings.patience} evaluation{'s' if settings.patience > 1 else ''}"
    return f"{job.config.checkpoint.best} did not improve{gain} in {number} (stop_early)"
