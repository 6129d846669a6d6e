"""Images that are in memory already."""

import numpy as np
from numpy.typing import NDArray


class ArraySource:
    """A `Source` over one array (images, height, width, channels)."""

    def __init__(
        self,
        origin: str,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        classes: tuple[str, ...],
    ) -> None:
        assert images.ndim == 4
        assert len(images) == len(labels)
        self.origin = origin
        self.images = images
        self.labels = labels
        self.classes = classes
        self.channels = int(images.shape[-1])

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Where the array comes from, and the place in it."""
        return f"{self.origin}:{index}"

    def read(self, index: int) -> NDArray[np.uint8]:
        """The image; a view, not to be written to."""
        return self.images[index]
