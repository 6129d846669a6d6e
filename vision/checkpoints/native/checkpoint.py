"""This project's own checkpoints: tensors and a plain record in one safetensors file, no pickle.

The file is written and read here rather than by the safetensors library, because a checkpoint must
be forced to the disk before it takes its name, a full disk must leave nothing behind, every tensor
carries a checksum, and only one tensor at a time is copied from its device. `header.py` describes
the layout; the library reads these files like any other.
"""

import errno
import zlib
from collections.abc import Mapping
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision.checkpoints.errors import CheckpointError, NewerFormatError, system_errors, unreadable
from vision.checkpoints.files.mapped import DTYPE_NAMES, STORED_DTYPES
from vision.checkpoints.native.checkpoint_folder import latest
from vision.checkpoints.native.header import (
    Header,
    Record,
    cut_short,
    damaged,
    encode_header,
    place,
    read_header,
    stamp,
)
from vision.files import replacing, write_all


class Checkpoint(NamedTuple):
    """The content of a file."""

    tensors: dict[str, Tensor]
    record: Record


class Opened(NamedTuple):
    """The newest checkpoint of a folder that could be read."""

    path: Path
    checkpoint: Checkpoint
    warnings: list[str]
    """One for each newer file that could not be read: its name and the reason."""


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Store tensors (of any device) and a record under `path`, in place of what is there.

    Until the new file is complete and on the disk, the old one stays as it is, also if this process
    is killed. A tensor that has two names is stored once; no tensor may change meanwhile. The
    record gets the number of its `format` and the project's `version`. Raises a CheckpointError if
    the file cannot be written.
    """
    stored, aliases = _without_repeats(dict(tensors))
    entries = place({name: (_dtype_name(name, t), tuple(t.shape)) for name, t in stored.items()})
    orders = {name: order for name, t in stored.items() if (order := _order(t)) != sorted(order)}
    header = partial(encode_header, entries, aliases, orders, stamp(record))
    checksums = dict.fromkeys(entries, 0)
    first = header(list(checksums.values()))  # fails before any file is touched, if it fails
    with system_errors(f"{path} cannot be written", _advice), replacing(path) as file:
        write_all(file, first)
        for name in sorted(entries, key=lambda name: entries[name].start):
            data = _bytes_of(stored[name])
            checksums[name] = zlib.crc32(data)
            write_all(file, data)
        file.seek(0)
        write_all(file, header(list(checksums.values())))


def read_checkpoint(
    path: Path, device: torch.device | str = "cpu", prefix: str | tuple[str, ...] = ""
) -> Checkpoint:
    """The tensors whose names start with `prefix` (any of several), and the record, both checked.

    Names that shared one tensor share one again. Raises a CheckpointError for what cannot be read.
    """
    try:
        with path.open("rb") as file:
            header = read_header(file, path)
            names = [n for n in [*header.entries, *header.aliases] if n.startswith(prefix)]
            homes = {name: header.aliases.get(name, name) for name in names}
            stored: dict[str, Tensor] = {}
            for home in sorted(set(homes.values()), key=lambda h: header.entries[h].start):
                stored[home] = _read_tensor(file, path, header, home).to(device)
    except CheckpointError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    return Checkpoint({name: stored[home] for name, home in homes.items()}, header.record)


def open_latest(folder: Path, device: torch.device | str = "cpu") -> Opened | None:
    """The newest checkpoint of a run that can be read; None if the folder has none at all.

    Newer files that are unreadable are listed in the result's warnings. If none can be read, or one
    needs a later version of this project, that is an error: training must not start over unasked.
    """
    reasons: list[str] = []
    for path in latest(folder):
        try:
            checkpoint = read_checkpoint(path, device)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        warnings = [f"{reason} Went back to {path.name}." for reason in reasons]
        return Opened(path, checkpoint, warnings)
    if not reasons:
        return None
    raise CheckpointError(
        f"None of the {len(reasons)} checkpoints in {folder} can be read:\n" + "\n".join(reasons)
    )


def _without_repeats(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to store, and the names that stand for one of them (tied weights).

    Only the very same view of the same memory is shared; views that overlap are stored in full.
    """
    if "__metadata__" in tensors:
        raise ValueError("'__metadata__' cannot be the name of a tensor in a safetensors file.")
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    homes: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(f"The tensor '{name}' is sparse, quantized or without data (meta).")
        if hasattr(tensor, "full_tensor"):
            raise ValueError(f"The tensor '{name}' is spread over processes; gather it first.")
        view = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
        home = homes.setdefault((*view, tensor.is_conj(), tensor.is_neg()), name)
        if home != name and tensor.numel():
            aliases[name] = home
        else:
            stored[name] = tensor
    return stored, aliases


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"The tensor '{name}' has type {tensor.dtype}, unknown to safetensors.")
    return DTYPE_NAMES[tensor.dtype]


def _order(tensor: Tensor) -> list[int]:
    """The axes from the slowest in memory to the fastest. It is kept because sums, such as a norm,
    run in the order of the memory and so depend on it in their last bits (channels-last weights).
    """
    strides = torch.empty_like(tensor, device="meta").stride()  # as of a copy: no gaps, no overlap
    return sorted(range(tensor.dim()), key=lambda axis: -strides[axis])


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's content as it goes to the file; a copy only where the memory has another order."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not reshape: a single element counts as contiguous with any stride, but cannot be viewed so.
    return _memory(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8))


def _memory(data: Tensor) -> memoryview:
    """The memory of a vector of bytes."""
    return memoryview(data.numpy())  # type: ignore[arg-type]  # typed from Python 3.12 on


def _read_tensor(file: BufferedReader, path: Path, header: Header, name: str) -> Tensor:
    entry = header.entries[name]
    data = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
    file.seek(header.data_start + entry.start)
    found = file.readinto(_memory(data))
    if found != data.numel():
        raise cut_short(path, f"{found} of {data.numel()} bytes of '{name}'")
    if zlib.crc32(_memory(data)) != header.checksums[name]:
        raise damaged(path, f"'{name}'")
    tensor = data.view(STORED_DTYPES[entry.dtype]).reshape(entry.shape)
    if name not in header.orders:
        return tensor
    order = header.orders[name]
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def _advice(number: int | None) -> str:
    """What to do about a file that cannot be written."""
    match number:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return (
                "What was stored before is untouched. Free some space, keep fewer checkpoints or "
                "store the run elsewhere."
            )
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return "The folder cannot be written to; change its permissions or choose another."
        case errno.ENOENT | errno.ENOTDIR:
            return "The folder does not exist; create it first."
        case _:
            return "What is stored there is whole: the checkpoint from before, or the new one."
