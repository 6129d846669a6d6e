"""Where the weights of a run come from, and what they decide: model, preprocessing.

A run that has a checkpoint of its own goes on from that and asks for nothing else. Otherwise
weights come from `init`, or are drawn from the seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.folder import latest
from vision.checkpoints.header import read_record
from vision.checkpoints.infer import infer_model
from vision.checkpoints.load import load_weights, with_trained_windows
from vision.checkpoints.reading import find_file
from vision.checkpoints.remote import resolve
from vision.checkpoints.report import LoadReport
from vision.checkpoints.source import Source, open_source
from vision.config import ConfigError, parse
from vision.data.build import picture_size
from vision.data.configs import PreprocessConfig
from vision.data.preprocess import Preprocess
from vision.evaluation.stored import stored_model
from vision.models.baseline import TimmModel
from vision.models.configs import AutoModelConfig, ModelConfig, SwinV2Config, TimmConfig, ViTConfig
from vision.models.layers import Classifier, Grid
from vision.training.configs import TrainConfig
from vision.training.distributed import World
from vision.training.run import Run
from vision.training.start_timm import load_timm_weights, timm_preprocess

Known = Sequence[tuple[str, Mapping[str, Any]]]
"""Values of a preprocessing with their origins, the first of them first."""

NAMES = ("mean", "std", "interpolation", "crop_ratio")


@dataclass(frozen=True)
class Start:
    """What a run begins with."""

    model: ModelConfig
    """Without any auto."""
    known: Known = ()
    """What the weights say of the preprocessing."""
    source: str | None = None
    """Where weights are to be loaded from; None: nothing is loaded."""
    place: Path | None = None
    """The same as a path of this machine."""
    opened: Source | None = None
    """The same, read already."""
    image_size: Grid | None = None
    """Of the pictures that the weights were trained on."""
    assumed: tuple[str, ...] = ()
    """What the file does not tell of the model."""
    report: Mapping[str, Any] | None = None
    """That of the loading, where it happened before this run was resumed."""


def find_start(config: TrainConfig, run: Run, world: World, source: str | None) -> Start:
    """What the run begins with: its own newest checkpoint, the weights of a source, or nothing.

    All processes must call it together: one of them downloads.
    """
    record = _newest_record(run)
    if record is not None:
        return _resumed(config, record)
    if isinstance(config.model, AutoModelConfig) and source in (None, "pretrained"):
        raise ConfigError(
            "model=auto takes the model from the weights of init; give init=PATH, init=timm:NAME "
            "or init=hf:OWNER/NAME, or choose a model."
        )
    if source is None:
        return Start(config.model)  # type: ignore[arg-type]
    if source == "pretrained":
        source = _pretrained(config.model)
    if world.main:
        resolve(source)
    world.wait()
    place = resolve(source)
    try:
        path = find_file(place) if place.is_dir() else place
        own = read_record(path)
    except CheckpointError:  # a file of another project; or what it is, the reader will say
        return _foreign(config, source, place)
    return _own(config, source, path, own)


def load_start(model: Classifier, start: Start, config: TrainConfig) -> LoadReport | None:
    """Put the weights into the freshly built model; None if there are none to load."""
    if start.source is None or start.place is None:
        return None
    weights = config.init_weights
    if isinstance(model, TimmModel):
        return load_timm_weights(model, start.source, start.place, weights)
    report = load_weights(
        model,
        start.opened or start.place,
        weights=weights,
        positions=config.init_positions,
        windows=config.init_windows,
        trained_size=start.image_size,
    )
    return replace(report, source=str(start.place), assumed=(*start.assumed, *report.assumed))


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


def _resumed(config: TrainConfig, record: dict[str, Any]) -> Start:
    model = config.model
    values = record["preprocess"]
    origins = values.get("origin", {})
    known = [(origins.get(name, "the checkpoint"), {name: values[name]}) for name in NAMES]
    return Start(
        model=stored_model(record) if isinstance(model, AutoModelConfig) else model,
        known=known,
        image_size=(values["image_size"][0], values["image_size"][1]),
        report=record.get("load_report"),
    )


def _own(config: TrainConfig, source: str, path: Path, record: dict[str, Any]) -> Start:
    """From a checkpoint of this project, which knows everything."""
    height, width = record["preprocess"]["image_size"]
    trained = (height, width)
    model: ModelConfig
    if isinstance(config.model, AutoModelConfig):
        values = stored_model(record).model_dump(mode="json") | config.model.given()
        parsed: ModelConfig = parse(ModelConfig, values)  # type: ignore[arg-type]
        model = _at_size(parsed, trained, config)
    else:
        model = config.model
    values = record["preprocess"]
    return Start(
        model=model,
        known=[(f"the run {path}", {name: values[name] for name in NAMES})],
        source=source,
        place=path,
        image_size=trained,
    )


def _foreign(config: TrainConfig, source: str, place: Path) -> Start:
    if isinstance(config.model, TimmConfig):
        known, size = timm_preprocess(source, place)
        return Start(config.model, known, source, place, image_size=size)
    opened = open_source(source if ":" in source else place, config.init_weights)
    origin = opened.metadata.preprocess_origin or "the weights"
    start = Start(
        config.model,  # type: ignore[arg-type]
        [(f"{source}: {origin}", opened.metadata.preprocess)],
        source,
        place,
        opened,
    )
    if not isinstance(config.model, AutoModelConfig):
        return replace(start, image_size=_trained_size(opened, config))
    inferred = infer_model(opened, trained_size=config.model.trained_size, **config.model.given())
    return replace(
        start,
        model=_at_size(inferred.config, inferred.image_size, config),
        image_size=inferred.image_size,
        assumed=inferred.assumed,
    )


def _at_size(model: ModelConfig, trained: Grid, config: TrainConfig) -> ModelConfig:
    """The model for the run's pictures: a Swin V2 goes on measuring in windows that it knows."""
    if not isinstance(model, SwinV2Config):
        return model
    return with_trained_windows(model, trained, picture_size(config.data, trained)[0])


def _trained_size(opened: Source, config: TrainConfig) -> Grid | None:
    """The size of the pictures that a file's weights were trained on, where it can be told."""
    given: dict[str, Any] = (
        {"heads": config.model.heads} if isinstance(config.model, ViTConfig) else {}
    )
    try:
        return infer_model(opened, **given).image_size
    except CheckpointError:
        return None


def _pretrained(model: Any) -> str:
    if model.pretrained is None:
        raise ConfigError(
            "init=pretrained: no published weights are known for this model; give a file, "
            "init=timm:NAME or init=hf:OWNER/NAME."
        )
    return str(model.pretrained)


def _newest_record(run: Run) -> dict[str, Any] | None:
    """That of the newest checkpoint of the run that can be read."""
    for path in latest(run.checkpoints):
        try:
            return read_record(path)
        except CheckpointError:
            continue  # the resume itself will tell, and fall back on the one before
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


def size_line(start: Start, size: Grid) -> list[str]:
    """What to say where the weights were trained on pictures of another size."""
    if start.source is None or start.image_size in (None, size):
        return []
    assert start.image_size is not None
    before, after = (f"{height} × {width}" for height, width in (start.image_size, size))
    return [f"size      trained on {before} pixels; this run has {after} (data.image_size)"]
