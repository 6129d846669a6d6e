"""Tensors that look straight into a file: mapped into memory, so that opening it copies nothing.

The mapping is private: whoever changes such a tensor gets a copy of the page, the file stays.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from vision.checkpoints.errors import MalformedError
from vision.checkpoints.files.safetensors_file import SAFETENSORS, check_shape, shown

DTYPES = {
    "complex128": torch.complex128,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
}
"""By torch's name."""
STORED_DTYPES: dict[str, torch.dtype] = {}
DTYPE_NAMES: dict[torch.dtype, str] = {}
"""By the name in safetensors, and back."""
for _name, (_torch_name, _) in SAFETENSORS.items():
    DTYPES[_torch_name] = STORED_DTYPES[_name] = getattr(torch, _torch_name)
    DTYPE_NAMES[STORED_DTYPES[_name]] = _name
_EXPANDED_LIMIT = 2**20
"""Bytes of a tensor that repeats its storage (expand). A few bytes must not become gigabytes."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """Tensors by flat name, and what is left."""

    tensors: dict[str, Tensor]
    """Nested mappings are joined with ".", an npz file's names keep their "/". The tensors look
    into the file where its format allows, so it must not be changed meanwhile.
    """
    extra: dict[str, Any] = field(default_factory=dict)
    """Everything that is not a tensor, as plain data. The JSON beside the weights of a hub's folder
    is under "config", "preprocessor" and "open_clip".
    """
    parts: tuple[str, ...] = ()
    """The outermost names that hold mappings: "model" in {"model": {"head.bias": …}}, but not in
    {"model.head.bias": …}.
    """
    inert: tuple[str, ...] = ()
    """Classes of which the file holds an object: kept as plain data, never built."""
    warnings: tuple[str, ...] = ()


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


def mapped_tensor(
    memory: UntypedStorage, start: int, dtype: torch.dtype, shape: Sequence[int]
) -> Tensor:
    """A tensor of a possible shape (see `check_shape`) whose last axis is the fastest."""
    part = part_of(memory, start, math.prod(shape) * dtype.itemsize, dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(part).reshape(tuple(shape))


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
