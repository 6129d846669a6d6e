"""Images in memory."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vision.data.sources.source import Source


@dataclass(eq=False, repr=False)
class ArraySource(Source):
    """A `Source` over one array (images, height, width, channels)."""

    origin: str
    images: NDArray[np.uint8]

    def name(self, index: int) -> str:
        """Return the origin of the array and the position in it."""
        return f"{self.origin}:{index}"

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return the image: a view, not to be written to."""
        return self.images[index]
