"""Tensors that look straight into a file: mapped into memory, so that opening it copies nothing.

The mapping is private: whoever changes such a tensor gets a copy of the page, the file stays.
"""

import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage

from vision.checkpoints.files.described import SAFETENSORS, MalformedError, check_shape, shown

TORCH_NAMES = [name for name, _ in SAFETENSORS.values()]
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (*TORCH_NAMES, "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz")
}
"""By torch's name."""
STORED_DTYPES = {name: DTYPES[torch_name] for name, (torch_name, _) in SAFETENSORS.items()}
DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
"""By the name in safetensors, and back."""
_EXPANDED_LIMIT = 2**20
"""Bytes of a tensor that repeats its storage (expand). A few bytes must not become gigabytes."""


def map_file(path: Path, size: int) -> UntypedStorage:
    """The bytes of a file, each read from the disk when it is first looked at."""
    if not size:
        return UntypedStorage(0)
    try:
        mapped = UntypedStorage.from_file(str(path), False, size)
    except RuntimeError as error:
        raise MalformedError(f"it cannot be mapped into memory ({error})") from error
    assert isinstance(mapped, UntypedStorage)
    return mapped


def part_of(memory: UntypedStorage, start: int, size: int, alignment: int) -> UntypedStorage:
    """Some bytes of a file as a storage of their own; a copy where they are not aligned."""
    if not size:
        return UntypedStorage(0)
    part = memory[start : start + size]
    return part.clone() if part.data_ptr() % alignment else part


def crc_of(memory: UntypedStorage, start: int, size: int) -> int:
    """CRC-32 of some bytes of a mapped file. Nothing is copied."""
    view = torch.empty(0, dtype=torch.uint8).set_(memory, start, (size,), (1,))
    return zlib.crc32(view.numpy().data)


def whole_tensor(storage: UntypedStorage, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """All of a storage as a tensor whose last axis is the fastest."""
    check_shape(shape)
    return torch.empty(0, dtype=dtype).set_(storage).reshape(tuple(shape))


def strided_tensor(
    storage: UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """A look at a storage that stays inside it and does not pretend to be far more than it is."""
    items = storage.nbytes() // dtype.itemsize
    count = math.prod(shape)
    if not count:  # any other shape is bounded by the storage, below
        check_shape(shape)
    steps = zip(shape, strides, strict=True)
    last = offset + sum((n - 1) * stride for n, stride in steps) if count else offset - 1
    if last >= items:
        raise MalformedError(
            f"shape {shown(shape)}, strides {shown(strides)} and offset {offset} reach item {last} "
            f"of a storage that has {items}"
        )
    if count > items and count * dtype.itemsize > _EXPANDED_LIMIT:
        raise MalformedError(f"shape {shown(shape)} repeats a storage of only {items} items")
    strides = strides if count else torch.empty(tuple(shape), device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(storage, offset, tuple(shape), tuple(strides))
