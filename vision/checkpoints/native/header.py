"""The header of this project's checkpoint files: what a file holds, without reading a tensor.

A checkpoint is one safetensors file (`safetensors_file.py`), readable by any program that knows
that format. The map of strings in its header holds

    vision_checkpoint   CRC-32 of the length and the header, taken with zeros in its own place
    format              "pt": other programs read there that the tensors are torch's
    record              JSON of everything that is not a tensor, with the number of its format
    aliases             JSON: name → name under which the same tensor is stored
    orders              JSON: name → order of the axes in memory, where it was not the usual one;
                        the file has the usual one (last axis fastest)
    crc32               CRC-32 of each tensor's bytes, eight hex digits each, in the header's order

The first of them comes first in the file, in every format to come, so a damaged header can be
distinguished from a header of the future. In the record floats keep every bit; not-a-number and
infinity are kept too, in the notation of Python's json module: a metric that is not a number must
not keep a run from being saved. This module does not import torch, so that listing runs is quick.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from vision import __version__
from vision.checkpoints.errors import OLDER, CheckpointError, NewerFormatError, unreadable
from vision.checkpoints.files.safetensors_file import SAFETENSORS, Entry, end_of, parse_header

Record = dict[str, Any]

FORMAT = 4
"""Number of the format of records that is written. Raise it with every change of a record that this
version or the one before could not read, and add an upgrade from the number before.
"""
MARK = b'{"__metadata__":{"vision_checkpoint":"'
HEADER_LIMIT = 100_000_000
"""Bytes; the same limit as in the safetensors library."""


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
    try:
        with path.open("rb") as file:
            return read_header(file, path).record
    except CheckpointError:
        raise
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


def stamp(record: Mapping[str, Any]) -> Record:
    """The record with the number of its format and the version that writes it."""
    if record.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"The record is of format {record['format']}; only format {FORMAT} is written. "
            f"Upgrade it first."
        )
    return {**record, "format": FORMAT, "version": __version__}


def read_header(file: BufferedReader, path: Path) -> Header:
    """Read and check the header of an opened file, and that the file is as long as it says."""
    size = os.fstat(file.fileno()).st_size
    text, data_start = _read_text(file, path, size)
    try:
        header = _parse(text, data_start)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has an invalid header ({error!s:.200}). {OLDER}") from error
    end = data_start + end_of(header.entries)
    if size != end:
        raise cut_short(path, f"{size} bytes instead of {end}")
    return header._replace(record=_upgrade(header.record, path))


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
    entries, metadata = parse_header(text)
    record, aliases, orders = (json.loads(metadata[k]) for k in ("record", "aliases", "orders"))
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


def check_record(value: Any, place: str = "record") -> None:
    """Raise a TypeError if a value would not come back from JSON as it was."""
    match value:
        case None | bool() | int() | float() | str():
            return
        case dict():
            for key, inner in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"{place}: the key {key!r} is not a string.")
                check_record(inner, f"{place}.{key}")
        case list():
            for index, inner in enumerate(value):
                check_record(inner, f"{place}[{index}]")
        case _:
            raise TypeError(
                f"{place}: a {type(value).__name__} cannot be stored in a checkpoint's record; "
                f"give a dict, list, str, int, float, bool or None."
            )


def _upgrade(record: Record, path: Path) -> Record:
    """The record in today's format."""
    number = record.get("format")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise CheckpointError(f"{path} has no valid format number, but {number!r:.100}.")
    if number > FORMAT:
        version = f"{record.get('version')!s:.40}"
        raise NewerFormatError(
            f"{path} is of format {number!s:.40}, written by version {version} of this project; "
            f"the installed version {__version__} reads formats up to {FORMAT}. Install version "
            f"{version} or a later one."
        )
    for older in range(number, FORMAT):
        try:
            record = {**UPGRADES[older](record), "format": older + 1}
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is of format {older}, but its record lacks what every record of that "
                f"format has ({error!r:.200}). {OLDER}"
            ) from error
    return record


def _add_vit_variants(model: Record) -> Record:
    """1 → 2: a ViT may have a distillation token and another MLP, which none had before."""
    return model | {"distillation_token": False, "mlp": "gelu"} if _is_vit(model) else model


def _add_model_choices(model: Record) -> Record:
    """2 → 3: settings that were fixed before. Padding of a Swin was always masked."""
    if not _is_vit(model):
        return model | {"padding": "mask"} if model["kind"] in ("swin", "swin_v2") else model
    gated = model["mlp"] == "swiglu"
    activated = {"mlp": "gated", "activation": "silu"} if gated else {"mlp": "plain"}
    return {**_VIT_CHOICES, **model, **activated}


def _add_swin_stems(model: Record) -> Record:
    """3 → 4: a Swin may have another stem and another start."""
    added = {"stem": "patch", "initialization": "trunc_normal"}
    return model | added if model["kind"] in ("swin", "swin_v2") else model


def _is_vit(model: Record) -> bool:
    return bool(model["kind"] == "vit")


_VIT_CHOICES = {
    "activation": "gelu",
    "stem": "patch",
    "head_width": None,
    "rotary": "axial",
    "rotary_grid": None,
    "rotary_jitter": [0.0, 1.0, 1.0],
    "relative_bias": "none",
    "embedding_norm": False,
    "block_norm": "before",
    "qkv_bias": "qkv",
    "attention_norm": False,
    "mlp_norm": False,
    "pool_heads": None,
    "pool_mlp_ratio": None,
    "representation": None,
    "projection": None,
}
"""Settings of a ViT that format 3 added, with the values that every ViT had before."""


def _change_model(change: Callable[[Record], Record], record: Record) -> Record:
    """The record with its model changed wherever it is written."""
    config = record["config"]
    record = {**record, "config": {**config, "model": change(config["model"])}}
    return record | {"model": change(record["model"])} if "model" in record else record


UPGRADES: dict[int, Callable[[Record], Record]] = {
    1: partial(_change_model, _add_vit_variants),
    2: partial(_change_model, _add_model_choices),
    3: partial(_change_model, _add_swin_stems),
}
"""From format n to format n + 1, for every n below FORMAT."""
