"""What an evaluation is about: an opened model with its classes, its preprocessing and its data."""

from dataclasses import dataclass
from pathlib import Path

import torch

from vision.checkpoints.open import OpenedModel, open_model
from vision.config import ConfigError
from vision.data.configs import DataConfig, FolderConfig
from vision.data.preprocess import Preprocess, resolve_preprocess
from vision.data.sources.build import describe
from vision.data.sources.folder import shorten
from vision.data.sources.table import with_saved_split
from vision.data.sources.wordnet import imagenet_synsets, readable_names
from vision.evaluation.configs import EvalConfig
from vision.models.cost.count import cost


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to be evaluated."""

    opened: OpenedModel
    classes: tuple[str, ...]
    """Names, in the order of the logits; those of the data for a model without a head."""
    preprocess: Preprocess
    data: DataConfig
    notes: tuple[str, ...]
    """What a reader of the results must know of the model."""

    @property
    def headless(self) -> bool:
        """Whether the model has features only; its classes are then those of its neighbours."""
        return self.opened.classes == 0

    @property
    def step(self) -> int:
        """Steps that a run has trained for; 0 for other weights."""
        return 0 if self.opened.record is None else self.opened.record.step


@dataclass(frozen=True)
class Cost:
    """What a model needs."""

    parameters: int
    macs: int
    """Multiply-adds for one image."""


def open_evaluated(place: str, config: EvalConfig, device: torch.device) -> EvaluatedModel:
    """The model of a checkpoint, ready to be evaluated on its own data or on that of the config."""
    opened = open_model(
        place,
        model=config.model,
        weights=config.weights,
        rename=config.rename,
        image_size=config.image_size,
        device=device,
    )
    data = config.data or own_data(opened)
    if opened.classes == 0 and not config.neighbours:
        raise ConfigError(
            f"checkpoint: {opened.path} has no head, so that it names no classes. Judge its "
            f"features by their nearest neighbours with neighbours=20, or train a head: python "
            f"train.py recipe=probe model=auto init={opened.path} data=…"
        )
    preprocess = resolve_preprocess(
        config.preprocess, opened.image_size, opened.channels, opened.known
    )
    classes, note = _class_names(opened, config, data)
    notes = [*opened.notes(), *note]
    if config.preprocess.mean != "auto":
        notes = [line for line in notes if "mean and std of ImageNet" not in line]
    if opened.record is None:
        notes.append(_prepared(preprocess))
    return EvaluatedModel(opened, classes, preprocess, data, tuple(notes))


def cost_of(subject: EvaluatedModel) -> Cost:
    """Parameters of the model, and its multiply-adds at the size of the images."""
    opened = subject.opened
    parameters = sum(parameter.numel() for parameter in opened.model.parameters())
    figures = cost(opened.config, opened.image_size, opened.channels, opened.classes)
    return Cost(parameters, figures.macs)


def own_data(opened: OpenedModel) -> DataConfig:
    """The data of the run; a folder as it was split then, as stored with the run."""
    data = None if opened.record is None else opened.record.data
    if data is None:  # a converted file
        raise ConfigError(f"checkpoint: {opened.path} does not say its images: give data=…")
    split = opened.path.resolve().parent.parent / "split.csv"
    if isinstance(data, FolderConfig) and split.is_file():
        return with_saved_split(data, split)
    return data


def _prepared(preprocess: Preprocess) -> str:
    """How the images are prepared, and who says so."""
    said: dict[str, list[str]] = {}
    for name, origin in preprocess.origin.items():
        value = getattr(preprocess, name)
        numbers = ", ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else ""
        said.setdefault(origin, []).append(f"{name} {f'[{numbers}]' if numbers else value}")
    parts = [f"{', '.join(values)} ({origin})" for origin, values in said.items()]
    return f"images are prepared with {'; '.join(parts)}. preprocess.…=… changes that"


def _class_names(
    opened: OpenedModel, config: EvalConfig, data: DataConfig
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the classes, and a note where they are assumed: the file has none."""
    spec = describe(data) if opened.class_names is None else None
    if opened.classes == 0 and spec is not None:
        numbered = tuple(str(i) for i in range(spec.number_of_classes))
        note = "no head: classes are those of the nearest training images (k-NN)"
        return spec.classes or numbered, (note,)
    names = read_class_names(config.class_names, opened.classes, opened.path)
    if names is not None or opened.class_names is not None:
        return names or opened.class_names or (), ()
    assert spec is not None
    if opened.classes == 1000:
        note = "1,000 classes without names: taken for those of ImageNet, in its usual order"
        return readable_names(imagenet_synsets()), (note,)
    if spec.classes is not None and len(spec.classes) == opened.classes:
        note = "classes without names: taken for those of the data, in the order that they have "
        return spec.classes, (f"{note}there ({shorten(spec.classes)}); class_names=… gives others",)
    listed = "" if spec.classes is None else f": {shorten(spec.classes)}"
    raise ConfigError(
        f"checkpoint: {opened.path} has {opened.classes} classes without names, but the data has "
        f"{spec.number_of_classes}{listed}. Give their names with class_names=names.txt, a file "
        f"with {opened.classes} lines, the names of the model's classes in the order of its "
        "logits. The classes of the data are looked up there."
    )


def read_class_names(file: Path | None, number: int, path: Path) -> tuple[str, ...] | None:
    """The names in a text file, one per line; None without a file."""
    if file is None:
        return None
    try:
        names = tuple(file.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"class_names: {file} cannot be read: {reason}.") from error
    if len(names) != number:
        raise ConfigError(
            f"class_names: {file} has {len(names)} lines, but the model of {path} has {number} "
            "classes."
        )
    return names
