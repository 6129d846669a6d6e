"""Weights of other projects, evaluated on pictures that the call names."""

from pathlib import Path
from typing import Literal

import torch

from vision.checkpoints.load import open_model
from vision.checkpoints.reading import read_raw
from vision.config import ConfigError
from vision.data.build import describe
from vision.data.configs import DataConfig, PreprocessConfig
from vision.data.preprocess import resolve_preprocess
from vision.data.wordnet import imagenet_synsets, readable_names
from vision.evaluation.stored import Stored, find_checkpoint, load_stored

HUBS = ("timm:", "hf:")
AUTO = PreprocessConfig(mean="auto", std="auto", interpolation="auto", crop_ratio="auto")


def locate(place: str, data: DataConfig | None) -> Path:
    """The file that a checkpoint's name stands for; a hub's name, or a foreign folder, for itself.

    A foreign file does not say which pictures it is for, so that `data` must do so.
    """
    if place.startswith(HUBS):
        if data is None:
            raise ConfigError(f"checkpoint={place} needs data=…: the pictures to evaluate it on.")
        return Path(place)
    if data is not None and (Path(place) / "config.json").is_file() and not _is_run(Path(place)):
        return Path(place)
    return find_checkpoint(Path(place))


def _is_run(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir()


def open_stored(
    path: Path,
    weights: Literal["auto", "raw", "ema"],
    data: DataConfig | None,
    device: torch.device,
) -> tuple[Stored, tuple[str, ...]]:
    """The model of a checkpoint of this project; or, where pictures are named, of any known one.

    Also what a reader has to know: what a foreign file does not tell and was assumed.
    """
    if data is None or (path.is_file() and read_raw(path).container == "vision"):
        return load_stored(path, weights, device), ()
    source = str(path) if str(path).startswith(HUBS) else path
    model, inferred, report = open_model(source, weights=weights, device=device)
    if inferred.classes == 0:
        raise ConfigError(f"checkpoint: {path} has no head, so that it tells no classes.")
    known = [(inferred.preprocess_origin, inferred.preprocess)]
    preprocess = resolve_preprocess(AUTO, inferred.image_size, inferred.channels, known)
    stored = Stored(
        path=path,
        step=0,
        weights="ema" if "ema" in " ".join(report.path_taken) else "raw",
        model=model,
        preprocess=preprocess,
        classes=inferred.class_names or _class_names(inferred.classes, data, path),
        data=data,
    )
    notes = (f"{path.name}: weights of {inferred.layout}", *report.assumed, *report.warnings)
    return stored, notes


def _class_names(number: int, data: DataConfig, path: Path) -> tuple[str, ...]:
    """Names for a head without names: ImageNet's for 1,000 classes, or the data's own."""
    if number == 1000:
        return readable_names(imagenet_synsets())
    spec = describe(data)
    if spec.classes is not None and len(spec.classes) == number:
        return spec.classes
    raise ConfigError(
        f"checkpoint: {path} has {number} classes without names, but the data has "
        f"{spec.number_of_classes}."
    )
