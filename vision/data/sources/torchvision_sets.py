"""Data sets of torchvision as sources. The only file of this folder that imports torchvision."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
from numpy.typing import NDArray
from torchvision import datasets  # type: ignore[import-untyped]

from vision.config import ConfigError
from vision.data.configs import Split, TorchvisionConfig
from vision.data.images.decode import decode
from vision.data.sources.folder import FolderSource
from vision.data.sources.known_sets import torchvision_set
from vision.data.sources.packed import PackedStrings
from vision.data.sources.source import ArraySource, Source

_PAIRS = ("samples", "_samples", "imgs")
"""Attributes in which torchvision's classes keep (file, label) of every image."""


@dataclass(eq=False, repr=False)
class TorchvisionSource(Source):
    """A `Source` over a data set of torchvision that keeps neither files nor one array."""

    origin: str
    dataset: Any

    def name(self, index: int) -> str:
        """Return the data set and the position in it."""
        return f"{self.origin}:{index}"

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return the image's pixels."""
        return decode(self.dataset[index][0], self.channels, self.name(index))


def read_torchvision(config: TorchvisionConfig, split: Split) -> Source:
    """Read one of the splits that the set is published in (`KnownSet.arguments`)."""
    known = torchvision_set(config.name)
    dataset = _open(config, split)
    labels = _labels(dataset)
    if len(labels) == 0:
        raise ConfigError(f"data.root: {config.name} in {config.root} has no images in {split}.")
    names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)
    classes = tuple(map(str, names or known.classes or ()))
    if labels.min() < 0 or labels.max() >= len(classes):
        # Sets without names, or with labels that do not count from 0, such as numbers of objects.
        values, labels = np.unique(labels, return_inverse=True)
        classes = tuple(map(str, values.tolist()))
    paths = _paths(dataset)
    if paths is not None:
        return FolderSource(labels, classes, known.channels, Path(), PackedStrings(paths))
    origin = f"{config.name}:{split}"
    pixels = _array(dataset, known.channels)
    if pixels is not None:
        return ArraySource(labels, classes, known.channels, origin, pixels)
    return TorchvisionSource(labels, classes, known.channels, origin, dataset)


def _open(config: TorchvisionConfig, split: Split) -> Any:
    """Return torchvision's data set, or raise a ConfigError that says what is missing where."""
    constructor = getattr(datasets, config.name)
    arguments = {**torchvision_set(config.name).arguments[split], **config.options}
    accepted = inspect.signature(constructor).parameters
    downloads = hasattr(constructor, "download") or "download" in accepted
    if downloads:
        arguments["download"] = config.download
    try:
        return constructor(config.root, **arguments)
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        if isinstance(error, TypeError | ValueError) and config.options:
            raise ConfigError(
                f"data.options: torchvision's {config.name} does not take {config.options}: {error}"
            ) from error
        if isinstance(error, TypeError):
            raise
        raise _not_there(config, error, downloads) from error


def _not_there(config: TorchvisionConfig, error: Exception, downloads: bool) -> ConfigError:
    """Say what is missing where. torchvision has no error class of its own for this."""
    if isinstance(error, URLError) or (
        config.download and not isinstance(error, FileNotFoundError)
    ):
        advice = "The download failed; where there is no network, put the files there yourself."
    elif downloads:
        advice = "Or let torchvision download it: data.download=true."
    else:
        advice = "torchvision cannot download this set."
    reason = str(error).rstrip(".")
    return ConfigError(
        f"data.root: {config.name} could not be read from {config.root}: {reason}. Expected in "
        f"{config.root}: {torchvision_set(config.name).place}. {advice}"
    )


def _labels(dataset: Any) -> NDArray[np.int64]:
    """Return the label of every image, if possible without reading the images."""
    values = _per_image(dataset, "targets", "_labels", "labels", "y")
    if values is None:
        pairs = _per_image(dataset, *_PAIRS)
        if pairs is not None:
            values = [label for _, label in pairs]
        elif isinstance(dataset, datasets.INaturalist) and dataset.target_type == ["full"]:
            values = [label for label, _ in dataset.index]
        else:
            values = [dataset[index][1] for index in range(len(dataset))]
    return np.asarray(values).astype(np.int64).reshape(-1)


def _paths(dataset: Any) -> list[str] | None:
    """Return the files of the images, if the set keeps one for each."""
    files = _per_image(dataset, "_image_files", "_images")
    pairs = _per_image(dataset, *_PAIRS)
    if files is None and pairs and isinstance(pairs[0][0], str | Path):
        files = [file for file, _ in pairs]
    return None if files is None else [str(file) for file in files]


def _per_image(dataset: Any, *attributes: str) -> Any:
    """Return the first of these attributes that has an entry for every image."""
    values = (getattr(dataset, name, None) for name in attributes)
    return next((v for v in values if v is not None and len(v) == len(dataset)), None)


def _array(dataset: Any, channels: int) -> NDArray[np.uint8] | None:
    """Return all pixels, if the set keeps them in one array of the layout needed here."""
    data = getattr(dataset, "data", None)
    if data is None or not hasattr(data, "shape"):
        return None
    pixels = np.asarray(data)
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim != 4 or pixels.dtype != np.uint8 or pixels.shape[3] != channels:
        return None
    # Only if an element is what the set itself would return.
    return pixels if np.array_equal(pixels[0], decode(dataset[0][0], channels, "")) else None
