"""The content of a pickle as plain data: nothing here is callable, imported or built."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_LENGTH_LIMIT = 2**40
"""Items along an axis."""


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


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle names. It is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Inert:
    """An object of a class that is not rebuilt: what the pickle would have given to the class."""

    kind: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    mapping: dict[Any, Any] = field(default_factory=dict)
    sequence: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class StoredBytes:
    """A storage of torch: numbers in a row, somewhere else in the file."""

    key: str
    dtype: str
    count: int
    view: tuple[int, int] | None = None
    """In files before torch 1.6: first item and number of items, of a part of the storage."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of torch: how to look at a storage."""

    storage: StoredBytes
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conjugate: bool = False
    negative: bool = False


@dataclass(slots=True, eq=False)
class StoredType:
    """A dtype of numpy."""

    code: str


@dataclass(slots=True, eq=False)
class StoredArray:
    """An array of numpy, with its bytes in the pickle. Empty until its state was read."""

    dtype: str = "|u1"
    shape: tuple[int, ...] = (0,)
    column_major: bool = False
    data: bytes | list[Any] = b""


@dataclass(frozen=True, slots=True, eq=False)
class Unreadable:
    """A tensor of a kind that no model of this project has."""

    reason: str


def shown(values: Any) -> str:
    """A shape for a message. Anything may be in it: lists in lists would have no end."""
    first = list(values)[:8]
    items = [str(v) if type(v) is int and abs(v) < 2**64 else "?" for v in first]
    return f"[{', '.join(items)}{', …' if len(values) > 8 else ''}]"


class MalformedError(ValueError):
    """A pickle, archive or header that does not make sense; the message says where."""


def check_shape(shape: Sequence[int]) -> None:
    """Refuse what is not a shape, or the shape of more than any machine can hold."""
    if len(shape) > 64 or not all(type(n) is int and 0 <= n <= _LENGTH_LIMIT for n in shape):
        raise MalformedError(f"{shown(shape)} is not the shape of a tensor")
    if math.prod(n for n in shape if n) > 2**62:
        raise MalformedError(f"no tensor can have the shape {shown(shape)}")
