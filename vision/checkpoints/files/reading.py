"""Any checkpoint file, opened without running anything that is in it.

The kind of a file follows from its content, never from its name. Nothing is trusted: sizes, offsets
and shapes are checked before memory is reserved for them, and a pickle is read by a machine that
cannot call anything (`unpickle.py`). Every refusal is a CheckpointError that says what to do.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vision.checkpoints.errors import CheckpointError, MalformedError, unreadable
from vision.checkpoints.files.mapped import (
    STORED_DTYPES,
    Content,
    map_file,
    mapped_tensor,
    read_members,
)
from vision.checkpoints.files.npz import read_npz
from vision.checkpoints.files.refusals import archive_refusal, folder_refusal, refusal
from vision.checkpoints.files.remote import HUB_FILES
from vision.checkpoints.files.safetensors_file import read_entries
from vision.checkpoints.files.torch_file import read_torch_legacy, read_torch_zip
from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import BEST, FOLDER, latest
from vision.checkpoints.native.header import MARK
from vision.files import open_file

Integrity = Literal["checksums match", "no checksums in this format", "no checksums were written"]
"""Whether a file's bytes are known to be those that were written; from the best to the worst."""
_SUFFIXES = {".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".npz"}
_JSON_LIMIT = 16 * 2**20
WEIGHTS = ("model.", "ema.")
"""What is read of an own checkpoint: not the state of its optimiser."""
_START = 512


@dataclass(frozen=True, kw_only=True)
class Raw(Content):
    """The content of a file, under its own names."""

    path: Path
    """The file; of several shards the index."""
    integrity: Integrity
    own: bool = False
    """Whether it is a checkpoint of this project."""


def read_raw(place: Path) -> Raw:
    """The content of a file, of the best checkpoint in a run's folder, or of a hub's folder."""
    place = _of_its_run(place)
    path = find_file(place) if place.is_dir() else place
    raw = _read_index(path) if path.name.endswith(".index.json") else _read_file(path)
    return _with_hub_json(raw) if path.name in HUB_FILES else raw


def _of_its_run(path: Path) -> Path:
    """A path through the link `latest` by the name of its run: a new run moves the link."""
    for link in (path, *path.parents):
        if link.name == "latest" and link.is_symlink():
            return link.parent / link.readlink() / path.relative_to(link)
    return path


def find_file(folder: Path) -> Path:
    """The checkpoint of a folder: of a run the best one or else the newest, of a hub's folder the
    weights, of any other folder its only file.
    """
    inner = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    if (inner / BEST).is_file():
        return inner / BEST
    for path in (*latest(inner), *(folder / name for name in HUB_FILES)):
        if path.is_file():
            return path
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found[:8]) + (" …" if len(found) > 8 else "")
        raise CheckpointError(f"{folder} has {len(found)} files of weights; name one: {names}.")
    raise CheckpointError(f"{folder} {folder_refusal(folder)}")


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that hold a NaN or an infinity."""
    return [name for name, tensor in tensors.items() if not _is_finite(tensor)]


def _is_finite(tensor: Tensor) -> bool:
    """One pass and no copy, unlike `isfinite().all()`: a minimum and a maximum keep a NaN."""
    if not tensor.numel() or tensor.is_meta:
        return True
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    tensor = tensor.float() if tensor.element_size() == 1 else tensor
    return all(math.isfinite(bound.item()) for bound in torch.aminmax(tensor.detach()))


def _read_file(path: Path) -> Raw:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_START)
            file.seek(0)
            return _read_open(path, file, size, start)
    except CheckpointError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except MalformedError as error:
        raise CheckpointError(f"{path} is not read: {error}.") from error
    except MemoryError as error:
        raise CheckpointError(f"{path} is not read: it needs more memory than there is.") from error


def _read_open(path: Path, file: BufferedReader, size: int, start: bytes) -> Raw:
    """What the first bytes say that the file is."""
    if start[8 : 8 + len(MARK)] == MARK:
        tensors, record = read_checkpoint(path, prefix=WEIGHTS)
        checked: Integrity = "checksums match"
        return Raw(path=path, tensors=tensors, extra=record, integrity=checked, own=True)
    if start.startswith(b"PK\x03\x04"):
        return _read_archive(path, file, size)
    unchecked: Integrity = "no checksums in this format"
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        content = read_torch_legacy(path, file, size)
        return Raw(path=path, integrity=unchecked, **vars(content))
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**48:
        entries, metadata, first = read_entries(file, size)
        memory = map_file(path, size)
        return Raw(
            path=path,
            tensors={
                name: mapped_tensor(memory, first + e.start, STORED_DTYPES[e.dtype], e.shape)
                for name, e in entries.items()
            },
            extra={"metadata": metadata} if metadata else {},
            integrity=unchecked,
        )
    raise CheckpointError(f"{path} {refusal(path, start)}")


def _read_archive(path: Path, file: BufferedReader, size: int) -> Raw:
    """A zip archive of torch or numpy."""
    members = read_members(file, size)
    arrays = all(name.endswith(".npy") for name in members)
    roots = {name.partition("/")[2].partition("/")[0] for name in members}
    programs = {"constants.pkl", "code", "archive_format"}
    if not arrays and ("data.pkl" not in roots or roots & programs):
        raise CheckpointError(f"{path} {archive_refusal(set(members))}")
    content = (read_npz if arrays else read_torch_zip)(path, file, size, members)
    raw = Raw(path=path, integrity="checksums match", **vars(content))
    if all(member.crc is not None for member in members.values()):
        return raw
    note = (
        f"{path} was written without checksums, so damage to it cannot be detected; compare its "
        f"hash with that of the original."
    )
    return replace(raw, warnings=(*raw.warnings, note), integrity="no checksums were written")


def _read_index(path: Path) -> Raw:
    """Weights in several files, as the index beside them says."""
    index = _read_json(path)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{path} has no 'weight_map' from tensors to files.")
    names = list(dict.fromkeys(shards.values()))
    if any(name != Path(name).name or name in ("", ".", "..") for name in names):
        raise CheckpointError(f"{path} names a shard outside its own folder; refused.")
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise CheckpointError(f"{path} needs {', '.join(missing)} in the same folder; download it.")
    joined = Raw(path=path, tensors={}, integrity="checksums match")
    for name in names:
        raw = _read_file(path.parent / name)
        if twice := raw.tensors.keys() & joined.tensors.keys():
            raise CheckpointError(f"{raw.path} and another shard both have '{min(twice)}'.")
        joined.tensors.update(raw.tensors)
        joined = replace(
            joined,
            extra=raw.extra | joined.extra,
            inert=tuple(dict.fromkeys(joined.inert + raw.inert)),
            warnings=joined.warnings + raw.warnings,
            integrity=max(joined.integrity, raw.integrity, key=get_args(Integrity).index),
        )
    if lost := [name for name in shards if name not in joined.tensors]:
        raise CheckpointError(f"{path} promises '{lost[0]}', which its shards do not have.")
    return joined


def _with_hub_json(raw: Raw) -> Raw:
    """Add what the hub's folder says of the weights. The file's own word comes first."""
    paths = {key: raw.path.parent / name for key, name in HUB_FILES[raw.path.name].items()}
    found = {key: _read_json(path) for key, path in paths.items() if path.is_file()}
    return replace(raw, extra=found | raw.extra)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with open_file(path) as file:
            text = file.read(_JSON_LIMIT + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(text) > _JSON_LIMIT:
        raise CheckpointError(f"{path} has more than {_JSON_LIMIT} bytes.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON mapping.")
    return content
