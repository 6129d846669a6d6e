"""Attention in few bytes: companded rows, deflated as they are added.

A weight a of a row with maximum m becomes round(levels · √(a / m)): small weights, of which there
are many, keep their proportions. It is read as scale · (code / levels)², with a scale near m that
keeps the sum of the row. Weights whose error exceeds the tolerance are listed with their exact
value. With 4 bits so are the few that are far above their row (a register, an outlier): on their
scale all others would be 0 or 1.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Reference = dict[str, Any]
"""Position of numbers in the stream: their first byte, count and type."""
Numbers = npt.NDArray[Any]
ROW_PER_TOWER = 128
"""At most one weight in this number is listed because it is far above its row."""
TOWERING = 4
"""The ratio to the other weights from which a weight counts as far above them."""


@dataclass
class RowEncoder:
    """Numbers one after another, deflated as they are added."""

    limit: int | None
    largest_error: float = 0.0
    _chunks: list[bytes] = field(default_factory=list)
    _size: int = 0
    _raw: int = 0
    # Level 9 takes three times as long for a hundredth less.
    _deflate: Any = field(default_factory=lambda: zlib.compressobj(6))

    @property
    def full(self) -> bool:
        """Whether the limit is exceeded."""
        return self.limit is not None and self._size > self.limit

    def add(self, numbers: Numbers) -> Reference:
        """Add numbers and return their position."""
        kind = {"u1": "u8", "i4": "i32", "f4": "f32"}[numbers.dtype.str[1:]]
        reference = {"at": self._raw, "count": int(numbers.size), "type": kind}
        content = np.ascontiguousarray(numbers).tobytes()
        content += bytes(-len(content) % 4)  # typed views in the browser begin at whole words
        self._raw += len(content)
        if not self.full:
            self._keep(self._deflate.compress(content))
        return reference

    def add_floats(self, values: Tensor) -> Reference:
        """Add a tensor in single precision."""
        return self.add(as_array(values).ravel())

    def add_rows(self, values: Numbers, bits: int, tolerance: float | None) -> dict[str, Any]:
        """Add rows (r s) of numbers from 0, companded; None: without corrections."""
        levels = 2**bits - 1
        maxima = values.max(axis=1, keepdims=True)
        if bits == 4 and tolerance is not None:
            maxima = _without_towers(values, maxima)
        towers = values > maxima
        shares = np.minimum(values / np.where(maxima > 0, maxima, 1), 1)
        codes = np.rint(np.sqrt(shares) * levels).astype(np.uint8)
        shape = np.square(codes / np.float32(levels), dtype=np.float32)
        limit = np.inf if tolerance is None else tolerance
        wrong = towers | (np.abs(shape * maxima - values) > limit)
        # The rest of a row is scaled to keep the row's sum: rounding must not change its mass.
        have, want = (np.where(wrong, 0, v).sum(axis=1, keepdims=True) for v in (shape, values))
        scales = np.where(have > 0, want / np.where(have > 0, have, 1), maxima).astype(np.float32)
        off = np.abs(shape * scales - values)
        wrong |= off > limit
        rows: dict[str, Any] = {
            "rows": values.shape[0],
            "length": values.shape[1],
            "bits": bits,
            "codes": self.add(_nibbles(codes) if bits == 4 else codes),
            "scales": self.add(scales),
        }
        if tolerance is not None:
            places = np.flatnonzero(wrong)
            # Differences are small numbers, which deflate better than positions.
            rows["corrected"] = self.add(np.diff(places, prepend=0).astype(np.int32))
            rows["corrections"] = self.add(values.ravel()[places].astype(np.float32))
            self.largest_error = max(self.largest_error, float(np.where(wrong, 0, off).max()))
        return rows

    def finish(self) -> bytes:
        """The whole stream."""
        self._keep(self._deflate.flush())
        return b"".join(self._chunks)

    def _keep(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)


def _without_towers(values: Numbers, maxima: Numbers) -> Numbers:
    """The maximum of each row without the few weights that are far above the others."""
    few = values.shape[1] // ROW_PER_TOWER
    if few == 0:
        return maxima
    rest = np.partition(values, -few - 1, axis=1)[:, -few - 1, None]
    return np.where(maxima > TOWERING * rest, rest, maxima)


def _nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    flat = codes.ravel()
    flat = np.pad(flat, (0, flat.size % 2))
    return (flat[0::2] | (flat[1::2] << 4)).astype(np.uint8)


def as_array(values: Tensor) -> Numbers:
    """On the CPU, floating-point numbers in single precision."""
    values = values.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()
