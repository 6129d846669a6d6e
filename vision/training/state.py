"""The state of a run, and how it goes into a checkpoint and back.

The file is the same for any number of processes: whole tensors by parameter name.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vision.checkpoints.native.checkpoint import Checkpoint
from vision.checkpoints.native.optimizer import (
    flatten_optimizer,
    parameter_names,
    unflatten_optimizer,
)
from vision.config import ConfigError
from vision.evaluation.configs import LOWER_IS_BETTER
from vision.models.layers import Classifier
from vision.training.configs import StopEarlyConfig, TrainConfig
from vision.training.run.distributed import gathered, sharded_like
from vision.training.run.run_folder import better

SETTINGS = ("weight_decay", "betas", "eps", "momentum", "lr_scale")
"""Settings of an optimiser's groups that the config decides, beside the learning rate."""


@dataclass
class TrainState:
    """Everything that changes during a run."""

    model: Classifier
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: dict[str, Tensor] | None
    """The averaged weights (EMA), if there are any."""
    sums: Tensor
    """The task's sums since the last line of the log, in this process."""
    step: int = 0
    best: float | None = None
    """The best value so far of `checkpoint.best`."""
    best_step: int | None = None
    """The step that had it."""
    improvement: tuple[float, int] | None = None
    """Value and step of the last improvement by `stop_early.min_delta`."""
    evaluated: int = 0
    """The last step whose evaluation is done."""
    wandb_id: str | None = None
    started: float = field(default_factory=time.perf_counter)
    """When the run would have started, had it never been interrupted."""

    @property
    def seconds(self) -> float:
        """Duration of the run so far, without the time that was lost when it was killed."""
        return time.perf_counter() - self.started

    def note_improvement(self, value: float, config: TrainConfig) -> None:
        """Note the value of an evaluation if it is better than the last improvement by more than
        `stop_early.min_delta`.
        """
        metric, settings = config.checkpoint.best, config.stop_early
        if self.improvement is not None:
            delta = 0.0 if settings is None else settings.min_delta
            last = self.improvement[0]
            wanted = last - delta if metric in LOWER_IS_BETTER else last + delta
            if not better(metric, value, wanted):
                return
        self.improvement = (value, self.step)

    def stops_early(self, settings: StopEarlyConfig | None, evaluate_every: int) -> bool:
        """Whether the evaluation of this step is the last of `stop_early.patience` in a row without
        an improvement.

        Decided by what checkpoints store: a run that is killed and resumed ends at the same step.
        """
        if settings is None or self.improvement is None or self.evaluated < self.step:
            return False
        waited = self.evaluated // evaluate_every - self.improvement[1] // evaluate_every
        return waited >= settings.patience

    def reason_to_end(self, config: TrainConfig, steps: int) -> str:
        """Why a run ended before the last of its steps; empty if it did not."""
        settings = config.stop_early
        if settings is None or self.step == steps:
            return ""
        gain = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
        number = f"{settings.patience} evaluation{'s' if settings.patience > 1 else ''}"
        return f"{config.checkpoint.best} did not improve{gain} in {number} (stop_early)"


def gather(state: TrainState, sums: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The whole state as named tensors and a plain record. All processes must call it together.

    `sums` are those of all processes.
    """
    optimizer, optimizer_record = flatten_optimizer(
        state.optimizer.state_dict(), parameter_names(state.optimizer, state.model)
    )
    tensors = {f"model.{name}": t for name, t in state.model.state_dict().items()}
    tensors |= {f"ema.{name}": t for name, t in (state.average or {}).items()}
    tensors |= {f"optimizer.{name}": t for name, t in optimizer.items()}
    tensors["sums"] = sums
    record = {
        "step": state.step,
        "best": state.best,
        "best_step": state.best_step,
        "improvement": None if state.improvement is None else list(state.improvement),
        "evaluated": state.evaluated,
        "optimizer": optimizer_record,
        "scaler": state.scaler.state_dict(),
        "wandb": state.wandb_id,
        "seconds": state.seconds,
    }
    return {name: gathered(tensor) for name, tensor in tensors.items()}, record


def restore(
    state: TrainState, checkpoint: Checkpoint, best_step: int | None, optimizer: str, main: bool
) -> None:
    """Put a stored state back into a freshly built one. All processes must call it together.

    `optimizer` is the name of the optimiser that the state was built with.
    """
    record, tensors = checkpoint.record, checkpoint.tensors
    before = record["config"]["optimizer"]["name"]
    if before == "muon" and "matrices" not in record["optimizer"]["param_groups"][0]:
        before = "timm's muon (in an earlier version of this project)"
    _copy_all(state.model.state_dict(), _part(tensors, "model."), "the model")
    if state.average is not None:
        _copy_all(state.average, _part(tensors, "ema."), "the averaged weights")
    if before != optimizer:
        raise ConfigError(
            f"optimizer.name: the run was started with {before}, whose state cannot be used by "
            f"{optimizer}. Choose another name for a run with {optimizer}."
        )
    _restore_optimizer(state, checkpoint)
    state.scaler.load_state_dict(record["scaler"])
    # Sums are added up over processes again, so only one of them may keep them.
    state.sums.copy_(tensors["sums"] if main else torch.zeros_like(tensors["sums"]))
    state.step, state.best, state.best_step = record["step"], record["best"], best_step
    # Earlier versions stored the best value alone.
    value, step = record.get("improvement") or (state.best, state.best_step)
    state.improvement = None if value is None or step is None else (value, step)
    state.evaluated, state.wandb_id = record["evaluated"], record["wandb"]
    state.started -= record.get("seconds", 0.0)


def _restore_optimizer(state: TrainState, checkpoint: Checkpoint) -> None:
    """Take the optimiser's state from the file, and its settings from the present config."""
    names = parameter_names(state.optimizer, state.model)
    tensors = _part(checkpoint.tensors, "optimizer.")
    try:
        stored = unflatten_optimizer(tensors, checkpoint.record["optimizer"], names)
    except ValueError as error:
        raise ConfigError(f"the checkpoint does not fit the optimiser: {error}") from error
    groups = state.optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    for number, slots in stored["state"].items():
        for slot, value in slots.items():
            if isinstance(value, Tensor) and value.shape == parameters[number].shape:
                slots[slot] = sharded_like(value, parameters[number])
    # Not the whole groups: some optimisers keep counters in them.
    settings = [{k: g[k] for k in SETTINGS if k in g} for g in groups]
    state.optimizer.load_state_dict(stored)
    for group, values in zip(state.optimizer.param_groups, settings, strict=True):
        group.update(values)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def _copy_all(own: Mapping[str, Tensor], stored: Mapping[str, Tensor], what: str) -> None:
    if own.keys() != stored.keys():
        missing, unknown = sorted(own.keys() - stored.keys()), sorted(stored.keys() - own.keys())
        raise ConfigError(
            f"the checkpoint does not fit {what}: missing {missing[:5]}, unexpected {unknown[:5]}."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != stored[name].shape:
                raise ConfigError(
                    f"the checkpoint does not fit {what}: {name} is {tuple(stored[name].shape)} "
                    f"there and {tuple(tensor.shape)} here."
                )
            tensor.copy_(sharded_like(stored[name], tensor))


def start_average(model: nn.Module) -> dict[str, Tensor]:
    """The average before the first step: a copy of the weights."""
    return {name: tensor.clone() for name, tensor in _averaged_tensors(model).items()}


def decay_at(step: int, decay: float) -> float:
    """min(decay, (1 + step) / (10 + step)), for the update number `step`, counted from 0.

    With a constant decay of 0.9999 the random weights of the start would keep more than a third of
    the average for ten thousand steps, and a short run would evaluate little else. With this rise,
    TensorFlow's, the average looks back over about the last ninth of the run until the configured
    decay is reached. It is a function of the step alone, so there is no state to save.
    """
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(average: Mapping[str, Tensor], model: nn.Module, decay: float) -> None:
    """average ← decay · average + (1 − decay) · weights, in place."""
    current = _averaged_tensors(model)
    torch._foreach_lerp_(list(average.values()), [current[name] for name in average], 1 - decay)


@contextmanager
def averaged(model: nn.Module, average: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the model has the averaged weights; afterwards its own, to the bit.

    Values are copied, tensors are not exchanged: optimisers, compiled graphs and sharded parameters
    keep references to them.
    """
    current = _averaged_tensors(model)
    own = {name: tensor.clone() for name, tensor in current.items()}
    try:
        _copy_average(average, current)
        yield
    finally:
        _copy_average(own, current)


def _averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point parameters and stored buffers themselves, not copies."""
    return {name: t for name, t in model.state_dict().items() if t.is_floating_point()}


@torch.no_grad()
def _copy_average(values: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(values[name])
