"""A model with the images that it is evaluated on, in terms of its classes."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vision.checkpoints.native.checkpoint_folder import run_of
from vision.checkpoints.open import OpenedModel, open_model
from vision.config import ConfigError, shorten, suggest
from vision.data.configs import (
    DataConfig,
    EvalDataConfig,
    FolderConfig,
    ImageNetFamilyConfig,
    Split,
)
from vision.data.preprocess import Preprocess, resolve_preprocess
from vision.data.sources.build_source import build_source, describe
from vision.data.sources.source import Source
from vision.data.sources.table import with_saved_split
from vision.evaluation.configs import HUBS, EvalConfig
from vision.evaluation.evaluate import Predictions
from vision.evaluation.neighbours import NeighboursAccuracy
from vision.files import read_file


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with the images that it is evaluated on."""

    checkpoint: Path
    """The file, or the name on a hub."""
    opened: OpenedModel
    preprocess: Preprocess
    classes: tuple[str, ...]
    """Names in the order of the logits; those of the data for a model without a head."""
    data: EvalDataConfig
    source: Source
    labels: Tensor
    """Label of every image of the source as an index of `classes`: int64 (len(source),); for
    several labels, as in `Source.labels`: int8 (len(source), classes)."""
    notes: tuple[str, ...]
    """Assumptions about the model, its classes and its preprocessing."""

    @property
    def step(self) -> int:
        """Number of training steps; 0 for weights of other projects."""
        return 0 if self.opened.record is None else self.opened.record.step

    def training_images(self) -> Source:
        """The training images of the same data."""
        assert not isinstance(self.data, ImageNetFamilyConfig)  # test sets alone
        return build_source(self.data, "train")


@dataclass(frozen=True)
class Answers:
    """The predictions of one model for the images that could be read."""

    model: EvaluatedModel
    predictions: Predictions
    labels: Tensor
    """Labels of the predictions, of those of the model."""
    neighbours: NeighboursAccuracy | None


def open_for_evaluation(
    place: str, config: EvalConfig, device: torch.device
) -> tuple[OpenedModel, Preprocess, list[str]]:
    """Open a checkpoint; with its preprocessing, and notes on what is assumed."""
    opened = open_model(
        place,
        model=config.model,
        weights=config.weights,
        rename=config.rename,
        image_size=config.image_size,
        device=device,
    )
    if not config.neighbours:
        opened.check_head()
    preprocess = resolve_preprocess(
        config.preprocess, opened.image_size, opened.channels, opened.known
    )
    notes = opened.notes()
    if config.preprocess.mean != "auto":
        notes = [line for line in notes if "mean and std of ImageNet" not in line]
    if opened.record is None:
        notes.append(f"images are preprocessed with {preprocess}; preprocess.…=… overrides")
    return opened, preprocess, notes


def open_evaluated_model(place: str, config: EvalConfig, device: torch.device) -> EvaluatedModel:
    """Open a checkpoint together with its own data or that of the config."""
    opened, preprocess, notes = open_for_evaluation(place, config, device)
    data = config.data or own_data(opened)
    assert not isinstance(data, ImageNetFamilyConfig)  # evaluated by evaluate_family.py
    found = with_images(opened, place, preprocess, data, config.split, config.class_names)
    if found.source.multi_label and config.neighbours:
        raise ConfigError(
            f"neighbours = {config.neighbours}: neighbours vote for one class per image, but these "
            "images have several labels; use neighbours=0."
        )
    return replace(found, notes=(*notes, *found.notes))


def with_images(
    opened: OpenedModel,
    place: str,
    preprocess: Preprocess,
    data: DataConfig,
    split: Split,
    names: Path | None = None,
) -> EvaluatedModel:
    """A model that is open already, together with the images of a split. `names`: a file with the
    names of its classes.
    """
    classes, assumed = class_names(opened, names, data)
    source = build_source(data, split)
    check_labels(opened, source, place)
    labels, matched = match_classes(classes, source, place)
    return EvaluatedModel(
        checkpoint=shown_path(place, opened),
        opened=opened,
        preprocess=preprocess,
        classes=classes,
        data=data,
        source=source,
        labels=labels,
        notes=tuple(note for note in (assumed, matched) if note),
    )


def shown_path(place: str, opened: OpenedModel) -> Path:
    """The file of a checkpoint, or its name on a hub."""
    return Path(place) if place.startswith(HUBS) else opened.path


def check_labels(opened: OpenedModel, source: Source, place: str) -> None:
    """Refuse a model for one class per image on images with several labels, and the reverse."""
    if opened.multi_label and not source.multi_label:
        raise ConfigError(
            f"data: the model of {place} was trained with task=multi_label, but these images have "
            "one class each; choose images with several labels (a table with a column labels)."
        )
    if opened.classes and source.multi_label and not opened.multi_label:
        raise ConfigError(
            f"data: these images have several labels, but the model of {place} has one class per "
            "image; train one with task=multi_label."
        )


def own_data(opened: OpenedModel) -> DataConfig:
    """The data of the run; for a folder, with the split that is stored with the run."""
    data = None if opened.record is None else opened.record.config.data
    if data is None:
        raise ConfigError(
            f"checkpoint: {opened.path} is not of a run of this project and does not specify its "
            "images: give data=…"
        )
    run = run_of(opened.path.resolve())
    if isinstance(data, FolderConfig) and run is not None and (run / "split.csv").is_file():
        return with_saved_split(data, run / "split.csv")
    return data


def class_names(
    opened: OpenedModel, file: Path | None, data: DataConfig
) -> tuple[tuple[str, ...], str | None]:
    """The names of the model's classes, and a note where they are assumed.

    They come from the file, else from the checkpoint, else they are those of ImageNet or of the
    data.
    """
    if opened.classes and file is not None:
        return read_class_names(file, opened), None
    if opened.class_names is not None:
        return opened.class_names, None
    spec = describe(data)
    if not opened.classes:
        names = spec.classes or tuple(str(i) for i in range(spec.number_of_classes))
        return names, "no head: classes are those of the nearest training images (k-NN)"
    if opened.names is not None:
        note = "1,000 classes without names: assumed to be those of ImageNet in the usual order"
        return opened.names, note
    if spec.classes is not None and len(spec.classes) == opened.classes:
        return spec.classes, (
            "classes without names: assumed to be those of the data in the same order "
            f"({shorten(spec.classes)}); class_names=… overrides"
        )
    listed = "" if spec.classes is None else f": {shorten(spec.classes)}"
    raise ConfigError(
        f"checkpoint: {opened.path} has {opened.classes} classes without names, but the data has "
        f"{spec.number_of_classes}{listed}. Give their names with class_names=names.txt, a file "
        f"with {opened.classes} lines, the names of the model's classes in the order of its "
        "logits. The classes of the data are looked up there."
    )


def read_class_names(file: Path, opened: OpenedModel) -> tuple[str, ...]:
    """The names in a text file, one per line."""
    try:
        names = tuple(read_file(file).decode().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"class_names: {file} cannot be read: {reason}.") from error
    if len(names) != opened.classes:
        raise ConfigError(
            f"class_names: {file} has {len(names)} lines, but the model of {opened.path} has "
            f"{opened.classes} classes."
        )
    return names


def match_classes(
    classes: tuple[str, ...], source: Source, checkpoint: str
) -> tuple[Tensor, str | None]:
    """The labels of a source as indices of the model's classes, and a note if the classes differ.

    Classes are matched by name. The data may have them in another order, or only some of them; a
    class that the model does not have is an error.
    """
    if classes == source.classes:
        return torch.tensor(source.labels), None
    index = {name: i for i, name in enumerate(classes)}
    unknown = [name for name in source.classes if name not in index]
    if unknown:
        hint = suggest(unknown[0], classes)
        near = f"({unknown[0]}: {hint}) " if hint.startswith("Did you") else ""
        raise ConfigError(
            f"{len(unknown)} of the {len(source.classes)} classes of the data are unknown to the "
            f"model of {checkpoint}: {shorten(unknown)}. {near}It was trained for {len(classes)}: "
            f"{shorten(classes)}. Classes are matched by name; class_names=names.txt renames those "
            "of the model, one name per line."
        )
    for names, owner in ((source.classes, "the data"), (classes, f"the model of {checkpoint}")):
        count = Counter(names)
        repeated = sorted(name for name in set(source.classes) if count[name] > 1)
        if repeated:
            raise ConfigError(
                f"{owner} has several classes named {shorten(repeated)}; classes that are matched "
                "by name need unique names."
            )
    if source.multi_label:
        labels = torch.full((len(source), len(classes)), -1, dtype=torch.int8)
        labels[:, [index[name] for name in source.classes]] = torch.from_numpy(source.labels)
        return (
            labels,
            "Classes were matched by name; those that the data does not have are unknown.",
        )
    note = "The data has the classes in another order; they were matched by name."
    if len(source.classes) < len(classes):
        note = (
            f"The data has {len(source.classes)} of the {len(classes)} classes of the model; "
            "predictions of the others count as wrong."
        )
    return torch.tensor([index[source.classes[label]] for label in source.labels]), note
