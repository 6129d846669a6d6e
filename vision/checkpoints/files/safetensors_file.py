"""Safetensors files of any program. `header.py` describes the layout.

The header is checked here rather than by the library, so that every mistake in it has a clear
message, and the tensors are mapped instead of read.
"""

import json
import math
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision.checkpoints.files.described import MalformedError, check_shape
from vision.checkpoints.files.mapped import STORED_DTYPES, map_file, part_of, whole_tensor

_HEADER_LIMIT = 16 * 2**20
"""Bytes, enough for a hundred thousand tensors. As JSON in memory it takes a multiple."""


def read_safetensors(
    path: Path, file: BufferedReader, size: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the strings of a file. Raises MalformedError."""
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise MalformedError(
            f"it has {size} bytes, but its header alone claims {length}: it is not complete"
        )
    if length > _HEADER_LIMIT:
        raise MalformedError(f"its header has {length} bytes; {_HEADER_LIMIT} are possible")
    header = _parse(file.read(length))
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MalformedError("its metadata are not strings by name")
    places = {name: _place(name, described) for name, described in header.items()}
    _check_places(places, size - 8 - length)
    memory = map_file(path, size)
    tensors = {}
    for name, (dtype, shape, start, stop) in places.items():
        part = part_of(memory, 8 + length + start, stop - start, dtype.itemsize)
        tensors[name] = whole_tensor(part, dtype, shape)
    return tensors, metadata


_Place = tuple[torch.dtype, list[int], int, int]


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise MalformedError("its header is not a mapping")
    return header


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedError("its header names something twice")
    return found


def _place(name: str, described: Any) -> _Place:
    match described:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise MalformedError(
                f"its header describes '{name[:100]}' without type, shape or place"
            )
    if kind not in STORED_DTYPES:
        raise MalformedError(
            f"the tensor '{name[:100]}' has the type {kind[:20]}, which is not read"
        )
    try:
        check_shape(shape)
    except MalformedError as error:
        raise MalformedError(f"the tensor '{name[:100]}' cannot be: {error}") from error
    dtype = STORED_DTYPES[kind]
    if not 0 <= start <= stop or stop - start != math.prod(shape) * dtype.itemsize:
        raise MalformedError(
            f"the tensor '{name[:100]}' of type {kind} and shape {shape} has the bytes from "
            f"{start} to {stop}, but needs {math.prod(shape) * dtype.itemsize}"
        )
    return dtype, shape, start, stop


def _check_places(places: dict[str, _Place], size: int) -> None:
    """The tensors fill the file: no byte belongs to two of them or to none."""
    end = 0
    for name, (_, _, start, stop) in sorted(places.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise MalformedError(f"the tensor '{name[:100]}' overlaps another one or leaves a gap")
        end = stop
    if end != size:
        raise MalformedError(
            f"its tensors take {end} bytes, but {size} are there: it is not complete"
            if end > size
            else f"it has {size - end} bytes behind its last tensor"
        )
