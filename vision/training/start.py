"""The model that a run begins with: resumed, opened from `init`, or drawn from the seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.remote import resolve
from vision.checkpoints.native.checkpoint_folder import latest
from vision.checkpoints.native.header import read_record
from vision.checkpoints.native.run_record import RunRecord, run_record
from vision.checkpoints.open import OpenedModel, open_model
from vision.config import ConfigError, pair
from vision.data.configs import PreprocessConfig
from vision.data.preprocess import NAMES, Known, Preprocess
from vision.data.sources.build import image_size
from vision.data.sources.source import Source
from vision.models.build import build_model
from vision.models.configs import AutoModelConfig, ModelConfig
from vision.models.layers import Classifier, Grid
from vision.training.configs import TrainConfig
from vision.training.run.distributed import World
from vision.training.run.run_folder import Run


@dataclass(frozen=True)
class FirstModel:
    """A model before its first step; that of a resumed run still waits for its weights."""

    model: Classifier
    config: ModelConfig
    image_size: Grid
    size_origin: str
    """Who decided the size of the images."""
    known: Known = ()
    """What the weights say of the preprocessing."""
    report: Mapping[str, Any] | None = None
    """What became of the weights of `init`."""
    lines: tuple[str, ...] = ()
    """The same for a person, where it happened just now."""


def first_model(
    config: TrainConfig, run: Run, world: World, init: str | None, train: Source
) -> FirstModel:
    """All processes must call it together: one of them downloads.

    A run that has a checkpoint of its own resumes from that and asks for nothing else.
    """
    record = _newest_record(run)
    if record is not None:
        model = record.model if isinstance(config.model, AutoModelConfig) else config.model
        origins = record.preprocess.origin
        known = [
            (origins.get(name, "the checkpoint"), {name: getattr(record.preprocess, name)})
            for name in NAMES
        ]
        size, who = image_size(config.data, record.preprocess.image_size)
        drawn = _drawn(config, model, size, train)
        return FirstModel(drawn, model, size, who, known, record.load_report)
    if isinstance(config.model, AutoModelConfig) and init in (None, "pretrained"):
        raise ConfigError(
            "model=auto takes the model from the weights of init; give init=PATH, init=timm:NAME "
            "or init=hf:OWNER/NAME, or choose a model."
        )
    if init is None:
        assert not isinstance(config.model, AutoModelConfig)
        size, who = image_size(config.data)
        drawn = _drawn(config, config.model, size, train)
        return FirstModel(drawn, config.model, size, who)
    opened = _opened(config, world, init, train)
    lines = (*opened.report.lines(), *_size_line(opened))
    who = image_size(config.data, opened.trained_size)[1]
    return FirstModel(
        opened.model,
        opened.config,
        opened.image_size,
        who,
        opened.known,
        opened.report.as_dict(),
        lines,
    )


def _opened(config: TrainConfig, world: World, init: str, train: Source) -> OpenedModel:
    place = _pretrained(config.model) if init == "pretrained" else init
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


def differences(config: PreprocessConfig, preprocess: Preprocess, known: Known) -> list[str]:
    """Warnings: values that the config gives although the weights were trained with others."""
    found = []
    for name in NAMES:
        value = next((v[name] for _, v in known if name in v), None)
        given = getattr(config, name)
        if given == "auto" or value is None or _same(getattr(preprocess, name), value):
            continue
        found.append(
            f"preprocess.{name} = {_shown(given)}, but the weights were trained with "
            f"{_shown(value)}; preprocess.{name}=auto takes theirs."
        )
    return found


def _drawn(config: TrainConfig, model: ModelConfig, size: Grid, train: Source) -> Classifier:
    return build_model(
        model, size, channels=train.channels, classes=len(train.classes), seed=config.seed
    )


def _pretrained(model: Any) -> str:
    if model.pretrained is None:
        raise ConfigError(
            "init=pretrained: no published weights are known for this model; give a file, "
            "init=timm:NAME or init=hf:OWNER/NAME."
        )
    return str(model.pretrained)


def _newest_record(run: Run) -> RunRecord | None:
    """That of the newest checkpoint of the run that can be read."""
    for path in latest(run.checkpoints):
        try:
            return run_record(read_record(path), path)
        except CheckpointError:
            continue  # the resume itself says so, and falls back on the one before
    return None


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple):
        second = tuple(second)
        return len(first) == len(second) and all(
            abs(a - b) < 1e-4 for a, b in zip(first, second, strict=True)
        )
    return bool(first == second)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(f'{number:g}' for number in value)}]"
    return str(value)


def _size_line(opened: OpenedModel) -> list[str]:
    """What to say where the weights were trained on images of another size."""
    if opened.trained_size == opened.image_size:
        return []
    sizes = (opened.trained_size, opened.image_size)
    before, after = (f"{height} × {width}" for height, width in sizes)
    return [f"size      trained on {before} pixels; this run has {after} (data.image_size)"]
