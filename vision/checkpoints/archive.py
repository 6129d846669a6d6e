"""The members of a zip archive, checked before any is read: what torch and numpy store is one."""

import struct
import zipfile
import zlib
from io import BufferedReader
from typing import NamedTuple

from vision.checkpoints.described import MalformedError

UNPACKED_LIMIT = 32
"""Times the archive's size. Weights hardly shrink when they are compressed."""
_MEMBER_LIMIT = 200_000
_LOCAL = struct.Struct("<4s22xHH")


class Member(NamedTuple):
    """One file in the archive."""

    start: int
    """Where its bytes start in the archive's file."""
    packed: int
    size: int
    compressed: bool
    crc: int


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
        raise MalformedError(f"it has {len(entries)} members; no checkpoint has so many")
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
        start = _start(file, entry.header_offset, name)
        members[name] = Member(start, entry.compress_size, entry.file_size, compressed, entry.CRC)
        ranges.append((entry.header_offset, start + entry.compress_size))
    _check_places(ranges, size)
    unpacked = sum(member.size for member in members.values() if member.compressed)
    if unpacked > UNPACKED_LIMIT * size:
        raise MalformedError(
            f"it would unpack to {unpacked} bytes, more than {UNPACKED_LIMIT} times its size"
        )
    return members


def read_member(file: BufferedReader, name: str, member: Member, limit: int) -> bytes:
    """The bytes of a small member, unpacked."""
    if max(member.size, member.packed) > limit:
        raise MalformedError(f"its member '{name}' has {member.size} bytes; {limit} are possible")
    file.seek(member.start)
    data = file.read(member.packed)
    return unpack(name, member, data) if member.compressed else data


def unpack(name: str, member: Member, data: bytes) -> bytes:
    """The bytes of a compressed member, never more than it claims to have."""
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        unpacked = machine.decompress(data, max(member.size, 1))
    except zlib.error as error:
        raise MalformedError(f"its member '{name}' cannot be unpacked ({error})") from error
    if len(unpacked) != member.size or zlib.crc32(unpacked) != member.crc:
        raise MalformedError(f"its member '{name}' is damaged: it unpacks to something else")
    return unpacked


def _start(file: BufferedReader, header: int, name: str) -> int:
    """Where a member's bytes start: behind its own header, whose length the directory lacks."""
    if header < 0:
        raise MalformedError(f"its member '{name}' has no place")
    file.seek(header)
    local = file.read(_LOCAL.size)
    if len(local) < _LOCAL.size or not local.startswith(b"PK\x03\x04"):
        raise MalformedError(f"its member '{name}' is not where the directory says")
    _, name_length, extra_length = _LOCAL.unpack(local)
    return header + _LOCAL.size + int(name_length) + int(extra_length)


def _check_places(ranges: list[tuple[int, int]], size: int) -> None:
    """Every member has bytes of its own: many members that share some are a bomb."""
    stop = 0
    for start, end in sorted(ranges):
        if start < stop or end > size:
            raise MalformedError("its members overlap or reach beyond its end")
        stop = end
