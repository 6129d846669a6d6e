"""A data set: labelled images by index, as they are stored, in memory, or part of another set."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64] | NDArray[np.int8]
"""One class per image: int64 (n,). Any number of classes: int8 (n, classes), 1 where an image has a
class, 0 where it has not, −1 where that is unknown.
"""

StoredImage = bytes | NDArray[np.uint8]
"""An encoded file (JPEG, PNG, …) as it is on disk, or pixels (height, width, channels)."""


def content_of(image: StoredImage) -> bytes:
    """Bytes that are equal for equal images."""
    return image if isinstance(image, bytes) else str(image.shape).encode() + image.tobytes()


@dataclass(eq=False, repr=False)
class Source(ABC):
    """One split of a data set.

    Every source has an index, even tar shards (indexed once, then read by seek). So shuffling is
    one seeded permutation, and one integer is the position in an epoch.
    """

    labels: Labels
    """Label or labels of every image; known without reading any image."""
    classes: tuple[str, ...]
    channels: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def multi_label(self) -> bool:
        """Whether an image may have any number of classes."""
        return self.labels.ndim == 2

    @property
    def in_memory(self) -> bool:
        """Whether `read` only looks up pixels."""
        return False

    @abstractmethod
    def name(self, index: int) -> str:
        """Return where a user finds the image: a path, or `shard.tar:member`."""

    @abstractmethod
    def read(self, index: int) -> StoredImage:
        """Return the image. Raise OSError with the image's name if it cannot be read.

        Safe to call in any worker process.
        """


@dataclass(eq=False, repr=False)
class ArraySource(Source):
    """A `Source` over one array (images, height, width, channels)."""

    origin: str
    images: NDArray[np.uint8]
    in_memory = True

    def name(self, index: int) -> str:
        """Return the origin of the array and the position in it."""
        return f"{self.origin}:{index}"

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return the image: a view, not to be written to."""
        return self.images[index]


class Subset(Source):
    """A `Source` of some images of another one."""

    def __init__(self, source: Source, indices: NDArray[np.int64]) -> None:
        super().__init__(source.labels[indices], source.classes, source.channels)
        self.source = source
        self.indices = indices

    @property
    def in_memory(self) -> bool:
        """As of the whole source."""
        return self.source.in_memory

    def name(self, index: int) -> str:
        """Return the name in the whole source."""
        return self.source.name(int(self.indices[index]))

    def read(self, index: int) -> StoredImage:
        """Return the image of the whole source."""
        return self.source.read(int(self.indices[index]))


class Unlabelled(Subset):
    """All images of a source, without their classes."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, np.arange(len(source)))
        self.labels, self.classes = np.zeros(len(source), dtype=np.int64), ()


def class_sizes(labels: Labels, classes: int) -> NDArray[np.int64]:
    """Return the number of images of each class: (classes,)."""
    if labels.ndim == 2:
        return (labels == 1).sum(axis=0, dtype=np.int64)
    return np.bincount(labels, minlength=classes)


def label_names(label: int | NDArray[np.int8], classes: tuple[str, ...]) -> str:
    """Return the class of an image, or its classes as `a;b`."""
    if isinstance(label, np.ndarray) and label.ndim:
        return ";".join(classes[i] for i in np.flatnonzero(label == 1))
    return classes[int(label)]


def take(source: Source, indices: NDArray[np.int64]) -> Source:
    """Return some images of a source; the source itself if they are all, in order."""
    if len(indices) == len(source) and np.array_equal(indices, np.arange(len(source))):
        return source
    return Subset(source, indices)
