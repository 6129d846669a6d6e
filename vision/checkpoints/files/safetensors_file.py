"""Safetensors files of any program: type, shape and place of every tensor.

    8 bytes     length of the header, little-endian
    header      JSON: a map of strings named __metadata__, and dtype, shape and place of each tensor
    data        the tensors' bytes, one after the other

The header is checked here rather than by the library, so that every mistake in it has a clear
message. This module does not import torch, so that listing runs is quick.
"""

import json
import math
from collections.abc import Sequence
from io import BufferedReader
from typing import Any, NamedTuple

from vision.checkpoints.errors import MalformedError

SAFETENSORS = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
"""Types of numbers by their names in safetensors: name in torch, and bytes."""
_HEADER_LIMIT = 16 * 2**20
"""Bytes, enough for a hundred thousand tensors. As JSON in memory it takes a multiple."""
_LENGTH_LIMIT = 2**40
"""Items along an axis."""


class Entry(NamedTuple):
    """One stored tensor: its type, its shape and its place behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_entries(file: BufferedReader, size: int) -> tuple[dict[str, Entry], dict[str, str], int]:
    """The tensors and the strings of a file, and where its data starts. Raises MalformedError."""
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise MalformedError(
            f"it has {size} bytes, but its header alone claims {length}: it is not complete"
        )
    if length > _HEADER_LIMIT:
        raise MalformedError(f"its header has {length} bytes; {_HEADER_LIMIT} are possible")
    entries, metadata = parse_header(file.read(length))
    end, size = end_of(entries), size - 8 - length
    if end != size:
        raise MalformedError(
            f"its tensors take {end} bytes, but {size} are there: it is not complete"
            if end > size
            else f"it has {size - end} bytes behind its last tensor"
        )
    return entries, metadata, 8 + length


def parse_header(text: bytes) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors, which fill the data without gaps, and the strings. Raises MalformedError."""
    try:
        header = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise MalformedError("its header is not a mapping")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MalformedError("its metadata are not strings by name")
    entries = {name: _entry(name, described) for name, described in header.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != end:
            raise MalformedError(f"the tensor '{name[:100]}' overlaps another one or leaves a gap")
        end = entry.stop
    return entries, metadata


def end_of(entries: dict[str, Entry]) -> int:
    """Bytes of all tensors together."""
    return max((entry.stop for entry in entries.values()), default=0)


def check_shape(shape: Sequence[int]) -> None:
    """Refuse what is not a shape, or the shape of more than any machine can hold."""
    if len(shape) > 64 or not all(type(n) is int and 0 <= n <= _LENGTH_LIMIT for n in shape):
        raise MalformedError(f"{shown(shape)} is not the shape of a tensor")
    if math.prod(n for n in shape if n) > 2**62:
        raise MalformedError(f"no tensor can have the shape {shown(shape)}")


def shown(values: Any) -> str:
    """A shape for a message. Anything may be in it: lists in lists would have no end."""
    first = list(values)[:8]
    items = [str(v) if type(v) is int and abs(v) < 2**64 else "?" for v in first]
    return f"[{', '.join(items)}{', …' if len(values) > 8 else ''}]"


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedError("its header names something twice")
    return found


def _entry(name: str, described: Any) -> Entry:
    match described:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise MalformedError(
                f"its header describes '{name[:100]}' without type, shape or place"
            )
    if kind not in SAFETENSORS:
        raise MalformedError(
            f"the tensor '{name[:100]}' has the type {kind[:20]}, which is not read"
        )
    try:
        check_shape(shape)
    except MalformedError as error:
        raise MalformedError(f"the tensor '{name[:100]}' cannot be: {error}") from error
    needed = math.prod(shape) * SAFETENSORS[kind][1]
    if not 0 <= start <= stop or stop - start != needed:
        raise MalformedError(
            f"the tensor '{name[:100]}' of type {kind} and shape {shape} has the bytes from "
            f"{start} to {stop}, but needs {needed}"
        )
    return Entry(kind, tuple(shape), start, stop)
