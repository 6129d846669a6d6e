"""Files that `torch.save` wrote, today's zip archives and those before torch 1.6.

torch's own loader is not used, not even with `weights_only=True`: it refuses files that hold a
harmless setting of their program's own class, and it reserves memory as a damaged file asks for.
"""

import io
import mmap
from collections.abc import Callable
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

from torch import Tensor, UntypedStorage

from vision.checkpoints.files.archive import Member, check_crc, read_member
from vision.checkpoints.files.described import MalformedError, StoredBytes, StoredTensor, shown
from vision.checkpoints.files.mapped import DTYPES, crc_of, map_file, part_of, strided_tensor
from vision.checkpoints.files.plain import Flat, flatten
from vision.checkpoints.files.rebuild import storage
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


def read_torch_zip(path: Path, file: BufferedReader, size: int, members: dict[str, Member]) -> Flat:
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
        check_crc(member_name, member, crc_of(memory, member.start, member.size))
        return part_of(memory, member.start, member.size, _ALIGNMENT)

    inert: dict[str, None] = {}
    value = unpickle(io.BytesIO(data), storage, inert)
    return _flatten(value, bytes_of, size, inert)


def read_torch_legacy(path: Path, file: BufferedReader, size: int) -> Flat:
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

    return _flatten(value, bytes_of, size, inert)


def _flatten(
    value: Any,
    bytes_of: Callable[[StoredBytes], UntypedStorage],
    size: int,
    inert: dict[str, None],
) -> Flat:
    if not isinstance(value, dict) and not hasattr(value, "state"):
        raise MalformedError(
            f"it holds a single {type(value).__name__}, not the tensors of a model by name"
        )
    flat = flatten(value, partial(_tensor, bytes_of=bytes_of, known={}))
    flat.inert = tuple(inert)
    total = sum(tensor.numel() * tensor.element_size() for tensor in flat.tensors.values())
    if total > _TOTAL * size + 2**24:
        raise MalformedError(f"its tensors claim {total} bytes, but it has {size}")
    return flat


def _tensor(
    stored: StoredTensor,
    bytes_of: Callable[[StoredBytes], UntypedStorage],
    known: dict[object, UntypedStorage],
) -> Tensor:
    """The tensor; tensors of one storage share it again."""
    data = stored.storage
    for dtype in (data.dtype, stored.dtype):
        if dtype not in DTYPES:
            raise MalformedError(
                f"its type is {dtype}; quantised and packed numbers are not read. "
                f"Store the model as it was before the quantisation"
            )
    key = (data.key, data.dtype, data.count, data.view)
    if key not in known:
        known[key] = bytes_of(data)
    tensor = strided_tensor(
        known[key], DTYPES[stored.dtype], stored.offset, stored.shape, stored.strides
    )
    tensor = tensor.conj().resolve_conj() if stored.conjugate else tensor
    return -tensor if stored.negative else tensor


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
