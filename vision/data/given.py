"""Images that a Python program gives: a `torch.utils.data.Dataset` or a list of (image, label).

An image is a path, an encoded file as bytes, a Pillow image, or a uint8 array or tensor; a label is
an int from 0. Anything else is refused before training starts, by its place in the data.
"""

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from vision.config import ConfigError, shorten
from vision.data.configs import SPLITS, Split
from vision.data.images.decode import UnreadableImageError, decode
from vision.data.sources.source import Source, StoredImage, content_of
from vision.files import read_file
from vision.terminal import tracked

CHANNELS = (1, 3, 4)
"""Grey, RGB and RGB with transparency."""
_READ, _READ_TWICE = 64, 8
"""Images of each split that are read before the training: for the fingerprint, and to see whether a
data set gives the same image each time."""


class Dataset(Protocol):
    """What is needed of a data set; `torch.utils.data.Dataset`s with a length and lists have it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(eq=False, repr=False)
class GivenSource(Source):
    """A `Source` over a data set of (image, label)."""

    origin: str
    dataset: Dataset

    @property
    def in_memory(self) -> bool:
        """Whether images are not to be kept once more: all but those of files."""
        return not (isinstance(self.dataset, list) and _path(self.dataset[0][0]))

    def name(self, index: int) -> str:
        """Return the path of a file, otherwise the data set's name and the index."""
        if isinstance(self.dataset, list) and (path := _path(self.dataset[index][0])):
            return str(path)
        return f"{self.origin}[{index}]"

    def read(self, index: int) -> StoredImage:
        """Return the image. Its label must be the one that was read before the training."""
        image, label = _sample(self.dataset, self.origin, index)
        place = f"{self.origin}[{index}]"
        if _label(label, place, self.classes) != self.labels[index]:
            raise ConfigError(
                f"dataset: {place} has the label {label}, but its `targets` say "
                f"{self.labels[index]}. Both must be the same, also after a target_transform."
            )
        return _stored(image, place, self.channels)


@dataclass(frozen=True)
class GivenImages:
    """The images of a run that a program gives."""

    splits: Mapping[Split, GivenSource]
    """train, and val unless its images are taken from those of train."""
    label: str
    """The class of the data set; `images` for a list."""
    fingerprint: str


def given_images(
    train: Dataset, val: Dataset | None, classes: Sequence[str] | None, channels: int
) -> GivenImages:
    """Check the data of a program, and read its labels.

    Without `classes` they have the names that the data set itself gives them, else their numbers.
    """
    listed = {"dataset": _listed(train, "dataset")}
    if val is not None:
        listed["validation"] = _listed(val, "validation")
    names = _class_names(train) if classes is None else _checked_names(classes)
    labels = {origin: _labels(dataset, origin, names or ()) for origin, dataset in listed.items()}
    if names is None:
        count = 1 + max(int(found.max()) for found in labels.values())
        missing = np.flatnonzero(np.bincount(labels["dataset"], minlength=count) == 0).tolist()
        if missing:
            raise ConfigError(
                f"dataset: labels up to {count - 1} are used, but no image of `dataset` has the "
                f"label {shorten([str(i) for i in missing])}. Labels count from 0; "
                "classes=[…] names them all where some have no images."
            )
        names = tuple(str(i) for i in range(count))
    splits: dict[Split, GivenSource] = {}
    digest = hashlib.sha256("\n".join(names).encode())
    for split, (origin, dataset) in zip(SPLITS[:2], listed.items(), strict=False):
        source = GivenSource(labels[origin], names, channels, origin, dataset)
        splits[split] = source
        _digest(source, digest)
    own = getattr(train, "dataset", train) if isinstance(train, Subset) else train
    label = "images" if isinstance(train, list | tuple) else type(own).__name__
    return GivenImages(splits, label, digest.hexdigest()[:16])


def _listed(dataset: Dataset, origin: str) -> Dataset:
    """The data set, checked to have a length and images by index; a sequence becomes a list."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(
        dataset, str | bytes | Mapping
    ):
        raise ConfigError(
            f"{origin}: a {type(dataset).__name__} is not a data set; expected a "
            "torch.utils.data.Dataset with a length, or a list of (image, label)."
        )
    if len(dataset) == 0:
        raise ConfigError(f"{origin}: it has no images.")
    if not isinstance(dataset, list | tuple):
        return dataset
    for index in range(len(dataset)):
        image, _ = _sample(dataset, origin, index)
        if isinstance(image, Image.Image):
            image.load()  # or several workers would read from one open file
    return list(dataset)


def _sample(dataset: Dataset, origin: str, index: int) -> tuple[Any, Any]:
    sample = dataset[index]
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    found = type(sample).__name__
    if isinstance(sample, tuple | list):
        found += f" of {len(sample)}"
    elif isinstance(sample, Mapping):
        found += f" with {shorten([str(key) for key in sample])}"
    raise ConfigError(f"{origin}[{index}] is a {found}; expected (image, label).")


# Labels -----------------------------------------------------------------------------------------


def _labels(dataset: Dataset, origin: str, classes: Sequence[str]) -> NDArray[np.int64]:
    """The label of every image: from a list or `targets`, else by reading everything once."""
    known = _known_labels(dataset)
    if known is None:
        title = f"Reading the labels of {len(dataset):,} images ({origin} has no `targets`)"
        every = (_sample(dataset, origin, index)[1] for index in range(len(dataset)))
        known = tracked(every, title, len(dataset))
    found = [_label(label, f"{origin}[{i}]", classes) for i, label in enumerate(known)]
    return np.array(found, dtype=np.int64)


def _known_labels(dataset: Dataset) -> Iterable[Any] | None:
    """The labels that a data set has beside its images; None if it has to be read for them."""
    if isinstance(dataset, list):
        return [label for _, label in dataset]
    if isinstance(dataset, TensorDataset):
        return _numbers(dataset.tensors[-1])
    if isinstance(dataset, Subset):
        whole = _known_labels(dataset.dataset)  # type: ignore[arg-type]
        if whole is None:
            return None
        whole = list(whole)
        return [whole[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [_known_labels(part) for part in dataset.datasets]  # type: ignore[arg-type]
        return None if None in parts else [label for part in parts for label in part or ()]
    targets = getattr(dataset, "targets", None)
    if targets is None or not hasattr(targets, "__len__") or len(targets) != len(dataset):
        return None
    return _numbers(targets)


def _numbers(labels: Any) -> Iterable[Any]:
    return labels.tolist() if isinstance(labels, Tensor | np.ndarray) else labels


def _label(label: Any, place: str, classes: Sequence[str]) -> int:
    try:
        number = operator.index(label)
    except TypeError:
        hint = ""
        if isinstance(label, str):
            hint = " Use the position of the name, and give the names as classes=[…]."
        raise ConfigError(
            f"{place} has the label {label!r:.60} ({type(label).__name__}); expected an int from "
            f"0.{hint}"
        ) from None
    if number < 0 or (classes and number >= len(classes)):
        expected = f"0 to {len(classes) - 1} for {len(classes)} classes" if classes else "from 0"
        raise ConfigError(f"{place} has the label {number}; expected {expected}.")
    return number


def _class_names(dataset: Dataset) -> tuple[str, ...] | None:
    """The names that a data set itself has for its classes, as those of torchvision do."""
    if isinstance(dataset, Subset):
        return _class_names(dataset.dataset)  # type: ignore[arg-type]
    if isinstance(dataset, ConcatDataset):
        found = {_class_names(part) for part in dataset.datasets}  # type: ignore[arg-type]
        return found.pop() if len(found) == 1 else None
    names = getattr(dataset, "classes", None)
    named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return tuple(names) if names and named else None


def _checked_names(classes: Sequence[str]) -> tuple[str, ...]:
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise ConfigError(f"classes: {classes!r:.100} is not a list of names.")
    repeated = sorted({name for name in classes if list(classes).count(name) > 1})
    if repeated:
        raise ConfigError(f"classes: {shorten(repeated)} occurs more than once.")
    return tuple(classes)


# Images -----------------------------------------------------------------------------------------


def _path(image: Any) -> Path | None:
    return Path(image) if isinstance(image, str | Path) else None


def _stored(image: Any, place: str, channels: int) -> StoredImage:
    """An image as sources give it: an encoded file, or pixels."""
    if path := _path(image):
        return read_file(path)
    if isinstance(image, bytes):
        return image
    if isinstance(image, Image.Image):
        return decode(image, channels, place)
    if isinstance(image, np.ndarray | Tensor):
        return _rows_first(image, place)
    raise ConfigError(
        f"{place} has a {type(image).__name__} as its image; expected a path, bytes of a file, a "
        "Pillow image, or a uint8 array or tensor."
    )


def _rows_first(image: NDArray[Any] | Tensor, place: str) -> NDArray[np.uint8]:
    """Pixels (height, width, channels) or (height, width), from either order of the axes."""
    is_tensor = isinstance(image, Tensor)
    kind, shape = "a tensor" if is_tensor else "an array", tuple(image.shape)
    pixels: NDArray[Any] = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    if pixels.dtype != np.uint8:
        raise ConfigError(
            f"{place} is {kind} of {pixels.dtype} {shape}; expected uint8 pixels, as they are "
            "before ToTensor and normalisation: preprocess.… and augment.… do both."
        )
    if pixels.ndim == 3 and 0 not in shape:
        first, last = shape[0] in CHANNELS, shape[2] in CHANNELS
        if first and (is_tensor or not last):
            return np.ascontiguousarray(pixels.transpose(1, 2, 0))
        if last:
            return pixels
    if pixels.ndim == 2 and 0 not in shape:
        return pixels
    raise ConfigError(
        f"{place} is {kind} {shape}; expected (height, width, channels) or (channels, height, "
        "width) with 1, 3 or 4 channels, or (height, width)."
    )


def _digest(source: GivenSource, digest: "hashlib._Hash") -> None:
    """Add labels and some of the images, which shows on the way that they can be used."""
    digest.update(source.labels.tobytes())
    count = len(source)
    chosen = np.unique(np.linspace(0, count - 1, min(count, _READ)).astype(np.int64)).tolist()
    for number, index in enumerate(chosen):
        try:
            content = content_of(source.read(index))
            same = number >= _READ_TWICE or content == content_of(source.read(index))
        except OSError as error:  # data.on_error decides on it, in training
            if isinstance(error, UnreadableImageError):
                continue
            raise ConfigError(f"{source.name(index)} cannot be read: {error.strerror}.") from error
        if not same:
            raise ConfigError(
                f"{source.origin}[{index}] is another image each time: a random transformation. "
                "Leave it out: augment=… draws them anew in every epoch, in a way that a run that "
                "is resumed repeats."
            )
        digest.update(hashlib.sha256(content).digest())
