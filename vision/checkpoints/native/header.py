"""The header of this project's checkpoint files: what a file holds, without reading a tensor.

A checkpoint is one safetensors file, readable by any program that knows that format:

    8 bytes     length of the header, little-endian
    header      JSON: a map of strings named __metadata__, and dtype, shape and place of each tensor
    data        the tensors' bytes, one after the other

The map of strings holds
    vision_checkpoint   CRC-32 of the length and the header, taken with zeros in its own place
    format              "pt": other programs read there that the tensors are torch's
    record              JSON of everything that is not a tensor, with the number of its format
    aliases             JSON: name → name under which the same tensor is stored
    orders              JSON: name → order of the axes in memory, where it was not the usual one;
                        the file has the usual one (last axis fastest)
    crc32               CRC-32 of each tensor's bytes, eight hex digits each, in the header's order

The first of them comes first in the file, in every format to come, so a damaged header can be
distinguished from a header of the future. This module does not import torch, so that listing runs
is quick.
"""

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from vision.checkpoints.errors import OLDER, CheckpointError
from vision.checkpoints.files.described import SAFETENSORS, check_shape
from vision.checkpoints.native.record import Record, check_record, upgrade

MARK = b'{"__metadata__":{"vision_checkpoint":"'
HEADER_LIMIT = 100_000_000
"""Bytes; the same limit as in the safetensors library."""


class Entry(NamedTuple):
    """One stored tensor: its type, its shape and its place behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """Everything in front of the tensors' bytes."""

    record: Record
    entries: dict[str, Entry]
    aliases: dict[str, str]
    orders: dict[str, list[int]]
    checksums: dict[str, int]
    data_start: int


def read_record(path: Path) -> Record:
    """Everything that a checkpoint holds beside tensors, in today's format. Reads no tensor, so it
    takes the time of a small file.
    """
    with open_checkpoint(path) as file:
        return read_header(file, path).record


def open_checkpoint(path: Path) -> BufferedReader:
    """The file, or an error that says why not."""
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no checkpoint {path}.", error.errno) from error
    except OSError as error:
        raise unreadable(path, error) from error


def place(sizes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Entry]:
    """Where each tensor (type and shape by name) goes. Wide types come first, so that every tensor
    starts at a multiple of its item's size and other programs can map it into memory.
    """
    stop = 0
    entries = {}
    for name in sorted(sizes, key=lambda name: -SAFETENSORS[sizes[name][0]][1]):
        dtype, shape = sizes[name]
        start, stop = stop, stop + math.prod(shape) * SAFETENSORS[dtype][1]
        entries[name] = Entry(dtype, shape, start, stop)
    return {name: entries[name] for name in sizes}


def encode_header(
    entries: Mapping[str, Entry],
    aliases: Mapping[str, str],
    orders: Mapping[str, Sequence[int]],
    record: Mapping[str, Any],
    checksums: Sequence[int],
) -> bytes:
    """The header with its length in front. Its length does not depend on the checksums' values."""
    check_record(record)
    metadata = {
        "vision_checkpoint": f"{0:08x}",
        "format": "pt",
        "record": json.dumps(record, separators=(",", ":")),
        "aliases": json.dumps(aliases, separators=(",", ":")),
        "orders": json.dumps(orders, separators=(",", ":")),
        "crc32": "".join(f"{checksum:08x}" for checksum in checksums),
    }
    described = {
        name: {"dtype": e.dtype, "shape": e.shape, "data_offsets": [e.start, e.stop]}
        for name, e in entries.items()
    }
    text = json.dumps({"__metadata__": metadata, **described}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise ValueError(
            f"The record and the names of {len(entries)} tensors take {len(text)} bytes; "
            f"a safetensors header holds at most {HEADER_LIMIT}. Store large data as tensors."
        )
    length = len(text).to_bytes(8, "little")
    checksum = f"{zlib.crc32(length + text):08x}".encode()
    return length + MARK + checksum + text[len(MARK) + 8 :]


def read_header(file: BufferedReader, path: Path) -> Header:
    """Read and check the header of an opened file, and that the file is as long as it says."""
    try:
        size = os.fstat(file.fileno()).st_size
        text, data_start = _read_text(file, path, size)
    except CheckpointError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        header = _parse(text, data_start)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has an invalid header ({error!s:.200}). {OLDER}") from error
    end = data_start + max((e.stop for e in header.entries.values()), default=0)
    if size != end:
        raise cut_short(path, f"{size} bytes instead of {end}")
    return header._replace(record=upgrade(header.record, str(path)))


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """What the system says about a file, with the file's name."""
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}.", error.errno)


def cut_short(path: Path, found: str) -> CheckpointError:
    """A file that lost its end, or is longer than its header says."""
    return CheckpointError(f"{path} is not complete: {found}. {OLDER}")


def damaged(path: Path, what: str) -> CheckpointError:
    """A file with other bytes than those that were written."""
    return CheckpointError(f"{path} is damaged: the checksum of {what} is wrong. {OLDER}")


def _read_text(file: BufferedReader, path: Path, size: int) -> tuple[bytes, int]:
    """The header's JSON, checked against its checksum, and where the data starts."""
    prefix = file.read(8)
    if len(prefix) < 8:
        raise cut_short(path, f"{size} bytes")
    length = int.from_bytes(prefix, "little")
    start = file.read(min(length, len(MARK)))
    if not start.startswith(b"{") and size > 8:
        raise CheckpointError(f"{path} is not a safetensors file.")
    if length > HEADER_LIMIT:
        raise CheckpointError(
            f"{path} claims a header of {length} bytes; at most {HEADER_LIMIT} are possible. "
            f"It is damaged or not a safetensors file."
        )
    if length > size - 8:
        raise cut_short(path, f"{size} bytes, of which the header alone takes {length + 8}")
    if start != MARK:
        raise CheckpointError(
            f"{path} is a safetensors file, but not a checkpoint that this project wrote."
        )
    text = start + file.read(length - len(MARK))
    zeroed = MARK + b"0" * 8 + text[len(MARK) + 8 :]
    if f"{zlib.crc32(prefix + zeroed):08x}".encode() != text[len(MARK) : len(MARK) + 8]:
        raise damaged(path, "the header")
    return text, 8 + length


def _parse(text: bytes, data_start: int) -> Header:
    """The header's content. Raises one of many errors if it was not written by `encode_header`."""
    tensors = json.loads(text)
    metadata = tensors.pop("__metadata__")
    record, aliases, orders = (json.loads(metadata[k]) for k in ("record", "aliases", "orders"))
    entries = {
        name: Entry(t["dtype"], tuple(t["shape"]), *t["data_offsets"])
        for name, t in tensors.items()
    }
    for entry in entries.values():
        check_shape(entry.shape)
    if entries != place({name: (e.dtype, e.shape) for name, e in entries.items()}):
        raise ValueError("tensors overlap or leave gaps")
    if not set(aliases.values()) <= set(entries):
        raise ValueError("an alias of no tensor")
    if any(sorted(order) != list(range(len(entries[n].shape))) for n, order in orders.items()):
        raise ValueError("an order of axes that no tensor has")
    if not isinstance(record, dict):
        raise ValueError("a record without names")
    digits = metadata["crc32"]
    checksums = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    by_name = dict(zip(entries, checksums, strict=True))
    return Header(record, entries, aliases, orders, by_name, data_start)
