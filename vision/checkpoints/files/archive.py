"""The members of a zip archive, as torch and numpy write them, checked before any is read."""

import struct
import zipfile
import zlib
from io import BufferedReader
from typing import NamedTuple

from vision.checkpoints.errors import MalformedError

UNPACKED_LIMIT = 32
"""Times the archive's size. Weights hardly shrink when they are compressed."""
_MEMBER_LIMIT = 200_000
_LOCAL = struct.Struct("<4s2xH18xHH")
_UTF8 = 0x800
"""The flag of a member whose name is in UTF-8."""
_DESCRIPTOR = 24
"""Largest number of bytes behind a member that belong to it: sizes and checksum once more."""


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
    check_crc(name, member, zlib.crc32(data))
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
    check_crc(name, member, zlib.crc32(unpacked))
    return unpacked


def check_crc(name: str, member: Member, found: int) -> None:
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
