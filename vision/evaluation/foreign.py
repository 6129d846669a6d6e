"""Weights of other projects, evaluated on pictures that the call names."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vision.checkpoints.header import MARK, open_checkpoint
from vision.checkpoints.infer import infer_model
from vision.checkpoints.load import open_model
from vision.checkpoints.reading import read_raw
from vision.checkpoints.remote import resolve
from vision.checkpoints.source import Source, open_source
from vision.config import ConfigError, pair
from vision.data.build import describe
from vision.data.configs import DataConfig
from vision.data.folder import shorten
from vision.data.preprocess import Preprocess, resolve_preprocess, usual_values
from vision.data.wordnet import imagenet_synsets, readable_names
from vision.evaluation.configs import HUBS, EvalConfig
from vision.evaluation.stored import Stored, find_checkpoint, load_stored
from vision.models.configs import AutoModelConfig, TimmConfig
from vision.models.layers import Classifier, Grid

TOLD = ("patch_size", "width", "depth", "depths", "mlp_ratio", "mlp", "class_token", "registers")
"""Settings of a model that the shapes of its weights tell."""
UNTOLD = ("window", "pretrained_window")
"""Settings of a Swin that they may leave open."""


@dataclass(frozen=True)
class Found:
    """A model that was made of a file of another project, and what the file tells of it."""

    model: Classifier
    image_size: Grid
    channels: int
    classes: int
    """0: there is no head."""
    class_names: tuple[str, ...] | None
    preprocess: Mapping[str, Any]
    preprocess_origin: str
    averaged: bool
    notes: tuple[str, ...]


def locate(place: str, data: DataConfig | None) -> Path:
    """The file that a checkpoint's name stands for; a hub's name, or a foreign folder, for itself.

    A foreign file does not say which pictures it is for, so that `data` must do so.
    """
    if place.startswith(HUBS):
        return Path(place)
    path = resolve(place, "checkpoint")
    if data is not None and path.is_dir() and not (path / "checkpoints").is_dir():
        return path
    path = find_checkpoint(path)
    if data is None and not is_own(path):
        read_raw(path)  # what is no checkpoint at all is told what it is
        raise ConfigError(
            f"checkpoint: {path} is not of a run of this project. Weights of other projects do not "
            "say which pictures they are for: give data=…, and model=… where a file does not tell "
            "its model."
        )
    return path


def is_own(path: Path) -> bool:
    """Whether a file is a checkpoint of this project, which knows everything about itself. Its
    first bytes tell.
    """
    if not path.is_file():
        return False
    with open_checkpoint(path) as file:
        return file.read(8 + len(MARK))[8:] == MARK


def open_stored(
    path: Path, config: EvalConfig, device: torch.device
) -> tuple[Stored, tuple[str, ...]]:
    """The model of a checkpoint of this project; or, where pictures are named, of any known one.

    Also what a reader has to know: what a foreign file does not tell and was assumed.
    """
    data = config.data
    if data is None or is_own(path):
        stored = load_stored(path, config.weights, device)
        names = read_class_names(config.class_names, len(stored.classes), path)
        return replace(stored, classes=names or stored.classes), ()
    found = _open(path, config, device)
    if found.classes == 0:
        raise ConfigError(f"checkpoint: {path} has no head, so that it tells no classes.")
    preprocess = _preprocess(found, config, data)
    classes, note = _class_names(found, config, data, path)
    stored = Stored(
        path=path,
        step=0,
        weights="ema" if found.averaged else "raw",
        model=found.model,
        preprocess=preprocess,
        classes=classes,
        data=data,
    )
    notes = (*found.notes, *note, _prepared(preprocess))
    if config.preprocess.mean != "auto":
        notes = tuple(note for note in notes if not note.startswith("mean and std of ImageNet"))
    return stored, tuple(f"{path.name}: {note}" for note in notes)


def _open(path: Path, config: EvalConfig, device: torch.device) -> Found:
    """The model of weights of another project, as the config says or as the file does."""
    name = str(path)
    source = name if name.startswith(HUBS) else path
    place = resolve(name, "checkpoint")
    model = config.model
    if isinstance(model, TimmConfig):
        from vision.evaluation.foreign_timm import open_timm

        return open_timm(name, place, model, config, device)
    if isinstance(model, AutoModelConfig):
        given, trained_size = model.given(), model.trained_size
    else:
        given, trained_size = model.model_dump(mode="json", exclude={"kind", "pretrained"}), None
        _check_fits(open_source(source, config.weights), model.kind, given, path)
    opened, inferred, report = open_model(
        source, weights=config.weights, trained_size=trained_size, device=device, **given
    )
    resized = tuple(f"{tensor} was resized: {how}" for tensor, how in report.resized.items())
    return Found(
        model=opened,
        image_size=inferred.image_size,
        channels=inferred.channels,
        classes=inferred.classes,
        class_names=inferred.class_names,
        preprocess=inferred.preprocess,
        preprocess_origin=inferred.preprocess_origin,
        averaged="ema" in " ".join(report.path_taken),
        notes=(
            f"weights in the layout of {inferred.layout}",
            *report.assumed,
            *report.warnings,
            *resized[:3],
        ),
    )


def _check_fits(source: Source, kind: str, given: Mapping[str, Any], path: Path) -> None:
    """Refuse weights of another model in one sentence, and not tensor by tensor."""
    tensors, found = source.converted.tensors, None
    if "blocks.0.attn.qkv.weight" in tensors:
        found = "vit"
    elif "layers.0.blocks.0.attn.qkv.weight" in tensors:
        found = "swin_v2" if "layers.0.blocks.0.attn.logit_scale" in tensors else "swin"
    differing = [("kind", found, kind)] if found not in (None, kind) else []
    if found == kind:
        # Heads of a ViT are not compared, since no shape tells them; any number divides by 1.
        told = {"heads": 1} if kind == "vit" else {n: given[n] for n in UNTOLD if given.get(n)}
        with suppress(ConfigError):  # a Swin without tables does not tell its heads
            inferred = infer_model(source, **told).config.model_dump(mode="json")
            differing = [
                (n, inferred[n], given[n]) for n in TOLD if inferred.get(n) != given.get(n)
            ]
    if differing:
        said = ", ".join(f"{name} {own}, not {other}" for name, own, other in differing)
        raise ConfigError(
            f"model: {path} holds the weights of another model: {said}. model=auto takes the one "
            "that the file tells."
        )


def _preprocess(found: Found, config: EvalConfig, data: DataConfig) -> Preprocess:
    """As the config says, else as the file does; small pictures of known sets are used whole."""
    known = [(found.preprocess_origin, found.preprocess)]
    known += [
        (origin, {"crop_ratio": values["crop_ratio"]})
        for origin, values in usual_values(data)
        if "crop_ratio" in values
    ]
    size = found.image_size if config.image_size is None else pair(config.image_size)
    return resolve_preprocess(config.preprocess, size, found.channels, known)


def _prepared(preprocess: Preprocess) -> str:
    """How the pictures are prepared, and who says so."""
    said: dict[str, list[str]] = {}
    for name, origin in preprocess.origin.items():
        value = getattr(preprocess, name)
        numbers = ", ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else ""
        said.setdefault(origin, []).append(f"{name} {f'[{numbers}]' if numbers else value}")
    parts = [f"{', '.join(values)} ({origin})" for origin, values in said.items()]
    return f"pictures are prepared with {'; '.join(parts)}. preprocess.…=… changes that"


def _class_names(
    found: Found, config: EvalConfig, data: DataConfig, path: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the classes, and a note where they are assumed: the file has none."""
    names = read_class_names(config.class_names, found.classes, path) or found.class_names
    if names is not None:
        return names, ()
    if found.classes == 1000:
        note = "1,000 classes without names: taken for those of ImageNet, in its usual order"
        return readable_names(imagenet_synsets()), (note,)
    spec = describe(data)
    if spec.classes is not None and len(spec.classes) == found.classes:
        note = "classes without names: taken for those of the data, in the order that they have "
        return spec.classes, (f"{note}there ({shorten(spec.classes)}); class_names=… gives others",)
    listed = "" if spec.classes is None else f": {shorten(spec.classes)}"
    raise ConfigError(
        f"checkpoint: {path} has {found.classes} classes without names, but the data has "
        f"{spec.number_of_classes}{listed}. Say which is which: class_names=names.txt, a file with "
        f"{found.classes} lines, the names of the model's classes in the order of its logits. The "
        "classes of the data are looked up there."
    )


def read_class_names(file: Path | None, number: int, path: Path) -> tuple[str, ...] | None:
    """The names in a text file, one in a line; None without a file."""
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
