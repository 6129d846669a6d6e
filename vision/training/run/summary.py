"""What is said of a run before its first step: its parts, and what is likely to be a mistake."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from vision.data.preprocess import NAMES
from vision.data.sources.folder import ignored_line
from vision.data.sources.subsets import imbalance
from vision.training.configs import TrainConfig
from vision.training.tasks.configs import MultiLabelConfig

if TYPE_CHECKING:
    from vision.training.job import TrainingJob


def summary(job: "TrainingJob") -> dict[str, str]:
    config, world, schedule = job.config, job.world, job.schedule
    trained, parameters = job.record["trained_parameters"], job.record["parameters"]
    part = "" if trained == parameters else f", {trained:,} of them trained ({config.tune.kind})"
    train, val = job.data.train, job.data.val
    height, width = job.data.preprocess.image_size
    classes = f"{len(train.classes)} classes" if train.classes else "without labels"
    scaling = ""
    if config.optimizer.reference_batch is not None:
        scaling = (
            f" ({config.optimizer.learning_rate:g} × {config.batch_size} / "
            f"{config.optimizer.reference_batch})"
        )
    rest = ""
    if (rate := config.optimizer.rest_learning_rate) is not None:
        rest = f", {schedule.peak * rate / config.optimizer.learning_rate:g} for the rest"
    return {
        "model": f"{job.start.config.kind}, {parameters:,} parameters{part}",
        "data": f"{config.data.kind}, {len(train):,} + {len(val):,} images of "
        f"{height} × {width}, {classes}",
        "preprocess": str(job.data.preprocess),
        "batch": f"{config.batch_size} = {job.micro_batch} per device × {world.size} device"
        f"{'s' if world.size > 1 else ''} × {job.order.accumulation} "
        f"{'virtual ranks' if job.order.virtual else 'accumulated'}",
        "learning rate": f"{schedule.peak:g}{scaling}, {config.optimizer.name}{rest}",
        "length": f"{schedule.total:,} steps of {schedule.steps_per_epoch:,} per epoch",
        "precision": f"{config.precision} on {world.device.type}",
        "memory": job.start.memory.line(job.micro_batch),
        "run": f"{job.run.folder}" + (f", from step {job.state.step}" if job.state.step else ""),
    }


def warnings(job: "TrainingJob") -> Iterator[str]:
    """What is likely to be a mistake in the settings or the data."""
    if job.config.precision == "fp16" and job.world.device.type == "cpu":
        yield "precision=fp16 on a CPU is slow and less exact than bf16 or fp32."
    if tight := job.start.memory.warning(job.micro_batch):
        yield tight
    yield from left_out(job)
    chosen = _against_imbalance(job.config)
    if unequal := imbalance(job.data.train.labels, job.data.train.classes, chosen):
        yield unequal
    for name in NAMES:
        trained = next((values[name] for _, values in job.start.known if name in values), None)
        given, used = getattr(job.config.preprocess, name), getattr(job.data.preprocess, name)
        if given != "auto" and trained is not None and not _same(used, trained):
            yield (
                f"preprocess.{name} = {_listed(given)}, but the weights were trained with "
                f"{_listed(trained)}; preprocess.{name}=auto takes theirs."
            )


def _against_imbalance(config: TrainConfig) -> list[str]:
    """The settings of a run that treat classes of different sizes differently."""
    loss, weights, task = config.loss, config.loss.class_weights, config.task
    positive = task.pos_weight if isinstance(task, MultiLabelConfig) else "none"
    return [
        *(["data.sampling=balanced"] if config.data.sampling == "balanced" else []),
        *([f"loss.class_weights={_listed(weights)}"] if weights != "none" else []),
        *([f"loss.logit_adjustment={loss.logit_adjustment:g}"] if loss.logit_adjustment else []),
        *(["loss.kind=focal"] if loss.kind == "focal" else []),
        *([f"task.pos_weight={_listed(positive)}"] if positive != "none" else []),
    ]


def left_out(job: "TrainingJob") -> Iterator[str]:
    """Files of the data that are not images, and images that could not be read."""
    if ignored := ignored_line(job.run.read("ignored.json")):
        yield ignored
    if skipped := job.run.unreadable():
        images = f"{skipped:,} image{'' if skipped == 1 else 's'}"
        yield f"{images} could not be read and left out; see {job.run.folder}/skipped-*.jsonl."


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple):
        return len(first) == len(second) and np.allclose(first, second, rtol=0, atol=1e-4)
    return bool(first == second)


def _listed(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(f'{number:g}' for number in value)}]"
    return str(value)
