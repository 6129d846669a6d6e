"""A compact list of millions of strings."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray


class PackedStrings:
    """Strings in one array of bytes and one of offsets.

    Forked workers share both arrays. A list of strings would be copied page by page, since reading
    a Python object changes its reference count: gigabytes for ImageNet and a dozen workers.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        # File names need not be valid UTF-8; Python's own functions encode them in this way.
        encoded = [string.encode("utf-8", "surrogateescape") for string in strings]
        self.bytes: NDArray[np.uint8] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self.ends: NDArray[np.int64] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    @classmethod
    def from_arrays(cls, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> "PackedStrings":
        """Return strings from the two arrays of another object."""
        strings = cls(())
        strings.bytes, strings.ends = data, ends
        return strings

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} strings")
        start, end = self.ends[index : index + 2]
        return self.bytes[start:end].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def take(self, indices: NDArray[np.int64]) -> "PackedStrings":
        """Return the strings at these indices, without a Python object for each."""
        starts, lengths = self.ends[indices], np.diff(self.ends)[indices]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        # Byte b of the result, in string s, comes from b - ends[s] + starts[s].
        where = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
        return PackedStrings.from_arrays(self.bytes[where], ends)
