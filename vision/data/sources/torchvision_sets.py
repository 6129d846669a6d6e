"""torchvision's classification data sets behind the `Source` interface. The only file here that
imports torchvision.
"""

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
from vision.data.sources.arrays import ArraySource
from vision.data.sources.folder import FolderSource
from vision.data.sources.known_sets import facts
from vision.data.sources.packed import PackedStrings
from vision.data.sources.source import Source, StoredImage


@dataclass(eq=False, repr=False)
class TorchvisionSource:
    """A `Source` of what a torchvision data set returns, for those that keep neither files nor one
    array.
    """

    origin: str
    dataset: Any
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    channels: int

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """The data set and the place in it."""
        return f"{self.origin}:{index}"

    def read(self, index: int) -> StoredImage:
        """The image's pixels."""
        return _pixels(self.dataset[index][0], self.channels)


def read_torchvision(config: TorchvisionConfig, split: Split) -> Source:
    """One of the splits that the set has by its authors' will (`Facts.arguments`)."""
    known = facts(config.name)
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
        return FolderSource(Path(), PackedStrings(paths), labels, classes, known.channels)
    origin = f"{config.name}:{split}"
    pixels = _array(dataset, known.channels)
    if pixels is not None:
        return ArraySource(origin, pixels, labels, classes)
    return TorchvisionSource(origin, dataset, labels, classes, known.channels)


def _open(config: TorchvisionConfig, split: Split) -> Any:
    """The data set object, or a ConfigError that says what is missing where."""
    known = facts(config.name)
    constructor = getattr(datasets, config.name)
    accepted = inspect.signature(constructor).parameters
    arguments = dict(known.arguments[split]) | dict(config.options)
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
    """What is missing where. torchvision has no error class of its own to tell from."""
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
        f"{config.root}: {facts(config.name).place}. {advice}"
    )


def _labels(dataset: Any) -> NDArray[np.int64]:
    """The label of every image, if possible without reading the images."""
    for attribute in ("targets", "_labels", "labels", "y"):
        values = getattr(dataset, attribute, None)
        if values is not None and len(values) == len(dataset):
            return _integers(values)
    for attribute in ("samples", "_samples", "imgs"):
        pairs = getattr(dataset, attribute, None)
        if pairs is not None and len(pairs) == len(dataset):
            return _integers([label for _, label in pairs])
    if isinstance(dataset, datasets.INaturalist) and dataset.target_type == ["full"]:
        return _integers([label for label, _ in dataset.index])
    return _integers([dataset[index][1] for index in range(len(dataset))])


def _integers(values: Any) -> NDArray[np.int64]:
    return np.asarray(values).astype(np.int64).reshape(-1)


def _paths(dataset: Any) -> list[str] | None:
    """The files of the images, if the set keeps one for each."""
    for attribute in ("_image_files", "_images"):
        files = getattr(dataset, attribute, None)
        if files is not None and len(files) == len(dataset):
            return [str(file) for file in files]
    for attribute in ("samples", "_samples", "imgs"):
        pairs = getattr(dataset, attribute, None)
        if pairs and len(pairs) == len(dataset) and isinstance(pairs[0][0], str | Path):
            return [str(file) for file, _ in pairs]
    return None


def _array(dataset: Any, channels: int) -> NDArray[np.uint8] | None:
    """All pixels, if the set keeps them in one array of the layout that we need."""
    data = getattr(dataset, "data", None)
    if data is None or not hasattr(data, "shape"):
        return None
    pixels = np.asarray(data)
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim != 4 or pixels.dtype != np.uint8 or pixels.shape[3] != channels:
        return None
    # Only if an element is what the set itself would return.
    return pixels if np.array_equal(pixels[0], _pixels(dataset[0][0], channels)) else None


def _pixels(image: Any, channels: int) -> NDArray[np.uint8]:
    """A Pillow image as (height, width, channels)."""
    mode = "L" if channels == 1 else "RGB"
    pixels: NDArray[np.uint8] = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[..., None] if channels == 1 else pixels
