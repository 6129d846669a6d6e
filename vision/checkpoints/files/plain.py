"""From what a pickle says to tensors by flat names and plain data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vision.checkpoints.files.described import (
    Inert,
    MalformedError,
    Name,
    StoredArray,
    StoredBytes,
    StoredTensor,
    StoredType,
    Unreadable,
    check_shape,
)
from vision.checkpoints.files.rebuild import is_number

_DEPTH = 100
_NODES = 2_000_000
"""Values that are visited. A list that holds another one twice, and so on, has no end."""
_NOTHING = object()
_MODULE = ("_parameters", "_buffers", "_modules")


@dataclass
class Flat:
    """Tensors by flat name, and what is left."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    """Classes of objects that were kept as plain data."""
    model: str | None = None
    """The class of a whole model that was stored as an object."""


def flatten(value: Any, tensor_of: Callable[[StoredTensor], Tensor]) -> Flat:
    """Take the tensors out of nested data. `tensor_of` gives a described tensor its bytes."""
    walk = _Walk(tensor_of)
    rest = walk.visit(value, (), 0)
    walk.flat.extra = rest if isinstance(rest, dict) else {} if rest is _NOTHING else {"": rest}
    if isinstance(value, dict):
        walk.flat.parts = tuple(str(k) for k, v in value.items() if isinstance(v, dict | Inert))
    return walk.flat


class _Walk:
    """One pass over nested data."""

    def __init__(self, tensor_of: Callable[[StoredTensor], Tensor]) -> None:
        self.flat = Flat()
        self.tensor_of = tensor_of
        self.known: dict[int, Tensor] = {}
        self.nodes = 0
        self.open: set[int] = set()

    def visit(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        """The value without its tensors, or _NOTHING where it had nothing else."""
        self.nodes += 1
        if depth > _DEPTH or self.nodes > _NODES:
            raise MalformedError(f"'{'.'.join(path)[:100]}' is nested too deeply or without an end")
        match value:
            case None | bool() | int() | float() | str() | bytes():
                return value
            case StoredTensor():
                return self._tensor(value, path)
            case dict() | list() | tuple() | Inert():
                return self._container(value, path, depth)
            case StoredArray():
                return self._array(value, path, depth)
            case Name():
                return str(value)
            case StoredType():
                return value.code
            case bytearray():
                return bytes(value)
            case Unreadable():
                raise MalformedError(f"the tensor '{'.'.join(path)}' {value.reason}")
            case StoredBytes():
                raise MalformedError(f"'{'.'.join(path)}' is a bare storage, not a tensor")
            case _:
                raise MalformedError(f"'{'.'.join(path)[:100]}' is a {type(value).__name__}")

    def _container(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        """What is in a container. An object that holds itself, as some do, is left out there."""
        if id(value) in self.open:
            return None
        self.open.add(id(value))
        match value:
            case dict():
                found = self._mapping(value, path, depth)
            case Inert():
                found = self._inert(value, path, depth)
            case _:
                items = [self.visit(v, (*path, str(i)), depth + 1) for i, v in enumerate(value)]
                nothing = bool(items) and all(item is _NOTHING for item in items)
                plain = [None if item is _NOTHING else item for item in items]
                found = _NOTHING if nothing else plain
        self.open.remove(id(value))
        return found

    def _mapping(self, value: dict[Any, Any], path: tuple[str, ...], depth: int) -> Any:
        found = {}
        for key, inner in value.items():
            plain = self.visit(inner, (*path, str(key)), depth + 1)
            if plain is not _NOTHING:
                found[key if isinstance(key, str) or not path else str(key)] = plain
        return found if found or not value else _NOTHING

    def _inert(self, value: Inert, path: tuple[str, ...], depth: int) -> Any:
        """The attributes or items of an object; the tensors of a whole model by their names."""
        state = value.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] if isinstance(state[0], dict) else {}), **state[1]}  # slots
        if isinstance(state, dict) and all(isinstance(state.get(key), dict) for key in _MODULE):
            self.flat.model = self.flat.model or value.kind
            return self._module(state, path, depth)
        if value.mapping:
            return self._mapping(value.mapping, path, depth)
        if value.sequence:
            return self.visit(value.sequence, path, depth + 1)
        if isinstance(state, dict):
            return self._mapping(state, path, depth)
        record = {"class": value.kind, "arguments": list(value.arguments), "state": state}
        return self._mapping(record, path, depth)

    def _module(self, state: dict[str, Any], path: tuple[str, ...], depth: int) -> Any:
        """A model stored as an object: what its state dict would have held."""
        passing = state.get("_non_persistent_buffers_set") or ()
        for key in _MODULE:
            for name, inner in state[key].items():
                if inner is not None and not (key == "_buffers" and name in passing):
                    self.visit(inner, (*path, str(name)), depth + 1)
        return _NOTHING

    def _tensor(self, value: StoredTensor, path: tuple[str, ...]) -> Any:
        name = ".".join(path)
        if id(value) not in self.known:
            try:
                self.known[id(value)] = self.tensor_of(value)
            except MalformedError as error:
                raise MalformedError(f"the tensor '{name}' cannot be: {error}") from error
        self._add(name, self.known[id(value)])
        return _NOTHING

    def _array(self, value: StoredArray, path: tuple[str, ...], depth: int) -> Any:
        """An array of numbers is a tensor, a single number is a number."""
        if isinstance(value.data, list):
            return self.visit(value.data, path, depth + 1)
        if not is_number(value.dtype):
            return {"class": "numpy.ndarray", "dtype": value.dtype, "shape": list(value.shape)}
        array = array_from(value.data, np.dtype(value.dtype), value.shape, value.column_major)
        if not value.shape:
            return array.item()
        self._add(".".join(path), torch.from_numpy(array))
        return _NOTHING

    def _add(self, name: str, tensor: Tensor) -> None:
        if name in self.flat.tensors:
            raise MalformedError(f"two tensors are named '{name}'")
        self.flat.tensors[name] = tensor


def array_from(
    data: bytes, dtype: "np.dtype[Any]", shape: tuple[int, ...], column_major: bool
) -> "np.ndarray[Any, Any]":
    """An array of plain numbers in this machine's byte order, of its own memory."""
    check_shape(shape)
    if len(data) != dtype.itemsize * int(np.prod(shape, dtype=object)):
        raise MalformedError(f"an array of shape {list(shape)} has {len(data)} bytes")
    array = np.frombuffer(data, dtype).reshape(shape, order="F" if column_major else "C")
    return np.ascontiguousarray(array, dtype.newbyteorder("=")).reshape(shape).copy()
