"""Numpy's `.npz` archives, as Google's ViT weights come in. Objects (pickles) are refused."""

import io
import math
from io import BufferedReader
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from vision.checkpoints.files.archive import Member, check_crc, unpack
from vision.checkpoints.files.described import MalformedError, check_shape
from vision.checkpoints.files.mapped import DTYPES, crc_of, map_file, part_of, whole_tensor
from vision.checkpoints.files.plain import array_from
from vision.checkpoints.files.rebuild import is_number

_HEADER_LIMIT = 10_000
_BFLOAT16 = "V2"
"""numpy has no such numbers: jax stores them as two bytes without a meaning."""


def read_npz(
    path: Path, file: BufferedReader, size: int, members: dict[str, Member]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arrays of numbers as tensors, and texts as plain data, each checked against its checksum.
    Raises MalformedError.
    """
    memory = map_file(path, size)
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for member_name, member in members.items():
        name = member_name.removesuffix(".npy")
        if name in tensors or name in extra or name == member_name:
            raise MalformedError(f"its member '{member_name[:100]}' is not an array or not unique")
        if not member.compressed:
            check_crc(member_name, member, crc_of(memory, member.start, member.size))
        file.seek(member.start)
        content = file.read(member.packed if member.compressed else _HEADER_LIMIT + 16)
        if member.compressed:
            content = unpack(member_name, member, content)
        try:
            shape, column_major, dtype, start = _header(content[: member.size])
            _check_size(shape, dtype, member.size - start)
        except MalformedError as error:
            raise MalformedError(f"its array '{name[:100]}' cannot be: {error}") from error
        if dtype.kind in "US":
            data = content[start:] if member.compressed else _rest(file, member, start)
            extra[name] = _texts(data, dtype, shape)
        elif member.compressed or not _is_mappable(dtype, column_major):
            data = content[start:] if member.compressed else _rest(file, member, start)
            tensors[name] = _copied(data, dtype, shape, column_major)
        else:
            torch_type = _torch_type(dtype)
            part = part_of(memory, member.start + start, member.size - start, torch_type.itemsize)
            tensors[name] = whole_tensor(part, torch_type, shape)
    return tensors, extra


def _header(content: bytes) -> tuple[tuple[int, ...], bool, "np.dtype[Any]", int]:
    """Shape, order and type of an array, and where its numbers start."""
    stream = io.BytesIO(content)
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        if version not in ((1, 0), (2, 0)):
            raise MalformedError(f"its version is {version}")
        shape, column_major, dtype = read(stream, max_header_size=_HEADER_LIMIT)
    except MalformedError:
        raise
    except (ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise MalformedError(f"its header does not make sense ({str(error)[:200]})") from error
    check_shape(shape)
    if dtype.hasobject:
        raise MalformedError("it holds Python objects, which only a pickle could build; refused")
    if dtype.kind not in "US" and dtype.str.lstrip("<>|") != _BFLOAT16 and not is_number(dtype.str):
        raise MalformedError(f"its type {dtype} is none of numbers")
    return shape, column_major, dtype, stream.tell()


def _check_size(shape: tuple[int, ...], dtype: "np.dtype[Any]", size: int) -> None:
    if math.prod(shape) * dtype.itemsize != size:
        raise MalformedError(f"{size} bytes are there for shape {list(shape)} of type {dtype}")


def _is_mappable(dtype: "np.dtype[Any]", column_major: bool) -> bool:
    return not column_major and (dtype.isnative or dtype.kind == "V") and _has_torch_type(dtype)


def _has_torch_type(dtype: "np.dtype[Any]") -> bool:
    return dtype.kind == "V" or dtype.name in DTYPES


def _torch_type(dtype: "np.dtype[Any]") -> torch.dtype:
    return torch.bfloat16 if dtype.kind == "V" else DTYPES[dtype.name]


def _rest(file: BufferedReader, member: Member, start: int) -> bytes:
    file.seek(member.start + start)
    return file.read(member.size - start)


def _copied(
    data: bytes, dtype: "np.dtype[Any]", shape: tuple[int, ...], column_major: bool
) -> Tensor:
    """An array that cannot be looked at in the file: compressed, or in another order."""
    if not _has_torch_type(dtype):
        raise MalformedError(f"an array has the type {dtype}, which torch lacks")
    plain = np.dtype("<u2") if dtype.kind == "V" else dtype
    tensor = torch.from_numpy(array_from(data, plain, shape, column_major))
    return tensor.view(torch.bfloat16) if dtype.kind == "V" else tensor


def _texts(data: bytes, dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> Any:
    try:
        array = np.frombuffer(data, dtype).reshape(shape)
        return (array if dtype.kind == "U" else np.char.decode(array, "utf-8")).tolist()
    except ValueError as error:
        raise MalformedError(f"it has a text that cannot be read ({error})") from error
