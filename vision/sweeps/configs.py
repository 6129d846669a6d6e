"""Settings of a search (`hydra/sweeper=search`) and `vision compare`. Free of torch and Hydra."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from vision.config import (
    Amount,
    Config,
    OutputFile,
    Place,
    PositiveInt,
    Probability,
    Seed,
    several,
)

Direction = Literal["minimize", "maximize"]


class SearchConfig(Config):
    """A search: trials that are chosen by the results of earlier ones."""

    n_trials: Amount
    """Number of trials. A larger one continues a study that has ended."""
    parallel: Amount
    """Trials of a batch, which run at the same time. The next batch is chosen when all have ended.
    """
    seed: Seed
    sampler: Literal["tpe", "random", "grid", "nsgaii", "gp"]
    """Optuna's sampler that chooses the points; grid: every point once, in order."""
    startup_trials: Amount
    """Trials at random points before the sampler learns from results; the population of nsgaii."""
    direction: Annotated[tuple[Direction, ...] | None, BeforeValidator(several)]
    """minimize or maximize, one for each objective; null: as the metrics require."""
    pruner: Literal["none", "median", "percentile", "halving"]
    """Rule that stops bad trials early, by the results of earlier batches alone. A trial is stopped
    if its best value so far is worse than the median or a percentile of the finished trials at the
    same part of training; halving: than those of the best 1 / `halving_factor` of all trials."""
    percentile: Annotated[float, Field(gt=0, lt=100)]
    """Of pruner=percentile: 25 stops what is worse than the best quarter."""
    halving_factor: Annotated[int, Field(ge=2, le=10**6)]
    prune_after: PositiveInt
    """Finished trials before the first trial is pruned."""
    prune_from: Probability
    """Part of training before which no trial is pruned; the first rung of halving."""
    retry_failed: bool
    """Whether trials that failed earlier are resumed, instead of counted as failed. The trials
    after them may change."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pruner == "halving" and not 0 < self.prune_from < 1:
            raise ValueError(
                f"prune_from = {self.prune_from}: pruner=halving needs its first rung between 0 "
                "and 1, such as 0.1."
            )
        return self


class CompareConfig(Config):
    """Settings of `vision compare`: runs that differ only in their seed share a row."""

    runs: Annotated[tuple[Place, ...], BeforeValidator(several)]
    """Folders of runs, folders that contain runs, or patterns with *; also without `runs=`."""
    metric: str
    """Metric of the evaluations: loss, top1, top5, balanced_accuracy, macro_f1; of several labels
    per image: loss, map, micro_f1, macro_f1, sample_f1."""
    split: Literal["auto", "val", "val_ema"]
    """Evaluations of the raw weights or of their average; auto: the average if there is one."""
    select: Literal["best", "last"]
    """Evaluation of best.safetensors, or the last one."""
    format: Literal["table", "csv", "latex", "json", "html"]
    """html: a page with history, importance of each setting and parallel coordinates."""
    output: OutputFile | None
    """File to write to instead of printing."""
