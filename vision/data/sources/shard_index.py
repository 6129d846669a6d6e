"""The position of each sample in a set of tar shards: read from their headers once, kept in a file.

Nothing is ever extracted. A member's name is only compared with its neighbours' and displayed, so
absolute names, names with `..` and links cannot reach the disk.
"""

import hashlib
import json
import os
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from vision.config import ConfigError, shorten
from vision.data.sources.folder import SUFFIXES, suffix_of
from vision.data.sources.packed import PackedStrings
from vision.files import open_file, replacing

_FORMAT = 2
"""Version of the file's layout; files of another version are written anew."""
LABELS = (".cls", ".json")
"""Suffixes of the members that hold a label."""
_ARRAYS = ("stamps", "shard", "offset", "size", "labels")
"""Fields of an index that are stored as they are."""


@dataclass(frozen=True)
class ShardIndex:
    """Samples of several shards, in their order."""

    shards: tuple[Path, ...]
    stamps: NDArray[np.int64]
    """(shards, 2): size and modification time, to detect changed shards."""
    shard: NDArray[np.int32]
    """Shard of each sample."""
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    members: PackedStrings
    """Name of each sample's image in its shard, for messages."""
    labels: NDArray[np.int32]
    """Index of each sample's label in `label_names`."""
    label_names: tuple[str, ...]
    """The labels as written, numbers or names, in order of first occurrence."""


def open_index(shards: tuple[Path, ...], file: Path, label_field: str) -> ShardIndex:
    """Return the index of the shards, from its file if that is up to date; otherwise write it.

    Shards that have not changed since the file was written are not read again.
    """
    shards = tuple(_join(Path.cwd(), str(shard)) for shard in shards)
    file = file.absolute()
    stamps = np.array([[s.st_size, s.st_mtime_ns] for s in map(os.stat, shards)], dtype=np.int64)
    old = _load(file)
    if old is not None and old.shards == shards and np.array_equal(old.stamps, stamps):
        return old
    kept: dict[tuple[Path, int, int], _ShardSamples] = {}
    if old is not None:
        for i, shard in enumerate(old.shards):
            kept[shard, *old.stamps[i].tolist()] = _samples_of(old, i)
    parts = [
        kept.get((shard, *stamp)) or _scan(shard, label_field)
        for shard, stamp in zip(shards, stamps.tolist(), strict=True)
    ]
    lengths = [len(part.offset) for part in parts]
    codes: dict[str, int] = {}
    labels = [codes.setdefault(label, len(codes)) for part in parts for label in part.labels]
    index = ShardIndex(
        shards,
        stamps,
        np.repeat(np.arange(len(shards), dtype=np.int32), lengths),
        np.concatenate([part.offset for part in parts]),
        np.concatenate([part.size for part in parts]),
        PackedStrings(name for part in parts for name in part.members),
        np.array(labels, dtype=np.int32),
        tuple(codes),
    )
    _save(file, index)
    return index


def index_file(root: Path, pattern: str, label_field: str, folder: Path | None) -> Path:
    """Return the file of an index: beside its shards, or in a folder of many indices."""
    place = "" if folder is None else str(root.absolute())
    key = hashlib.sha256("\0".join([place, pattern, label_field]).encode()).hexdigest()[:12]
    return (folder or root) / f"index-{key}.npz"


@dataclass(frozen=True)
class _ShardSamples:
    """The samples of one shard."""

    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    members: list[str]
    labels: list[str]


def _samples_of(index: ShardIndex, number: int) -> _ShardSamples:
    """Return the samples of one shard of an index."""
    where = np.flatnonzero(index.shard == number)
    return _ShardSamples(
        index.offset[where],
        index.size[where],
        [index.members[i] for i in where.tolist()],
        [index.label_names[code] for code in index.labels[where]],
    )


def _scan(shard: Path, label_field: str) -> _ShardSamples:
    """Read the headers and the labels of a shard. Files without image or label are not samples."""
    offsets, sizes, members, labels = [], [], [], []
    for key, found in _groups(shard):
        images = [m for m in found if suffix_of(m.name) in SUFFIXES]
        if not images:
            if any(suffix_of(m.name) in LABELS for m in found):
                raise ConfigError(
                    f"data: the sample '{key}' of {shard} has a label but no image: found "
                    f"{shorten([m.name for m in found])}, expected one of "
                    f"{', '.join(sorted(SUFFIXES))}. Convert the image, or remove the sample."
                )
            continue
        if len(images) > 1:
            names = shorten([m.name for m in images])
            raise ConfigError(f"data: the sample '{key}' of {shard} has several images: {names}.")
        offsets.append(images[0].offset_data)
        sizes.append(images[0].size)
        members.append(images[0].name)
        labels.append(_label(shard, key, found, label_field))
    return _ShardSamples(np.array(offsets, np.int64), np.array(sizes, np.int64), members, labels)


def _groups(shard: Path) -> Iterator[tuple[str, list[tarfile.TarInfo]]]:
    """Yield (key, members) of each sample: neighbours with one file name up to its first dot.

    Only plain files count, not hidden ones, nor those that describe a shard (`__name__`).
    """
    key = ""
    members: list[tarfile.TarInfo] = []
    try:
        with open_file(shard) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                path = PurePosixPath(member.name)
                if not member.isreg() or member.issparse() or path.name.startswith((".", "__")):
                    continue
                this = str(path.parent / path.name.split(".")[0])
                if this != key and members:
                    yield key, members
                    members = []
                key = this
                members.append(member)
    except (tarfile.TarError, EOFError) as error:
        raise OSError(
            f"{shard} cannot be read as a tar file: {error}. It must be whole and not compressed."
        ) from error
    if members:
        yield key, members


def _label(shard: Path, key: str, members: list[tarfile.TarInfo], field: str) -> str:
    """Return the label of a sample, as written."""
    for member in members:
        match suffix_of(member.name):
            case ".cls":
                return _content(shard, member).decode("utf-8").strip()
            case ".json":
                try:
                    record = json.loads(_content(shard, member))
                except ValueError as error:
                    raise OSError(f"{shard}:{member.name} is not valid JSON: {error}") from error
                if isinstance(record, dict) and isinstance(record.get(field), int | str):
                    return str(record[field])
                known = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise ConfigError(
                    f"data.label_field: {shard}:{member.name} has no label '{field}'; it has: "
                    f"{known}."
                )
    raise ConfigError(
        f"data: the sample '{key}' of {shard} has no label: expected {key}.cls or {key}.json, "
        f"found {shorten([m.name for m in members])}."
    )


def _content(shard: Path, member: tarfile.TarInfo) -> bytes:
    with shard.open("rb") as file:
        file.seek(member.offset_data)
        return file.read(member.size)


def _load(file: Path) -> ShardIndex | None:
    """Return the index in a file, or None if the file is missing, damaged or outdated."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            head = json.loads(str(arrays["head"]))
            if head["format"] != _FORMAT:
                return None
            return ShardIndex(
                # Relative, so that a folder can be moved with its index.
                shards=tuple(_join(file.parent, name) for name in head["shards"]),
                members=PackedStrings.from_arrays(arrays["member_bytes"], arrays["member_ends"]),
                label_names=tuple(head["label_names"]),
                **{name: arrays[name] for name in _ARRAYS},
            )
    except (FileNotFoundError, PermissionError, zipfile.BadZipFile, KeyError, ValueError, EOFError):
        return None


def _join(folder: Path, name: str) -> Path:
    return Path(os.path.normpath(folder / name))


def _save(file: Path, index: ShardIndex) -> None:
    """Write the file atomically: several processes may do so at once."""
    head = {
        "format": _FORMAT,
        "shards": [os.path.relpath(shard, file.parent) for shard in index.shards],
        "label_names": index.label_names,
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            np.savez(
                stream,
                head=np.array(json.dumps(head)),
                member_bytes=index.members.bytes,
                member_ends=index.members.ends,
                **{name: getattr(index, name) for name in _ARRAYS},
            )
    except OSError as error:
        raise ConfigError(
            f"data.index_folder: the index of the shards cannot be written to {file.parent}: "
            f"{error}. Name a folder that can be written to."
        ) from error
