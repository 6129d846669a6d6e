"""The interface of a data set: labelled images by index, as they are stored."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

StoredImage = bytes | NDArray[np.uint8]
"""An encoded file (JPEG, PNG, …) as it is on disk, or pixels (height, width, channels)."""


@dataclass(eq=False, repr=False)
class Source(ABC):
    """One split of a data set.

    Every source has an index, even tar shards (indexed once, then read by seek). So shuffling is
    one seeded permutation, and one integer is the position in an epoch.
    """

    labels: NDArray[np.int64]
    """Label of every image; known without reading any image."""
    classes: tuple[str, ...]
    channels: int

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, index: int) -> str:
        """Return where a user finds the image: a path, or `shard.tar:member`."""

    @abstractmethod
    def read(self, index: int) -> StoredImage:
        """Return the image. Raise OSError with the image's name if it cannot be read.

        Safe to call in any worker process.
        """
