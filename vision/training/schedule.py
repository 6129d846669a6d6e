"""A run counted in steps, and the learning rate of every step as a pure function.

Settings are in steps, epochs or samples; they are converted to steps here, once. No scheduler has a
state to save.
"""

import math
from dataclasses import dataclass

from vision.config import ConfigError
from vision.data.order import BatchOrder, epoch_length
from vision.training.configs import ScheduleConfig, TrainConfig, parse_length


@dataclass(frozen=True)
class Schedule:
    """The lengths of a run in steps, and its learning rate."""

    steps_per_epoch: int
    warmup: int
    """Steps in which the learning rate rises."""
    decay: int
    """Steps of the run's duration, warm-up included, after which the learning rate has decayed."""
    total: int
    """All steps: the duration and the cool-down after it."""
    evaluate_every: int
    attention_every: int | None
    checkpoint_every: int
    log_every: int
    peak: float
    """The highest learning rate, scaled to the batch."""
    settings: ScheduleConfig

    def due(self, done: int, every: int | None) -> bool:
        """Whether an event with this interval is due after `done` steps: at multiples of the
        interval, and at the end of the run. None: never.
        """
        return every is not None and done > 0 and (done % every == 0 or done == self.total)


def build_schedule(config: TrainConfig, samples_per_epoch: int) -> Schedule:
    """The schedule of a run on a training set of this size.

    Lengths are rounded to the nearest step (a half upwards), but not to 0. The number of steps of
    an epoch depends on `loader.tail`.
    """
    batches = BatchOrder(config.seed, config.batch_size, tail=config.loader.tail)
    steps_per_epoch = epoch_length(samples_per_epoch, batches) // config.batch_size

    def steps(name: str, text: str, zero: bool = False) -> int:
        amount, unit = parse_length(text)
        if not math.isfinite(amount):
            raise ConfigError(f"{name} = {text}: expected a finite length, such as 20epochs.")
        if amount == 0 and not zero:
            raise ConfigError(f"{name} = {text}: expected more than 0, such as 1epoch or 100steps.")
        exact = {
            "step": amount,
            "epoch": amount * steps_per_epoch,
            "sample": amount / config.batch_size,
        }
        return max(1, math.floor(exact[unit] + 0.5)) if amount else 0

    drawn, optimizer = config.attention_every, config.optimizer
    peak, settings = optimizer.learning_rate, config.schedule
    if optimizer.reference_batch is not None:
        peak = peak * config.batch_size / optimizer.reference_batch
    if settings.scale_ends:
        if optimizer.reference_batch is None:
            raise ConfigError(
                "schedule.scale_ends = true scales with batch_size / optimizer.reference_batch, "
                "which is null; set it, or schedule.scale_ends=false."
            )
        scale = config.batch_size / optimizer.reference_batch
        ends = {"warmup_from": settings.warmup_from * scale, "end_at": settings.end_at * scale}
        settings = settings.model_copy(update=ends)
    decay = steps("duration", config.duration)
    schedule = Schedule(
        steps_per_epoch=steps_per_epoch,
        warmup=steps("schedule.warmup", config.schedule.warmup, zero=True),
        decay=decay,
        total=decay + steps("schedule.cooldown", config.schedule.cooldown, zero=True),
        evaluate_every=steps("evaluate_every", config.evaluate_every),
        attention_every=None if drawn is None else steps("attention_every", drawn),
        checkpoint_every=steps("checkpoint.every", config.checkpoint.every),
        log_every=min(steps("log.every", config.log.every), steps_per_epoch),
        peak=peak,
        settings=settings,
    )
    _check(schedule, config)
    return schedule


def lr_at(step: int, schedule: Schedule) -> float:
    """The learning rate of the update number `step`, counted from 0.

    A straight line from `warmup_from` in step 0 to the peak in step `warmup`; from there down to
    `end_at` in step `decay`, where the cool-down begins.
    """
    settings, peak = schedule.settings, schedule.peak
    if step < schedule.warmup:
        return settings.warmup_from + (peak - settings.warmup_from) * step / schedule.warmup
    if settings.shape == "constant":
        return peak
    if step >= schedule.decay:
        return settings.end_at
    progress = (step - schedule.warmup) / (schedule.decay - schedule.warmup)
    match settings.shape:
        case "cosine":
            height = (1 + math.cos(math.pi * progress)) / 2
        case "linear":
            height = 1 - progress
        case "polynomial":
            height = (1 - progress) ** settings.power
    return settings.end_at + (peak - settings.end_at) * height


def _check(schedule: Schedule, config: TrainConfig) -> None:
    settings, optimizer, peak = schedule.settings, config.optimizer, schedule.peak
    attention, evaluate = schedule.attention_every, schedule.evaluate_every
    if attention is not None and attention % evaluate:
        raise ConfigError(
            f"attention_every = {config.attention_every} ({attention} steps) is not a multiple of "
            f"evaluate_every = {config.evaluate_every} ({evaluate} steps): attention is drawn at "
            "evaluations."
        )
    if schedule.warmup > schedule.decay:
        raise ConfigError(
            f"schedule.warmup = {settings.warmup} ({schedule.warmup} steps) is longer than "
            f"duration = {config.duration} ({schedule.decay} steps); shorten the warm-up or "
            "train longer."
        )
    origin = f"the peak learning rate {peak:g}"
    if optimizer.reference_batch is not None:
        origin += (
            f" (optimizer.learning_rate = {optimizer.learning_rate:g} × batch_size / "
            f"reference_batch = {config.batch_size} / {optimizer.reference_batch})"
        )
    if schedule.warmup and settings.warmup_from > peak:
        raise ConfigError(
            f"schedule.warmup_from = {settings.warmup_from:g} is above {origin}: the learning rate "
            "would fall in the warm-up; choose a smaller warmup_from."
        )
    if settings.shape != "constant" and settings.end_at > peak:
        raise ConfigError(
            f"schedule.end_at = {settings.end_at:g} is above {origin}: the learning rate would "
            "rise instead of decaying; choose a smaller end_at, or schedule.shape=constant."
        )
