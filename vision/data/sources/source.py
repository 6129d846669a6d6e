"""What every data set is to the rest of the package: labelled images by index, neither decoded
nor changed.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

StoredImage = bytes | NDArray[np.uint8]
"""An encoded file (JPEG, PNG, …) as it lies on the disk, or pixels (height, width, channels)."""


@runtime_checkable
class Source(Protocol):
    """One split of a data set.

    Every source is indexed, tar shards included (they are indexed once and read by seek). So one
    seeded permutation of the indices is a shuffle, and one integer says where an epoch stands.
    """

    classes: tuple[str, ...]
    channels: int
    labels: NDArray[np.int64]
    """Label of every image; known without reading an image."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Where the image comes from, as a person would look it up: a path, or
        `shard.tar:member`.
        """
        ...

    def read(self, index: int) -> StoredImage:
        """The image. Raises OSError (path named) if it cannot be read. Safe in any worker
        process.
        """
        ...
