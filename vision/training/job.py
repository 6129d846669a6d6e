"""Everything that a training loop works with, built once from a config."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from vision.config import ConfigError
from vision.data.configs import DataConfig, FolderConfig
from vision.data.order import BatchOrder
from vision.data.preprocess import resolve_preprocess, usual_values
from vision.data.sources.build_source import build_source
from vision.data.sources.subsets import imbalance
from vision.data.sources.table import read_table, with_saved_split, write_table
from vision.models.layers import Classifier
from vision.training.configs import TrainConfig, TuneAllConfig
from vision.training.optim import build_optimizer
from vision.training.run.distributed import World, compile_steps, parallelize
from vision.training.run.memory import largest_that_fits
from vision.training.run.run_folder import Run, writing
from vision.training.schedule import Schedule, build_schedule
from vision.training.start import StartingModel, preprocess_warnings, starting_model
from vision.training.state import TrainState, start_average
from vision.training.step import empty_sums
from vision.training.tasks.task import Task, TrainingData, select_task
from vision.training.tune import freeze


@dataclass(frozen=True)
class TrainingJob:
    """A run that is ready to train. Whatever changes from here on is in `state`."""

    config: TrainConfig
    run: Run
    world: World
    data: TrainingData
    start: StartingModel
    task: Task[Any]
    module: nn.Module
    """What a training step calls: the task's module, or its wrapper for several processes."""
    schedule: Schedule
    order: BatchOrder
    """How the samples of an epoch are shared out."""
    record: Mapping[str, Any]
    """What every checkpoint says of the run."""
    state: TrainState

    @property
    def micro_batch(self) -> int:
        """Samples in one forward pass on one device."""
        return self.order.batch_size // self.order.ranks // self.order.accumulation

    def set_status(
        self, status: Literal["running", "finished", "preempted", "failed"], **more: Any
    ) -> None:
        """Record the progress of the run in its folder."""
        if self.world.main:
            values = {
                "status": status,
                "step": self.state.step,
                "steps": self.schedule.total,
                "seconds": self.state.seconds,
                "parameters": self.record["parameters"],
                "micro_batch": self.micro_batch,
            }
            self.run.write("status.json", values | more)

    def warnings(self) -> list[str]:
        """What is likely to be a mistake in the settings or the data."""
        found = []
        if self.config.precision == "fp16" and self.world.device.type == "cpu":
            found.append("precision=fp16 on a CPU is slow and less exact than bf16 or fp32.")
        if unequal := imbalance(self.data.train.labels, self.data.train.classes):
            found.append(unequal)
        known = self.start.known
        return found + preprocess_warnings(self.config.preprocess, self.data.preprocess, known)


def build_job(config: TrainConfig, run: Run, world: World, init: str | None) -> TrainingJob:
    """Data, model, task, schedule and optimiser of a run.

    Weights come from `init` or are drawn from the seed; those of a run that is resumed are still to
    be restored.
    """
    _set_up_torch(config, world)
    sources = _data_config(config, run, world)
    train, val = build_source(sources, "train"), build_source(sources, "val")
    start = starting_model(config, run, world, init, train)
    known = [*start.known, *usual_values(config.data)]
    preprocess = resolve_preprocess(config.preprocess, start.image_size, train.channels, known)
    origin = {"image_size": start.size_origin, **preprocess.origin}
    data = TrainingData(train, val, replace(preprocess, origin=origin))
    model = _on_device(config, start.model, world)
    if config.attention_every is not None:
        from vision.training.run.drawn_attention import check_attention

        check_attention(model, data.preprocess)
    task = select_task(config, data, model, run, world)
    order = BatchOrder(
        seed=config.seed,
        batch_size=config.batch_size,
        sampling=config.data.sampling,
        repeats=config.augment.repeats,
        tail=config.loader.tail,
        rank=world.rank,
        ranks=world.size,
        accumulation=_accumulation(task),
    )
    schedule = build_schedule(config, len(train))
    module = parallelize(task.module, task.parallel, world)
    if config.compile:
        compile_steps(module)
    record = {
        "config": config.model_dump(mode="json"),
        "model": start.config.model_dump(mode="json"),
        "load_report": start.report,
        "parameters": sum(p.numel() for p in task.model.parameters()),
        "trained_parameters": sum(p.numel() for p in task.model.parameters() if p.requires_grad),
        **task.record(),
    }
    state = TrainState(
        model=task.model,
        optimizer=build_optimizer(task.model, config.optimizer, schedule.peak),
        scaler=torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16"),
        average=start_average(task.model) if config.ema is not None else None,
        sums=empty_sums(task),
    )
    return TrainingJob(
        config, run, world, data, start, task, module, schedule, order, record, state
    )


def _set_up_torch(config: TrainConfig, world: World) -> None:
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32
    if config.deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic and world.device.type == "cuda"


def _data_config(config: TrainConfig, run: Run, world: World) -> DataConfig:
    """The data of the run; a folder's split is stored at its start and read back ever after."""
    if not isinstance(config.data, FolderConfig):
        return config.data
    split = run.folder / "split.csv"
    if world.main and not split.exists():
        with writing(split):
            write_table(read_table(config.data), split)
    world.wait()
    return with_saved_split(config.data, split)


def _on_device(config: TrainConfig, model: Classifier, world: World) -> Classifier:
    """The model on its device, with the parameters frozen that `tune` does not train."""
    model.train()
    if not isinstance(config.tune, TuneAllConfig):
        freeze(model, config.tune, config.seed)
    model = model.to(world.device)
    if config.channels_last and not (config.parallel == "fsdp" and world.size > 1):
        model = model.to(memory_format=torch.channels_last)  # FSDP takes contiguous weights alone
    return model


def _accumulation(task: Task[Any]) -> int:
    """The number of equal parts in which a device works through its share of a batch.

    With `auto`, the micro-batch of an earlier start is the upper limit: with another one a resumed
    run would learn the same, but not to the bit.
    """
    config, world = task.config, task.world
    if config.batch_size % world.size:
        raise ConfigError(
            f"batch_size = {config.batch_size} cannot be shared equally by {world.size} processes; "
            f"choose a multiple of {world.size}."
        )
    share = config.batch_size // world.size
    limit = config.max_batch_per_device
    if limit == "auto":
        limit = largest_that_fits(share, task.run.status().get("micro_batch", share), task)
    largest = limit or share
    fitting = (n for n in range(1, share + 1) if share % n == 0 and share // n <= largest)
    return world.max(next(fitting))[0]
