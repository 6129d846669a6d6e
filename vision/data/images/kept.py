"""Pixels of small images in memory, decoded once and shared by the workers of a loader."""

import mmap
import struct
from multiprocessing.sharedctypes import RawArray

import numpy as np

from vision.data.images.decode import Pixels

_SIZE = struct.Struct("q")
"""Height and width of an image in one number, 0 as long as its pixels are not there."""


class KeptImages:
    """A block of shared memory with a slot of equal size for every image.

    Whichever worker decodes an image first fills its slot. The size is written after the pixels;
    if two workers fill a slot at once they write the same bytes, so that no lock is needed.
    """

    def __init__(
        self, images: int, memory: int, largest: int, channels: int, forked: bool = True
    ) -> None:
        """Divide `memory` bytes among the images, at most `largest` for the pixels of each.

        Images with more pixels are not kept.
        """
        slot = min(memory // max(images, 1) - _SIZE.size, largest)
        self.slot = max(slot - slot % _SIZE.size, 0)
        self.images = images if self.slot else 0
        self.channels = channels
        size = max(self.images * (self.slot + _SIZE.size), 1)
        # Anonymous memory takes no room in /dev/shm, which is small in containers, and none at all
        # before it is written to; but only forked processes inherit it.
        self.block = mmap.mmap(-1, size) if forked else RawArray("B", size)

    def get(self, index: int) -> Pixels | None:
        """Return the pixels of an image, not to be written to; None if they are not kept."""
        if index >= self.images:
            return None
        (size,) = _SIZE.unpack_from(self.block, self._size_at(index))
        if not size:
            return None
        shape = (size >> 32, size & 0xFFFFFFFF, self.channels)
        count = shape[0] * shape[1] * shape[2]
        pixels = np.frombuffer(self.block, np.uint8, count, index * self.slot).reshape(shape)
        pixels.flags.writeable = False
        return pixels

    def put(self, index: int, pixels: Pixels) -> None:
        """Keep the pixels of an image if they fit into its slot."""
        if index >= self.images or pixels.nbytes > self.slot:
            return
        slot = np.frombuffer(self.block, np.uint8, pixels.nbytes, index * self.slot)
        slot.reshape(pixels.shape)[:] = pixels
        height, width, _ = pixels.shape
        _SIZE.pack_into(self.block, self._size_at(index), height << 32 | width)

    def _size_at(self, index: int) -> int:
        return self.images * self.slot + index * _SIZE.size
