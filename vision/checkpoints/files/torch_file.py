"""Files that `torch.save` wrote, today's zip archives and those before torch 1.6: tensors by flat
names, and plain data.

torch's own loader is not used, not even with `weights_only=True`: it refuses files that hold a
harmless setting of their program's own class, and it reserves memory as a damaged file asks for.
"""

import io
import mmap
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, UntypedStorage

from vision.checkpoints.errors import MalformedError
from vision.checkpoints.files.mapped import (
    DTYPES,
    Content,
    Member,
    check_mapped,
    map_file,
    part_of,
    read_member,
    strided_tensor,
)
from vision.checkpoints.files.npz import tensor_from
from vision.checkpoints.files.rebuild import (
    Inert,
    Name,
    StoredArray,
    StoredBytes,
    StoredTensor,
    StoredType,
    Unreadable,
    is_number,
    storage,
)
from vision.checkpoints.files.safetensors_file import shown
from vision.checkpoints.files.unpickle import unpickle

_PICKLE_LIMIT = 64 * 2**20
_FILE_VERSION = 10
"""The newest version of the archive that is known, as of torch 2.15."""
_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_SMALL = 4096
_TOTAL = 4
"""Times the file's size: all tensors together, a shared one as often as it is named."""
_ALIGNMENT = 8
"""Bytes. torch.save aligns to 64, files before 1.6 to nothing."""
_DEPTH = 100
_NODES = 2_000_000
"""Values that are visited. A list that holds another one twice, and so on, has no end."""
_NOTHING = object()
_MODULE = ("_parameters", "_buffers", "_modules")


_BytesOf = Callable[[StoredBytes], UntypedStorage]


def read_torch_zip(
    path: Path, file: BufferedReader, size: int, members: dict[str, Member]
) -> Content:
    """A file of torch 1.6 or later; each tensor is checked against its checksum. Raises
    MalformedError.
    """
    root = _root(members)
    _check_version(file, root, members)
    name = f"{root}data.pkl"
    data = read_member(file, name, members[name], _PICKLE_LIMIT)
    memory = map_file(path, size)

    def bytes_of(stored: StoredBytes) -> UntypedStorage:
        member_name = f"{root}data/{stored.key}"
        member = members.get(member_name)
        if member is None:
            raise MalformedError(f"its bytes (data/{stored.key}) are not in the file")
        if member.compressed:
            raise MalformedError("its bytes are compressed, which torch never does")
        if member.size != stored.count * DTYPES[stored.dtype].itemsize:
            raise MalformedError(
                f"its storage has {member.size} bytes instead of {stored.count} {stored.dtype}"
            )
        check_mapped(member_name, member, memory)
        return part_of(memory, member.start, member.size, _ALIGNMENT)

    inert: dict[str, None] = {}
    value = unpickle(io.BytesIO(data), storage, inert)
    return _flatten(value, bytes_of, path, size, inert)


def read_torch_legacy(path: Path, file: BufferedReader, size: int) -> Content:
    """A file of torch before 1.6: five pickles, then the storages. Raises MalformedError."""
    inert: dict[str, None] = {}
    storages: dict[str, StoredBytes] = {}

    def persistent(identifier: Any) -> Any:
        stored = storage(identifier)
        if isinstance(stored, StoredBytes):
            storages.setdefault(stored.key, stored)
        return stored

    # A map, because reading too much of it gives what there is without reserving the rest.
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
        if unpickle(stream, _no_reference, inert, _SMALL) != _MAGIC:
            raise MalformedError("it is a pickle, but not one that torch.save wrote")
        protocol = unpickle(stream, _no_reference, inert, _SMALL)
        if protocol != _PROTOCOL:
            raise MalformedError(f"its version is {shown([protocol])}; only {_PROTOCOL} is known")
        unpickle(stream, _no_reference, inert, _SMALL)  # the machine that wrote it
        value = unpickle(stream, persistent, inert)
        keys = unpickle(stream, _no_reference, inert)
        places = _legacy_places(stream, keys, storages, size)
    memory = map_file(path, size)

    def bytes_of(stored: StoredBytes) -> UntypedStorage:
        if stored.key not in places:
            raise MalformedError(f"its bytes (storage {stored.key}) are not in the file")
        start, length = places[stored.key]
        item = DTYPES[stored.dtype].itemsize
        if stored.view is not None:
            first, count = stored.view
            if (first + count) * item > length:
                raise MalformedError("it is a view beyond the end of its storage")
            start, length = start + first * item, count * item
        return part_of(memory, start, length, _ALIGNMENT)

    return _flatten(value, bytes_of, path, size, inert)


def _flatten(
    value: Any, bytes_of: _BytesOf, path: Path, size: int, inert: dict[str, None]
) -> Content:
    if not isinstance(value, dict | Inert):
        raise MalformedError(
            f"it holds a single {type(value).__name__}, not the tensors of a model by name"
        )
    walk = _Walk(bytes_of)
    rest = walk.visit(value, (), 0)
    total = sum(tensor.numel() * tensor.element_size() for tensor in walk.tensors.values())
    if total > _TOTAL * size + 2**24:
        raise MalformedError(f"its tensors claim {total} bytes, but it has {size}")
    items = value.items() if isinstance(value, dict) else ()
    whole = f"{path} holds a whole model ({walk.model}); its tensors are read, no code is run."
    return Content(
        tensors=walk.tensors,
        extra=rest if isinstance(rest, dict) else {} if rest is _NOTHING else {"": rest},
        parts=tuple(str(k) for k, v in items if isinstance(v, dict | Inert)),
        inert=tuple(inert),
        warnings=() if walk.model is None else (whole,),
    )


class _Walk:
    """One pass over what a pickle holds, which gives each tensor its name and its bytes."""

    def __init__(self, bytes_of: _BytesOf) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.model: str | None = None
        """The class of a whole model that was stored as an object."""
        self.bytes_of = bytes_of
        self.storages: dict[object, UntypedStorage] = {}
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
            self.model = self.model or value.kind
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
                self.known[id(value)] = self._look(value)
            except MalformedError as error:
                raise MalformedError(f"the tensor '{name}' cannot be: {error}") from error
        return self._add(name, self.known[id(value)])

    def _look(self, stored: StoredTensor) -> Tensor:
        """The tensor; tensors of one storage share it again."""
        data = stored.storage
        for dtype in (data.dtype, stored.dtype):
            if dtype not in DTYPES:
                raise MalformedError(
                    f"its type is {dtype}; quantised and packed numbers are not read. "
                    f"Store the model as it was before the quantisation"
                )
        key = (data.key, data.dtype, data.count, data.view)
        if key not in self.storages:
            self.storages[key] = self.bytes_of(data)
        tensor = strided_tensor(
            self.storages[key], DTYPES[stored.dtype], stored.offset, stored.shape, stored.strides
        )
        tensor = tensor.conj().resolve_conj() if stored.conjugate else tensor
        return -tensor if stored.negative else tensor

    def _array(self, value: StoredArray, path: tuple[str, ...], depth: int) -> Any:
        """An array of numbers is a tensor, a single number is a number."""
        if isinstance(value.data, list):
            return self.visit(value.data, path, depth + 1)
        if not is_number(value.dtype):
            return {"class": "numpy.ndarray", "dtype": value.dtype, "shape": list(value.shape)}
        tensor = tensor_from(value.data, np.dtype(value.dtype), value.shape, value.column_major)
        return self._add(".".join(path), tensor) if value.shape else tensor.item()

    def _add(self, name: str, tensor: Tensor) -> Any:
        if name in self.tensors:
            raise MalformedError(f"two tensors are named '{name}'")
        self.tensors[name] = tensor
        return _NOTHING


def _root(members: dict[str, Member]) -> str:
    """The folder inside the archive: its name is the file's first one, or "archive"."""
    roots = [name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise MalformedError(f"it has {len(roots)} lists of tensors (data.pkl) instead of one")
    return roots[0]


def _check_version(file: BufferedReader, root: str, members: dict[str, Member]) -> None:
    def text(name: str) -> str | None:
        if root + name not in members:
            return None
        content = read_member(file, root + name, members[root + name], _SMALL)
        return content.decode("latin-1").strip()

    version = text("version") or text(".data/version")
    if version is not None and not version.isdigit():
        raise MalformedError(f"its version is {version[:20]!r}")
    if version is not None and int(version) > _FILE_VERSION:
        raise MalformedError(
            f"it is of version {version}, written by a later torch; up to {_FILE_VERSION} is known"
        )
    if text("byteorder") == "big":
        raise MalformedError("its numbers are big-endian; store it again on a usual machine")


def _no_reference(identifier: Any) -> Any:
    raise MalformedError("it refers to a storage before it has any")


def _legacy_places(
    stream: mmap.mmap, keys: Any, storages: dict[str, StoredBytes], size: int
) -> dict[str, tuple[int, int]]:
    """Where the bytes of each storage are: one after the other, each behind its number of items."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise MalformedError("it has no list of its storages")
    places = {}
    for key in keys:
        if key not in storages or key in places:
            raise MalformedError(f"its storage {key[:40]} is unknown or there twice")
        stored = storages[key]
        if stored.dtype not in DTYPES:
            raise MalformedError(f"it has numbers of type {stored.dtype}, which are not read")
        count = int.from_bytes(stream.read(8), "little")
        length = stored.count * DTYPES[stored.dtype].itemsize
        start = stream.tell()
        if count != stored.count:
            raise MalformedError(f"its storage {key[:40]} has {count} items, not {stored.count}")
        if length > size - start:
            raise MalformedError(f"it ends within its storage {key[:40]}: it is not complete")
        places[key] = (start, length)
        stream.seek(start + length)
    return places
