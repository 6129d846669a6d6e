"""Everything that a training loop works with, built from a config."""

import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from vision.config import ConfigError
from vision.data.batches import build_loader
from vision.data.configs import DataConfig, FolderConfig
from vision.data.loader import Loader
from vision.data.order import BatchOrder
from vision.data.preprocess import Preprocess, normalizer, resolve_preprocess, usual_values
from vision.data.sources.build import build_source
from vision.data.sources.source import Source
from vision.data.sources.subsets import imbalance
from vision.data.sources.table import read_table, with_saved_split, write_table
from vision.models.layers import Classifier
from vision.training.configs import TrainConfig
from vision.training.ema import start_average
from vision.training.optim import build_optimizer
from vision.training.run.distributed import World, compile_steps, spread
from vision.training.run.memory import largest_that_fits
from vision.training.run.run_folder import Run
from vision.training.schedule import Schedule, build_schedule
from vision.training.start import FirstModel, differences, first_model
from vision.training.state import TrainState
from vision.training.step import Setup
from vision.training.tasks.features import AS_IT_IS, HeadOnly, caches
from vision.training.tasks.loss import check_loss
from vision.training.tune import counts, freeze, set_modes


@dataclass
class Job:
    """A run that is ready to go."""

    config: TrainConfig
    run: Run
    world: World
    setup: Setup
    plan: Schedule
    order: BatchOrder
    """How the images of an epoch are shared out."""
    preprocess: Preprocess
    train_loader: Loader
    val_loader: Loader
    module: nn.Module
    """What a training step calls: the model, or a wrapper that spreads it over processes."""
    state: TrainState
    evaluated: tuple[nn.Module, Preprocess]
    """What an evaluation calls, and how it normalises: the model on images, or where features are
    stored its head on those."""
    load_report: list[str] = field(default_factory=list)
    """What became of the weights that the run started from, line by line."""
    warnings: list[str] = field(default_factory=list)
    improved: bool = False
    """The last evaluation was the best so far and is not saved yet."""
    started: float = field(default_factory=time.perf_counter)
    """When the run would have started, had it never been interrupted."""

    @property
    def seconds(self) -> float:
        """How long the run has taken up to here, without what was lost when it was killed."""
        return time.perf_counter() - self.started

    @property
    def standing(self) -> dict[str, float]:
        """What the status says of any run, however it stands."""
        return {
            "steps": self.plan.total,
            "seconds": self.seconds,
            "parameters": self.state.notes["parameters"],
            "micro_batch": self.micro_batch,
        }

    @property
    def shows_images(self) -> bool:
        """Whether sheets of images are logged; of stored features there are none to show."""
        return self.config.log.wandb != "disabled" and not caches(self.config)

    def train_mode(self) -> None:
        """What is trained works as in training, what is frozen as in evaluation."""
        assert isinstance(self.state.model, Classifier)
        self.module.train()
        set_modes(self.state.model, self.config.tune)

    @property
    def micro_batch(self) -> int:
        """Images that one device works on at once."""
        return self.order.batch_size // self.order.ranks // self.order.accumulation

    def skipped(self) -> dict[str, str]:
        """Images that this process could not read so far, and why."""
        loaders = (self.train_loader, self.val_loader)
        return {f.name: f.reason for loader in loaders for f in loader.failures.values()}


def build_job(config: TrainConfig, run: Run, world: World, source: str | None = None) -> Job:
    """Data, model, optimiser and plan. Weights come from `source`, by default from `config.init`,
    or are drawn from the seed; those of a run that is resumed are still to be restored.
    """
    _set_up_torch(config, world)
    data = _data(config, run, world)
    train, val = build_source(data, "train"), build_source(data, "val")
    first = first_model(config, run, world, config.init if source is None else source, train)
    known = [*first.known, *usual_values(config.data)]
    preprocess = resolve_preprocess(config.preprocess, first.image_size, train.channels, known)
    origin = {"image_size": first.size_origin, **preprocess.origin}
    preprocess = replace(preprocess, origin=origin)
    classes = len(train.classes)
    model = _ready(config, first.model, world)
    check_loss(config.loss, config.augment.label_smoothing, classes)
    setup = Setup(config, world, classes, normalizer(preprocess, world.device))
    order = _order(config, world, parts=_parts(run, model, setup, preprocess))
    plan = build_schedule(config, len(train))
    plain = HeadOnly(model) if caches(config) else model
    # A head alone is small enough to be whole on every device.
    module = spread(plain, "ddp" if caches(config) else config.parallel, world)
    if config.compile:
        compile_steps(module)
    state = TrainState(
        model=model,
        optimizer=build_optimizer(model, config.optimizer, plan.peak),
        scaler=torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16"),
        average=start_average(model) if config.ema is not None else None,
        sums=torch.zeros(3, device=world.device),
        notes=_notes(config, first, train, preprocess, model),
    )
    return Job(
        config=config,
        run=run,
        world=world,
        setup=setup,
        plan=plan,
        order=order,
        preprocess=preprocess,
        train_loader=_loader(config, world, train, preprocess, training=True),
        val_loader=_loader(config, world, val, preprocess, training=False),
        module=module,
        state=state,
        evaluated=(plain, AS_IT_IS if caches(config) else preprocess),
        load_report=list(first.lines),
        warnings=_warnings(config, world, train)
        + differences(config.preprocess, preprocess, first.known),
    )


def _ready(config: TrainConfig, model: Classifier, world: World) -> Classifier:
    """The model on its device, frozen where it is not to be trained."""
    freeze(model.train(), config.tune, config.seed)
    model = model.to(world.device)
    if config.channels_last and not (config.parallel == "fsdp" and world.size > 1):
        model = model.to(memory_format=torch.channels_last)  # FSDP takes contiguous weights alone
    return model


def _notes(
    config: TrainConfig, first: FirstModel, train: Source, preprocess: Preprocess, model: Classifier
) -> dict[str, Any]:
    """What a checkpoint says of the run, beside its tensors."""
    trained, parameters = counts(model)
    return {
        "config": config.model_dump(mode="json"),
        "model": first.config.model_dump(mode="json"),
        "load_report": first.report,
        "classes": list(train.classes),
        "channels": train.channels,
        "parameters": parameters,
        "trained_parameters": trained,
        "preprocess": {
            "image_size": list(preprocess.image_size),
            "mean": list(preprocess.mean),
            "std": list(preprocess.std),
            "interpolation": preprocess.interpolation,
            "crop_ratio": preprocess.crop_ratio,
            "origin": dict(preprocess.origin),
        },
    }


def _data(config: TrainConfig, run: Run, world: World) -> DataConfig:
    """The data of the run; a folder's split is stored at its start and read back ever after."""
    if not isinstance(config.data, FolderConfig):
        return config.data
    if world.main and not run.split.exists():
        run.folder.mkdir(parents=True, exist_ok=True)
        part = run.split.with_suffix(".part")
        write_table(read_table(config.data), part)
        part.replace(run.split)
    world.wait()
    return with_saved_split(config.data, run.split)


def _set_up_torch(config: TrainConfig, world: World) -> None:
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32
    if config.deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic and world.device.type == "cuda"


def _loader(
    config: TrainConfig, world: World, source: Source, preprocess: Preprocess, training: bool
) -> Loader:
    return build_loader(
        source,
        preprocess,
        config.data,
        config.loader,
        augment=config.augment if training else None,
        seed=config.seed,
        processes=world.size,
        on_cpu=world.device.type == "cpu",
    )


def _order(config: TrainConfig, world: World, parts: int) -> BatchOrder:
    return BatchOrder(
        seed=config.seed,
        batch_size=config.batch_size,
        sampling=config.data.sampling,
        repeats=config.augment.repeats,
        tail=config.loader.tail,
        rank=world.rank,
        ranks=world.size,
        accumulation=parts,
    )


def _parts(run: Run, model: Classifier, setup: Setup, preprocess: Preprocess) -> int:
    """In how many equal parts a device works off its share of a batch.

    A micro-batch that was found before is the most that is tried again: a resumed run would learn
    the same with another one, but not to the bit.
    """
    config, world = setup.config, setup.world
    if config.batch_size % world.size:
        raise ConfigError(
            f"batch_size = {config.batch_size} cannot be shared equally by {world.size} processes; "
            f"choose a multiple of {world.size}."
        )
    share = config.batch_size // world.size
    limit = config.max_batch_per_device
    if limit == "auto" and caches(config):
        limit = None  # a head alone needs next to nothing
    if limit == "auto":
        before = run.status().get("micro_batch", share)
        limit = largest_that_fits(share, before, model, setup, preprocess)
    largest = limit or share
    fitting = (n for n in range(1, share + 1) if share % n == 0 and share // n <= largest)
    return world.most(next(fitting))


def _warnings(config: TrainConfig, world: World, train: Source) -> list[str]:
    found = []
    if config.precision == "fp16" and world.device.type == "cpu":
        found.append("precision=fp16 on a CPU is slow and less exact than bf16 or fp32.")
    if unequal := imbalance(train.labels, train.classes):
        found.append(unequal)
    return found
