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

from vision.checkpoints.errors import MalformedError
from vision.checkpoints.files.mapped import (
    DTYPES,
    Content,
    Member,
    check_mapped,
    map_file,
    mapped_tensor,
    unpack,
)
from vision.checkpoints.files.rebuild import is_number
from vision.checkpoints.files.safetensors_file import check_shape

_HEADER_LIMIT = 10_000
_BFLOAT16 = "V2"
"""numpy has no such numbers: jax stores them as two bytes without a meaning."""


def read_npz(path: Path, file: BufferedReader, size: int, members: dict[str, Member]) -> Content:
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
        file.seek(member.start)
        if member.compressed:
            content = unpack(member_name, member, file.read(member.packed))
        else:
            check_mapped(member_name, member, memory)
            content = file.read(min(member.size, _HEADER_LIMIT + 16))
        try:
            shape, column_major, dtype, start = _header(content)
            if math.prod(shape) * dtype.itemsize != member.size - start:
                raise MalformedError(
                    f"{member.size - start} bytes are there for shape {list(shape)} of type {dtype}"
                )
        except MalformedError as error:
            raise MalformedError(f"its array '{name[:100]}' cannot be: {error}") from error
        torch_type = torch.bfloat16 if dtype.kind == "V" else DTYPES.get(dtype.name)
        mappable = not column_major and (dtype.isnative or dtype.kind == "V")
        if mappable and torch_type is not None and not member.compressed:
            tensors[name] = mapped_tensor(memory, member.start + start, torch_type, shape)
            continue
        if not member.compressed:
            file.seek(member.start)
            content = file.read(member.size)
        if dtype.kind in "US":
            extra[name] = _texts(content[start:], dtype, shape)
        elif torch_type is None:
            raise MalformedError(f"an array has the type {dtype}, which torch lacks")
        else:
            plain = np.dtype("<u2") if dtype.kind == "V" else dtype
            tensors[name] = tensor_from(content[start:], plain, shape, column_major)
            tensors[name] = tensors[name].view(torch_type)
    return Content(tensors=tensors, extra=extra)


def tensor_from(
    data: bytes, dtype: "np.dtype[Any]", shape: tuple[int, ...], column_major: bool
) -> Tensor:
    """An array of plain numbers in any order, as a tensor with memory of its own."""
    check_shape(shape)
    if len(data) != dtype.itemsize * math.prod(shape):
        raise MalformedError(f"an array of shape {list(shape)} has {len(data)} bytes")
    array = np.frombuffer(data, dtype).reshape(shape, order="F" if column_major else "C")
    return torch.from_numpy(np.array(array, dtype.newbyteorder("="), order="C"))


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


def _texts(data: bytes, dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> Any:
    try:
        array = np.frombuffer(data, dtype).reshape(shape)
        return (array if dtype.kind == "U" else np.char.decode(array, "utf-8")).tolist()
    except ValueError as error:
        raise MalformedError(f"it has a text that cannot be read ({error})") from error
