"""The model that a run begins with: resumed, opened from `init`, or drawn from the seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.remote import resolve
from vision.checkpoints.native.checkpoint_folder import latest
from vision.checkpoints.native.header import read_record
from vision.checkpoints.native.run_record import RunRecord, run_record
from vision.checkpoints.open import OpenedModel, open_model
from vision.config import ConfigError, pair
from vision.data.configs import PreprocessConfig
from vision.data.preprocess import NAMES, Known, Preprocess
from vision.data.sources.build_source import image_size
from vision.data.sources.source import Source
from vision.models.build import build_model
from vision.models.configs import AutoModelConfig, ModelConfig
from vision.models.layers import Classifier, Grid
from vision.training.configs import TrainConfig
from vision.training.run.distributed import World
from vision.training.run.run_folder import Run


@dataclass(frozen=True)
class StartingModel:
    """A model before its first step; that of a resumed run has yet to get its weights."""

    model: Classifier
    config: ModelConfig
    image_size: Grid
    size_origin: str
    """Where the size of the images comes from."""
    known: Known = ()
    """The preprocessing that the weights were trained with."""
    report: Mapping[str, Any] | None = None
    """The report on loading the weights of `init`."""
    report_lines: tuple[str, ...] = ()
    """The report as text; empty where the run is resumed."""


def starting_model(
    config: TrainConfig, run: Run, world: World, init: str | None, train: Source
) -> StartingModel:
    """The model of a run's own checkpoint, of `init`, or drawn from the seed, in this order.

    All processes must call this together: one of them downloads.
    """
    record = _newest_record(run)
    model = config.model
    if isinstance(model, AutoModelConfig) and record is None and init in (None, "pretrained"):
        raise ConfigError(
            "model=auto takes the model from the weights of init; set init=PATH, init=timm:NAME "
            "or init=hf:OWNER/NAME, or choose a model."
        )
    if record is None and init is not None:
        opened = _opened(config, world, init, train)
        return StartingModel(
            opened.model,
            opened.config,
            opened.image_size,
            image_size(config.data, opened.trained_size)[1],
            opened.known,
            opened.report.as_dict(),
            (*opened.report.lines(), *_size_line(opened)),
        )
    known, report, trained_size = [], None, None
    if record is not None:
        known = [
            (record.preprocess.origin.get(n, "the checkpoint"), {n: getattr(record.preprocess, n)})
            for n in NAMES
        ]
        report, trained_size = record.load_report, record.preprocess.image_size
    if isinstance(model, AutoModelConfig):
        assert record is not None
        model = record.model
    size, origin = image_size(config.data, trained_size)
    drawn = build_model(
        model, size, channels=train.channels, classes=len(train.classes), seed=config.seed
    )
    return StartingModel(drawn, model, size, origin, known, report)


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
        resize_positions=config.init_positions,
        resize_windows=config.init_windows,
        seed=config.seed,
        setting="init",
    )


def preprocess_warnings(
    config: PreprocessConfig, preprocess: Preprocess, known: Known
) -> list[str]:
    """Warnings about settings that differ from what the weights were trained with."""
    found = []
    for name in NAMES:
        value = next((v[name] for _, v in known if name in v), None)
        given = getattr(config, name)
        if given != "auto" and value is not None and not _same(getattr(preprocess, name), value):
            found.append(
                f"preprocess.{name} = {_shown(given)}, but the weights were trained with "
                f"{_shown(value)}; preprocess.{name}=auto takes theirs."
            )
    return found


def _newest_record(run: Run) -> RunRecord | None:
    """The record of the newest readable checkpoint of the run."""
    for path in latest(run.checkpoints):
        try:
            return run_record(read_record(path), path)
        except CheckpointError:
            continue  # resuming warns about it, and falls back to the one before
    return None


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple):
        return len(first) == len(second) and np.allclose(first, second, rtol=0, atol=1e-4)
    return bool(first == second)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(f'{number:g}' for number in value)}]"
    return str(value)


def _size_line(opened: OpenedModel) -> list[str]:
    """A line of the report where the weights were trained on images of another size."""
    if opened.trained_size == opened.image_size:
        return []
    sizes = (opened.trained_size, opened.image_size)
    before, after = (f"{height} × {width}" for height, width in sizes)
    return [f"size      trained on {before} pixels; this run has {after} (data.image_size)"]
