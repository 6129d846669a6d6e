"""Parts of a file: tensors that look straight into it, and the members of a zip archive.

A file is mapped into memory, so that opening it copies nothing. The mapping is private: whoever
changes such a tensor gets a copy of the page, the file stays. The members of an archive, as torch
and numpy write them, are checked before any is read.
"""

import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

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
UNPACKED_LIMIT = 32
"""Times the archive's size. Weights hardly shrink when they are compressed."""
_MEMBER_LIMIT = 200_000
_LOCAL = struct.Struct("<4s2xH18xHH")
_UTF8 = 0x800
"""The flag of a member whose name is in UTF-8."""
_DESCRIPTOR = 24
"""Largest number of bytes behind a member that belong to it: sizes and checksum once more."""


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


class Member(NamedTuple):
    """One file in the archive."""

    start: int
    """Where its bytes start in the archive's file."""
    packed: int
    size: int
    compressed: bool
    crc: int | None
    """CRC-32 of its bytes, unpacked; None: the archive was written without checksums."""


def read_members(file: BufferedReader, size: int) -> dict[str, Member]:
    """Every member by name, in the archive's order. Raises MalformedError."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
        raise MalformedError(
            f"it is a zip archive without a readable end ({error}), perhaps not copied completely"
        ) from error
    if len(entries) > _MEMBER_LIMIT:
        raise MalformedError(f"it has {len(entries)} members; at most {_MEMBER_LIMIT} are possible")
    # torch, asked for no checksums, writes zeros in their place (set_crc32_options).
    checksums = any(entry.CRC for entry in entries)
    members: dict[str, Member] = {}
    ranges: list[tuple[int, int]] = []
    for entry in entries:
        name = entry.filename
        if name in members:
            raise MalformedError(f"its member '{name}' is there twice")
        if entry.flag_bits & 1:
            raise MalformedError(f"its member '{name}' is encrypted")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise MalformedError(f"its member '{name}' is compressed in an unknown way")
        compressed = entry.compress_type == zipfile.ZIP_DEFLATED
        if not compressed and entry.compress_size != entry.file_size:
            raise MalformedError(f"its member '{name}' has two sizes")
        start = _start(file, entry.header_offset, entry.orig_filename)
        crc = entry.CRC if checksums else None
        members[name] = Member(start, entry.compress_size, entry.file_size, compressed, crc)
        ranges.append((entry.header_offset, start + entry.compress_size))
    _check_places(file, ranges, size)
    unpacked = sum(member.size for member in members.values() if member.compressed)
    if unpacked > UNPACKED_LIMIT * size:
        raise MalformedError(
            f"it would unpack to {unpacked} bytes, more than {UNPACKED_LIMIT} times its size"
        )
    return members


def read_member(file: BufferedReader, name: str, member: Member, limit: int) -> bytes:
    """The bytes of a small member, unpacked and checked."""
    if max(member.size, member.packed) > limit:
        raise MalformedError(f"its member '{name}' has {member.size} bytes; {limit} are possible")
    file.seek(member.start)
    data = file.read(member.packed)
    if member.compressed:
        return unpack(name, member, data)
    _check_crc(name, member, zlib.crc32(data))
    return data


def unpack(name: str, member: Member, data: bytes) -> bytes:
    """The bytes of a compressed member, never more than it claims to have, checked."""
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        unpacked = machine.decompress(data, max(member.size, 1))
    except zlib.error as error:
        raise _damaged(name, f"it cannot be unpacked ({error})") from error
    if len(unpacked) != member.size:
        raise _damaged(name, f"it unpacks to {len(unpacked)} bytes instead of {member.size}")
    _check_crc(name, member, zlib.crc32(unpacked))
    return unpacked


def check_mapped(name: str, member: Member, memory: UntypedStorage) -> None:
    """Refuse a damaged member of a mapped file. Nothing is copied."""
    view = torch.empty(0, dtype=torch.uint8).set_(memory, member.start, (member.size,), (1,))
    _check_crc(name, member, zlib.crc32(view.numpy().data))


def _check_crc(name: str, member: Member, found: int) -> None:
    """Refuse a member whose bytes are not those that were written. `found` is their CRC-32."""
    if member.crc is not None and found != member.crc:
        raise _damaged(name, f"its checksum is {found:08x} instead of {member.crc:08x}")


def _damaged(name: str, how: str) -> MalformedError:
    return MalformedError(
        f"its member '{name[:100]}' is damaged: {how}; download the file or copy it again"
    )


def _start(file: BufferedReader, header: int, name: str) -> int:
    """Where a member's bytes start: behind its own header, whose length the directory lacks."""
    if header < 0:
        raise MalformedError(f"its member '{name[:100]}' has no place")
    file.seek(header)
    local = file.read(_LOCAL.size)
    if len(local) < _LOCAL.size or not local.startswith(b"PK\x03\x04"):
        raise MalformedError(f"its member '{name[:100]}' is not where the directory says")
    _, flags, name_length, extra_length = _LOCAL.unpack(local)
    found = file.read(name_length).decode("utf-8" if flags & _UTF8 else "cp437", "replace")
    if found != name:  # the name of an array is only here: a wrong one would be a missing tensor
        raise MalformedError(
            f"its member '{found[:100]}' has the name '{name[:100]}' in the directory; download "
            f"the file or copy it again"
        )
    return header + _LOCAL.size + int(name_length) + int(extra_length)


def _check_places(file: BufferedReader, ranges: list[tuple[int, int]], size: int) -> None:
    """Every member has bytes of its own, since many members that share some are a bomb, and the
    members fill the archive up to its directory: a directory may have lost one.
    """
    stop = 0
    for start, end in sorted(ranges):
        if start < stop or end > size:
            raise MalformedError("its members overlap or reach beyond its end")
        if start - stop > (_DESCRIPTOR if stop else 0):
            raise _incomplete(stop, start)
        stop = end
    file.seek(stop)
    if b"PK\x01\x02" not in file.read(_DESCRIPTOR + 4):
        raise _incomplete(stop, size)


def _incomplete(start: int, stop: int) -> MalformedError:
    return MalformedError(
        f"its directory has no member for the bytes from {start} to {stop}; download the file or "
        f"copy it again"
    )
