"""The subcommands of `vision`: their settings and what each does. Torch is loaded when needed."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vision.config import Config, Count, PositiveInt
from vision.data.configs import (
    AugmentConfig,
    DataConfig,
    LoaderConfig,
    PrepareConfig,
    PreprocessConfig,
)
from vision.evaluation.configs import EvalConfig
from vision.models.configs import ModelConfig
from vision.training.configs import TrainConfig

Choices = dict[str, str]
"""The choice made in every group, such as {"model": "vit_base"}."""


@dataclass(frozen=True)
class Command:
    """A subcommand: a YAML file of the same name, its config class, and what to do with it."""

    summary: str
    config: type[Config]
    run: Callable[[Any, Choices], int]
    """Given the config and the choices made in each group; returns the exit code."""


class InfoConfig(Config):
    """What `vision info` is asked about."""

    model: ModelConfig
    data: DataConfig
    format: Literal["table", "json"]
    """A table for people, or JSON for programs."""


class LookConfig(Config):
    """What `vision data` shows: training pictures as the model gets them, or a check of all."""

    data: DataConfig
    augment: AugmentConfig
    preprocess: PreprocessConfig
    loader: LoaderConfig
    seed: Count
    pictures: PositiveInt
    output: Path
    """The picture that is written."""
    check: bool
    """Instead, read every picture once: counts, sizes, what is unreadable, what comes twice."""
    format: Literal["table", "json"]
    """Of the check."""


def _info(config: InfoConfig, chosen: Choices) -> int:
    from vision.data.build import describe
    from vision.models.cost import as_dict, cost, table

    spec = describe(config.data)
    result = cost(config.model, spec.image_size, spec.channels, spec.number_of_classes)
    _print(as_dict(result) if config.format == "json" else table(result))
    return 0


def _data(config: LookConfig, chosen: Choices) -> int:
    if config.check:
        return _check(config)
    import torch

    from vision.data.build import build_source
    from vision.data.loader import Loader, Recipe, training_batches
    from vision.data.mixing import mix_batch
    from vision.data.preprocess import normalizer, resolve_preprocess
    from vision.data.sampling import TrainingPlan
    from vision.data.sheet import contact_sheet

    source = build_source(config.data, "train")
    preprocess = resolve_preprocess(config.preprocess, config.data.image_size, source.channels)
    recipe = Recipe(
        preprocess, config.augment, config.seed, config.loader.max_pixels, config.data.on_error
    )
    loader = Loader(source, recipe, config.loader, 0, config.data.max_error_share)
    plan = TrainingPlan(
        config.seed,
        config.pictures,
        config.data.sampling,
        config.augment.repeats,
        tail="pad",
    )
    batch = next(training_batches(loader, plan))
    images = normalizer(preprocess, torch.device("cpu"))(batch.images)
    images, targets = mix_batch(
        images, batch.labels, len(source.classes), config.augment, seed=config.seed, step=0
    )
    sheet = contact_sheet(images, targets, source.classes, preprocess)
    config.output.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(config.output)
    print(f"{config.pictures} training pictures are in {config.output}.")
    return 0


def _check(config: LookConfig) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from vision.data.check import check_data
    from vision.data.loader import resolve_workers

    workers, _ = resolve_workers(config.loader.workers)
    with Progress(console=Console(stderr=True)) as progress:
        result = check_data(config.data, workers, progress)
    if config.format == "json":
        print(result.to_json())
    else:
        _print(result.table())
        print("\n".join(result.lines()))
    return 0 if result.clean else 1


def _prepare(config: PrepareConfig, chosen: Choices) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from vision.data.prepare import prepare

    with Progress(console=Console(stderr=True)) as progress:
        written = prepare(config, progress)
    for part in written:
        pictures = sum(shard.count for shard in part.shards)
        size = sum(shard.bytes for shard in part.shards) / 1e6
        print(f"{part.split}: {pictures:,} pictures in {len(part.shards)} shards, {size:,.1f} MB")
    print(f"Train on them with data=webdataset data.root={config.output}")
    return 0


def _train(config: TrainConfig, chosen: Choices) -> int:
    from vision.training.loop import train

    return train(config, label=f"{chosen['model']}-{chosen['data']}")


def _eval(config: EvalConfig, chosen: Choices) -> int:
    from vision.evaluation.command import evaluate_checkpoint
    from vision.training.distributed import world

    with world(config.device) as processes:
        result = evaluate_checkpoint(
            config, processes.device, processes.rank, processes.size, processes.sum
        )
        if processes.main:
            _print(result.as_dict() if config.format == "json" else result.table())
    return 0


def _print(result: Any) -> None:
    """A mapping as JSON, anything else as rich draws it."""
    if isinstance(result, dict):
        print(json.dumps(result, indent=1))
        return
    from rich.console import Console

    Console().print(result)


COMMANDS = {
    "info": Command(
        "layers, parameters, MACs, memory and attention matrices of a model", InfoConfig, _info
    ),
    "data": Command(
        "a sheet of training pictures as the model gets them, or a check of all", LookConfig, _data
    ),
    "prepare": Command("write a data set as resized tar shards", PrepareConfig, _prepare),
    "train": Command("train a model, or go on with a run", TrainConfig, _train),
    "eval": Command("evaluate a checkpoint", EvalConfig, _eval),
}
