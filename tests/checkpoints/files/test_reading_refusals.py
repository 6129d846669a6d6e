"""A file that cannot be read is refused in one clear sentence with its name and what to do."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.reading import read_raw


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_raw(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pth", b"", r"is empty \(0 bytes\)"),
        ("a.pth", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        ("a.pth", b"\n<!DOCTYPE html><html>Not found</html>", "is a web page"),
        ("a.pth", b'<?xml version="1.0"?><Error>AccessDenied</Error>', "is a web page"),
        ("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(100), "is an HDF5 file, as Keras"),
        ("a.onnx", b"\x08\x07\x12\x07pytorch", "is an ONNX program"),
        ("model", b"\x08\x07\x12\x07pytorch\x1a\x052.1.0", "is an ONNX program"),
        ("a.tflite", b"\x1c\0\0\0TFL3", "is a program of TensorFlow"),
        ("a.pth", gzip.compress(b"x" * 100, mtime=0), "compressed with gzip. Unpack it"),
        ("a.npy", b"\x93NUMPY\x01\x00", "a single array of numpy"),
        ("a.json", b'{"a": 1}', "is JSON"),
        ("a.gguf", b"GGUF" + bytes(20), "is a GGUF file"),
        ("a.msgpack", b"\x82\xa6params", "msgpack file of flax"),
        ("a.pth", bytes(1000), "starts with zeros only"),
        ("a.pth", b"hello there", "a text that starts with 'hello there'"),
        ("a.pth", bytes(range(128, 255)), "unknown kind"),
        ("a.pth", b"PK\x03\x04" + bytes(100), "zip archive without a readable end"),
        ("a.pkl", pickle.dumps({"a": 1}, 2), "not one that torch.save wrote"),
    ],
)
def test_file_of_another_kind_is_told(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, message)


def test_missing_file_is_told(tmp_path: Path) -> None:
    refused(tmp_path / "none.pth", "none.pth does not exist")


def test_folder_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    refused(tmp_path, "has no checkpoint")
    (tmp_path / ".metadata").touch()
    (tmp_path / "__0_0.distcp").touch()
    refused(tmp_path, "dcp_to_torch")


def test_torchscript_program_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "TorchScript program, which would have to be run")


def test_tar_archive_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    refused(tmp_path / "a.tar", "is a tar archive")


def test_zip_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("model.pth", b"x")
    refused(tmp_path / "a.zip", "neither torch nor numpy wrote it")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sparse", "'model.x' is sparse"),
        ("compressed rows", "'model.x' is sparse"),
        ("meta", "'model.x' has no data"),
        ("quantised", "'model.x' is quantised"),
    ],
)
def test_tensor_without_plain_numbers_is_named(tmp_path: Path, kind: str, message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match kind:
            case "sparse":
                tensor = torch.eye(3).to_sparse()
            case "compressed rows":
                tensor = torch.eye(3).to_sparse_csr()
            case "meta":
                tensor = torch.empty(2, device="meta")
            case _:
                tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        torch.save({"model": {"x": tensor}}, tmp_path / "a.pth")
    refused(tmp_path / "a.pth", message)


def test_single_tensor_is_told(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "a.pth")
    refused(tmp_path / "a.pth", "not the tensors of a model by name")


def test_npz_with_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{}], dtype=object))
    refused(tmp_path / "a.npz", "'x' cannot be: it holds Python objects")


def described(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": described(shape=[2, 3])}, "'w' of type F32 and shape .2, 3. has the bytes"),
        ({"w": described(shape=[-2, -2])}, "is not the shape of a tensor"),
        ({"w": described(shape=[True, 4])}, "is not the shape of a tensor"),
        ({"w": described(shape=[2**62, 0], data_offsets=[0, 0])}, "is not the shape of a tensor"),
        ({"w": described(dtype="F128")}, "has the type F128, which is not read"),
        ({"w": described(data_offsets=[16, 0])}, "has the bytes from 16 to 0"),
        ({"w": described(data_offsets=[-16, 0])}, "has the bytes from -16 to 0"),
        ({"w": described(data_offsets=[8, 24])}, "overlaps another one or leaves a gap"),
        ({"w": described(), "v": described()}, "overlaps another one"),
        ({"w": described(), "v": described(data_offsets=[16, 32])}, "is not complete"),
        ({"w": {"dtype": "F32"}}, "without type, shape or place"),
        ({"w": 3}, "without type, shape or place"),
        ({}, "16 bytes behind its last tensor"),
        ({"w": described(), "__metadata__": {"a": 1}}, "metadata are not strings"),
    ],
)
def test_safetensors_header_that_lies_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    refused(tmp_path / "a.safetensors", message)


def test_safetensors_header_that_repeats_a_name_is_refused(tmp_path: Path) -> None:
    one = json.dumps({"w": described()})[1:-1]
    text = f"{{{one},{one}}}".encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    refused(tmp_path / "a.safetensors", "names something twice")


@pytest.mark.parametrize("claimed", [10**6, 2**40, 2**47])
def test_safetensors_header_of_a_huge_claim_is_refused_without_the_memory(
    tmp_path: Path, claimed: int
) -> None:
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", claimed) + b"{}" + bytes(1000))
    tracemalloc.start()
    refused(tmp_path / "a.safetensors", "its header alone claims")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors", "npz"])
def test_file_cut_short_is_refused_at_every_length(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.pth"
    tensors = {"w": torch.randn(40), "v": torch.randn(3, 4)}
    match kind:
        case "zip" | "legacy":
            torch.save(tensors, path, _use_new_zipfile_serialization=kind == "zip")
        case "safetensors":
            safetensors.torch.save_file(tensors, path)
        case "npz":
            np.savez(tmp_path / "a.npz", **{k: v.numpy() for k, v in tensors.items()})
            (tmp_path / "a.npz").rename(path)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        refused(path, "a.pth is")


def zip_with(path: Path, changes: dict[str, bytes], compression: int = 0) -> Path:
    """A file of torch with some members replaced or added."""
    torch.save({"w": torch.arange(4.0)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(members)).partition("/")[0]
    members |= {f"{root}/{name}": content for name, content in changes.items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data/0": b"\0" * 8}, "'w' cannot be: its storage has 8 bytes instead of 4 float32"),
        ({"version": b"99\n"}, "of version 99, written by a later torch"),
        ({"version": b"x"}, "its version is 'x'"),
        ({"byteorder": b"big"}, "big-endian"),
        ({"data.pkl": b"\x80\x02."}, "ends in the middle"),
    ],
)
def test_archive_of_torch_that_lies_is_refused(
    tmp_path: Path, changes: dict[str, bytes], message: str
) -> None:
    refused(zip_with(tmp_path / "a.pth", changes), message)


def test_archive_of_torch_with_compressed_tensors_is_refused(tmp_path: Path) -> None:
    refused(zip_with(tmp_path / "a.pth", {}, zipfile.ZIP_DEFLATED), "are compressed")


@pytest.mark.parametrize("name", ["a.pth", "a.npz"])
def test_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.npz":
        np.savez_compressed(path, x=np.zeros(50_000_000, np.float32))
    else:
        zip_with(path, {"data/0": bytes(200_000_000)}, zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    refused(path, "it would unpack to")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7


def test_archive_with_a_member_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.simplefilter("ignore")
        for value in (1, 2):
            stream = io.BytesIO()
            np.save(stream, np.array(value))
            archive.writestr("x.npy", stream.getvalue())
    refused(path, "'x.npy' is there twice")
