"""Everything that a training loop works with, built once from a config.

The model that a run begins with is that of its own checkpoint, else opened from `init`, else drawn
from the seed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from vision.checkpoints.files.remote import resolve
from vision.checkpoints.native.header import read_record
from vision.checkpoints.native.run_record import run_record
from vision.checkpoints.open import OpenedModel, open_model
from vision.config import ConfigError, pair
from vision.data.configs import SPLITS, DataConfig, FolderConfig
from vision.data.given import GivenImages
from vision.data.order import BatchOrder
from vision.data.preprocess import NAMES, Known, Preprocess, resolve_preprocess, usual_values
from vision.data.sources.build_source import build_source, image_size
from vision.data.sources.source import Source
from vision.data.sources.table import read_table, with_saved_split, write_table
from vision.models.build import build_model
from vision.models.configs import AutoModelConfig, ModelConfig
from vision.models.layers import Classifier, Grid
from vision.training.configs import TrainConfig
from vision.training.elastic import VirtualRanks
from vision.training.optim import build_optimizer
from vision.training.run.distributed import World, compile_steps, parallelize
from vision.training.run.memory import largest_in_trial
from vision.training.run.run_folder import Run, writing
from vision.training.run.step_memory import StepMemory, checked_memory
from vision.training.run.stop import StopRequest
from vision.training.run.story import size_line
from vision.training.schedule import Schedule, build_schedule
from vision.training.state import TrainState, start_average
from vision.training.step import empty_sums
from vision.training.tasks.configs import TuneAllConfig
from vision.training.tasks.task import (
    Task,
    TrainingData,
    fill_parts,
    seen_by_task,
    select_task,
    with_parts,
)
from vision.training.tune import freeze
from vision.training.whitening import fit_whitening


@dataclass(frozen=True)
class StartingModel:
    """A model before its first step; that of a resumed run has yet to get its weights."""

    model: Classifier
    config: ModelConfig
    preprocess: Preprocess
    memory: StepMemory
    known: Known = ()
    """The preprocessing that the weights were trained with."""
    report: Mapping[str, Any] | None = None
    """The report on loading the weights of `init`."""
    report_lines: tuple[str, ...] = ()
    """The report as text; empty where the run is resumed."""


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

    @property
    def stops_early(self) -> bool:
        """Whether the run ends with this step, as `stop_early` says."""
        return self.state.stops_early(self.config.stop_early, self.schedule.evaluate_every)

    def set_status(
        self, status: Literal["running", "finished", "pruned", "preempted", "failed"], **more: Any
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


def build_job(
    config: TrainConfig,
    run: Run,
    world: World,
    stop: StopRequest,
    init: str | None,
    given: GivenImages | None = None,
) -> TrainingJob:
    """Data, model, task, schedule and optimiser of a run.

    Weights come from `init` or are drawn from the seed; those of a run that is resumed are still to
    be restored. `given` are the images of data=python.
    """
    _set_up_torch(config, world)
    sources = _data_config(config, run, world)
    train, val = (seen_by_task(config, build_source(sources, split, given)) for split in SPLITS[:2])
    start = _starting_model(config, run, world, init, train)
    data = TrainingData(train, val, start.preprocess)
    model = _on_device(config, start.model, world)
    if config.attention_every is not None:
        from vision.training.run.drawn_attention import check_attention

        check_attention(model, data.preprocess)
    task = select_task(config, data, model, run, world, stop)
    order = BatchOrder(
        seed=config.seed,
        batch_size=config.batch_size,
        sampling=config.data.sampling,
        repeats=config.augment.repeats,
        tail=config.loader.tail,
        rank=world.rank,
        ranks=world.size,
        accumulation=accumulation(task, start.memory),
        virtual=config.elastic is not None,
    )
    schedule = build_schedule(config, len(train))
    if config.elastic is None:
        module = parallelize(task.module, task.parallel, world)
    else:
        module = VirtualRanks(task.module, world, task.shares)
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
        optimizer=build_optimizer(
            task.model, config.optimizer, schedule.peak, bfloat16=config.precision == "bf16"
        ),
        scaler=torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16"),
        average=start_average(task.model) if config.ema is not None else None,
        sums=empty_sums(task),
    )
    return TrainingJob(
        config, run, world, data, start, task, module, schedule, order, record, state
    )


def accumulation(task: Task[Any], memory: StepMemory) -> int:
    """The number of equal parts in which a device works through its share of a batch.

    With `auto`, a run that is resumed has the micro-batch that it was started with, whatever memory
    is free: with another one it would learn the same, but not to the bit. With `elastic`, the parts
    are the virtual ranks.
    """
    config, world = task.config, task.world
    if config.elastic is not None:
        return task.shares
    if config.batch_size % world.size:
        raise ConfigError(
            f"batch_size = {config.batch_size} cannot be shared equally by {world.size} processes; "
            f"choose a multiple of {world.size}."
        )
    share = config.batch_size // world.size
    limit = config.max_batch_per_device
    if limit == "auto":
        limit = task.run.status().get("micro_batch")
        if limit is None:
            sizes = memory.sizes_that_fit(share) or [1]
            limit = sizes[0] if memory.is_sure(sizes[0]) else largest_in_trial(task, memory, sizes)
    largest = limit or share
    fitting = (n for n in range(1, share + 1) if share % n == 0 and share // n <= largest)
    return world.max(next(fitting))[0]


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
        table = read_table(config.data)
        with writing(split):
            write_table(table, split)
            run.write("ignored.json", table.ignored)
    world.wait()
    return with_saved_split(config.data, split)


def _starting_model(
    config: TrainConfig, run: Run, world: World, init: str | None, train: Source
) -> StartingModel:
    """The model of a run's own checkpoint, of `init`, or drawn from the seed, in this order.

    All processes must call this together: one of them downloads.
    """
    record = run.read_newest(lambda path: run_record(read_record(path), path))
    chosen = config.model
    if isinstance(chosen, AutoModelConfig) and record is None and init in (None, "pretrained"):
        raise ConfigError(
            "model=auto takes the model from the weights of init; set init=PATH, init=timm:NAME "
            "or init=hf:OWNER/NAME, or choose a model."
        )
    if record is None and init is not None:
        opened = _opened(config, world, init, train)
        preprocess = _preprocess(config, train, opened.trained_size, opened.known)
        model = with_parts(config, opened.model, preprocess)
        opened = replace(opened, report=fill_parts(model, opened))
        return StartingModel(
            model,
            opened.config,
            preprocess,
            checked_memory(config, opened.config, preprocess, train, world),
            opened.known,
            opened.report.as_dict(),
            (*opened.report.lines(), *size_line(opened, config.data.image_size == "auto")),
        )
    known: Known = ()
    if record is not None:
        known = [
            (record.preprocess.origin.get(n, "the checkpoint"), {n: getattr(record.preprocess, n)})
            for n in NAMES
        ]
        chosen = record.model if isinstance(chosen, AutoModelConfig) else chosen
    assert not isinstance(chosen, AutoModelConfig)
    trained_size = None if record is None else record.preprocess.image_size
    preprocess = _preprocess(config, train, trained_size, known)
    memory = checked_memory(config, chosen, preprocess, train, world)
    model = build_model(
        chosen,
        preprocess.image_size,
        channels=train.channels,
        classes=len(train.classes),
        seed=config.seed,
    )
    if record is None and getattr(chosen, "stem", None) == "conv_whitened":
        fit_whitening(model, config, train, preprocess, world)
    model = with_parts(config, model, preprocess)
    report = None if record is None else record.load_report
    return StartingModel(model, chosen, preprocess, memory, known, report)


def _preprocess(
    config: TrainConfig, train: Source, trained_size: Grid | None, known: Known
) -> Preprocess:
    """The preprocessing of a run; `trained_size` and `known` are those of the weights."""
    size, origin = image_size(config.data, trained_size)
    known = [*known, *usual_values(config.data)]
    preprocess = resolve_preprocess(config.preprocess, size, train.channels, known)
    return replace(preprocess, origin={"image_size": origin, **preprocess.origin})


def _opened(config: TrainConfig, world: World, init: str, train: Source) -> OpenedModel:
    place = init
    if init == "pretrained":
        assert not isinstance(config.model, AutoModelConfig)
        if config.model.pretrained is None:
            raise ConfigError(
                "init=pretrained: no published weights are known for this model; set init=PATH, "
                "init=timm:NAME or init=hf:OWNER/NAME."
            )
        place = config.model.pretrained
    if world.main:
        resolve(place, "init")
    world.wait()
    return open_model(
        place,
        model=config.model,
        weights=config.init_weights,
        rename=config.init_rename,
        image_size=None if config.data.image_size == "auto" else pair(config.data.image_size),
        channels=train.channels,
        classes=len(train.classes),
        class_names=train.classes,
        resize_positions=config.init_positions,
        resize_windows=config.init_windows,
        seed=config.seed,
        setting="init",
    )


def _on_device(config: TrainConfig, model: Classifier, world: World) -> Classifier:
    """The model on its device, with the parameters frozen that `tune` does not train."""
    model.train()
    if not isinstance(config.tune, TuneAllConfig):
        freeze(model, config.tune, config.seed)
    model = model.to(world.device)
    if config.channels_last and not (config.parallel == "fsdp" and world.size > 1):
        model = model.to(memory_format=torch.channels_last)  # FSDP takes contiguous weights alone
    return model
