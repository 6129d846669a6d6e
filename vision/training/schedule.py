"""A run counted in steps, and the learning rate of every step as a pure function.

Settings speak of steps, epochs or samples; they become steps here, once. Nothing else in a run
converts lengths, and no scheduler has a state to save.
"""

import math
from dataclasses import dataclass
from typing import Literal

from vision.config import ConfigError
from vision.data.order import BatchOrder, epoch_length
from vision.training.configs import TrainConfig, parse_length


@dataclass(frozen=True)
class Schedule:
    """What follows from a run's settings and the size of its training set."""

    batch_size: int
    """Images per step, over all processes."""
    steps_per_epoch: int
    warmup: int
    """Steps in which the learning rate rises."""
    decay: int
    """Steps of the run's duration, warm-up included: here the learning rate has come down."""
    total: int
    """All steps: the duration and the cool-down after it."""
    evaluate_every: int
    attention_every: int | None
    checkpoint_every: int
    log_every: int
    peak: float
    """The highest learning rate, scaled to the batch."""
    shape: Literal["cosine", "linear", "polynomial", "constant"]
    power: float
    warmup_from: float
    end_at: float

    def logs_after(self, done: int) -> bool:
        """Whether a line is due once so many steps are done; at the end everything is."""
        return self._due(done, self.log_every)

    def evaluates_after(self, done: int) -> bool:
        """Whether an evaluation is due once so many steps are done."""
        return self._due(done, self.evaluate_every)

    def draws_after(self, done: int) -> bool:
        """Whether images of the attention are due once so many steps are done."""
        return self.attention_every is not None and self._due(done, self.attention_every)

    def saves_after(self, done: int) -> bool:
        """Whether a checkpoint is due once so many steps are done."""
        return self._due(done, self.checkpoint_every)

    def _due(self, done: int, every: int) -> bool:
        return done > 0 and (done % every == 0 or done == self.total)


def build_schedule(config: TrainConfig, samples_per_epoch: int) -> Schedule:
    """The plan of a run on a training set of so many images.

    Lengths are rounded to the nearest step (a half upwards); what is longer than 0 takes at least
    one step. An epoch has as many steps as the data loader makes of it, see `loader.tail`.
    """
    batches = BatchOrder(config.seed, config.batch_size, tail=config.loader.tail)
    steps_per_epoch = epoch_length(samples_per_epoch, batches) // config.batch_size

    def steps(name: str, text: str, at_least: int) -> int:
        return _steps(name, text, steps_per_epoch, config.batch_size, at_least)

    schedule, drawn = config.schedule, config.attention_every
    decay = steps("duration", config.duration, 1)
    plan = Schedule(
        batch_size=config.batch_size,
        steps_per_epoch=steps_per_epoch,
        warmup=steps("schedule.warmup", schedule.warmup, 0),
        decay=decay,
        total=decay + steps("schedule.cooldown", schedule.cooldown, 0),
        evaluate_every=steps("evaluate_every", config.evaluate_every, 1),
        attention_every=None if drawn is None else steps("attention_every", drawn, 1),
        checkpoint_every=steps("checkpoint.every", config.checkpoint.every, 1),
        log_every=steps("log.every", config.log.every, 1),
        peak=peak_learning_rate(config),
        shape=schedule.shape,
        power=schedule.power,
        warmup_from=schedule.warmup_from,
        end_at=schedule.end_at,
    )
    _check(plan, config)
    return plan


def peak_learning_rate(config: TrainConfig) -> float:
    """The configured learning rate, in proportion to the batch where `reference_batch` says so."""
    optimizer = config.optimizer
    if optimizer.reference_batch is None:
        return optimizer.learning_rate
    return optimizer.learning_rate * config.batch_size / optimizer.reference_batch


def lr_at(step: int, plan: Schedule) -> float:
    """The learning rate of the update number `step`, counted from 0.

    A straight line from `warmup_from` in step 0 to the peak in step `warmup`; from there down to
    `end_at` in step `decay`, where the cool-down begins.
    """
    if step < plan.warmup:
        return plan.warmup_from + (plan.peak - plan.warmup_from) * step / plan.warmup
    if plan.shape == "constant":
        return plan.peak
    if step >= plan.decay:
        return plan.end_at
    progress = (step - plan.warmup) / (plan.decay - plan.warmup)
    match plan.shape:
        case "cosine":
            height = (1 + math.cos(math.pi * progress)) / 2
        case "linear":
            height = 1 - progress
        case "polynomial":
            height = (1 - progress) ** plan.power
    return plan.end_at + (plan.peak - plan.end_at) * height


def _steps(name: str, text: str, steps_per_epoch: int, batch_size: int, at_least: int) -> int:
    """A length in steps. `at_least` 1: it must not be 0."""
    amount, unit = parse_length(text)
    if not math.isfinite(amount) or amount < 0:
        raise ConfigError(f"{name} = {text}: expected a finite length, such as 20epochs.")
    if amount == 0:
        if at_least:
            raise ConfigError(f"{name} = {text}: expected more than 0, such as 1epoch or 100steps.")
        return 0
    match unit:
        case "step":
            exact = amount
        case "epoch":
            exact = amount * steps_per_epoch
        case "sample":
            exact = amount / batch_size
    return max(1, math.floor(exact + 0.5))


def _check(plan: Schedule, config: TrainConfig) -> None:
    schedule = config.schedule
    if plan.attention_every is not None and plan.attention_every % plan.evaluate_every:
        raise ConfigError(
            f"attention_every = {config.attention_every} ({plan.attention_every} steps) is no "
            f"multiple of evaluate_every = {config.evaluate_every} ({plan.evaluate_every} steps); "
            "images are drawn at evaluations."
        )
    if plan.warmup > plan.decay:
        raise ConfigError(
            f"schedule.warmup = {schedule.warmup} ({plan.warmup} steps) is longer than "
            f"duration = {config.duration} ({plan.decay} steps); shorten the warm-up or "
            "train longer."
        )
    origin = f"the peak learning rate {plan.peak:g}"
    if config.optimizer.reference_batch is not None:
        origin += (
            f" (optimizer.learning_rate = {config.optimizer.learning_rate:g} × batch_size / "
            f"reference_batch = {config.batch_size} / {config.optimizer.reference_batch})"
        )
    if plan.warmup and plan.warmup_from > plan.peak:
        raise ConfigError(
            f"schedule.warmup_from = {plan.warmup_from:g} is above {origin}, so that the rate "
            "would fall in the warm-up; choose a smaller warmup_from."
        )
    if plan.shape != "constant" and plan.end_at > plan.peak:
        raise ConfigError(
            f"schedule.end_at = {plan.end_at:g} is above {origin}, so that the rate would rise "
            "instead of decaying; choose a smaller end_at, or schedule.shape=constant."
        )
