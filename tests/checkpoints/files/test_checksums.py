"""A flipped bit in a zip archive of torch or numpy is found; what cannot be checked says so."""

import io
import json
import random
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.reading import read_raw
from vision.checkpoints.native.checkpoint import write_checkpoint


def written(kind: str, path: Path) -> dict[str, Tensor]:
    """Tensors of several sizes and types, stored by the library itself."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "head.weight": torch.randn(30, 40, generator=generator),
        "head.bias": torch.randn(30, generator=generator).half(),
        "größe": torch.randn(5, 7, generator=generator).double(),
        "step": torch.tensor(12),
    }
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    stream = io.BytesIO()
    match kind:
        case "torch":
            torch.save(tensors, stream)
        case "npz":
            # Arrays whose numbers cannot be mapped are read in another way.
            np.savez(stream, **arrays | {"head.weight": np.asfortranarray(arrays["head.weight"])})
        case "npz compressed":
            np.savez_compressed(stream, **arrays)
    path.write_bytes(stream.getvalue())
    return tensors


def flipped(content: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and first[name].numpy().tobytes() == second[name].numpy().tobytes()
        for name in first
    )


def places_of_tensors(path: Path) -> dict[str, range]:
    """Where in the archive the bytes of each tensor are."""
    found = {}
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.filename.endswith(".npy") or "/data/" in member.filename:
                lengths = struct.unpack_from("<HH", content, member.header_offset + 26)
                start = member.header_offset + 30 + sum(lengths)
                found[member.filename] = range(start, start + member.compress_size)
    return found


@pytest.mark.parametrize("kind", ["torch", "npz"])
def test_flipped_bit_in_a_tensor_is_refused_with_file_and_member(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "weights"
    tensors = written(kind, path)
    assert same(read_raw(path).tensors, tensors)
    assert read_raw(path).integrity == "checksums match" and not read_raw(path).warnings
    content, places = path.read_bytes(), places_of_tensors(path)
    assert len(places) == len(tensors)
    source = random.Random(0)
    for _ in range(10):
        for member, place in places.items():
            path.write_bytes(flipped(content, source.choice(place), source.randrange(8)))
            with pytest.raises(CheckpointError) as caught:
                read_raw(path)
            assert str(path) in str(caught.value) and member in str(caught.value)


@pytest.mark.parametrize("kind", ["torch", "npz", "npz compressed"])
def test_flipped_bit_anywhere_is_refused_or_harmless(tmp_path: Path, kind: str) -> None:
    """Also in the archive's own headers: names, places, sizes, the directory. Compressed data end
    in bits without a meaning.
    """
    path = tmp_path / "weights"
    tensors = written(kind, path)
    content = path.read_bytes()
    tensor_bytes = {place for places in places_of_tensors(path).values() for place in places}
    other_bytes = {*range(len(content))} - tensor_bytes
    source = random.Random(1)
    refused = 0
    for place in source.sample(sorted(tensor_bytes), 50) + source.sample(sorted(other_bytes), 350):
        path.write_bytes(flipped(content, place, source.randrange(8)))
        try:
            assert same(read_raw(path).tensors, tensors), place
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_flipped_bit_in_the_list_of_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    written("torch", path)
    content = path.read_bytes()
    place = content.index(b"head.weight")
    path.write_bytes(flipped(content, place, 0))
    with pytest.raises(CheckpointError, match=r"data\.pkl.* again"):
        read_raw(path)


def test_file_of_torch_without_checksums_opens_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        tensors = written("torch", path)
    finally:
        torch.serialization.set_crc32_options(before)
    raw = read_raw(path)
    assert same(raw.tensors, tensors)
    assert raw.integrity == "no checksums were written"
    assert len(raw.warnings) == 1 and str(path) in raw.warnings[0]


def test_file_of_torch_whose_tensors_were_never_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    with torch.serialization.skip_data():
        torch.save({"w": torch.randn(100)}, path)
    with pytest.raises(CheckpointError, match="data/0"):
        read_raw(path)


def test_archive_whose_directory_lost_a_member_is_refused(tmp_path: Path) -> None:
    """A longer comment of the last but one entry hides the last one: no name is missed in npz."""
    path = tmp_path / "weights.npz"
    np.savez(path, first=np.arange(3), second=np.arange(4))
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    struct.pack_into("<H", content, entry + 32, 2**12)
    path.write_bytes(bytes(content))
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["first.npy"]
    with pytest.raises(CheckpointError, match="directory"):
        read_raw(path)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_archive_with_bytes_of_no_member_is_refused(tmp_path: Path, lost: int) -> None:
    """The directory of another archive, which lacks one of the members."""
    path = tmp_path / "weights.npz"
    arrays = {name: np.arange(3 + index) for index, name in enumerate("abc")}
    np.savez(path, **arrays)
    content = path.read_bytes()
    entries = [content.index(b"PK\x01\x02")]
    while (following := content.find(b"PK\x01\x02", entries[-1] + 4)) >= 0:
        entries.append(following)
    end = content.index(b"PK\x05\x06")
    bounds = [*entries, end]
    directory = b"".join(content[bounds[i] : bounds[i + 1]] for i in range(3) if i != lost)
    tail = bytearray(content[end:])
    struct.pack_into("<HHLL", tail, 8, 2, 2, len(directory), entries[0])
    path.write_bytes(content[: entries[0]] + directory + bytes(tail))
    with np.load(path) as archive:
        assert len(archive.files) == 2
    with pytest.raises(CheckpointError, match="directory"):
        read_raw(path)


def test_formats_without_checksums_say_so_without_a_warning(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4)}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("a.safetensors", "old.pth"):
        raw = read_raw(tmp_path / name)
        assert (raw.integrity, raw.warnings) == ("no checksums in this format", ())


def test_own_checkpoint_is_checked(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a.safetensors", {"model.w": torch.randn(4)}, {"step": 1})
    assert read_raw(tmp_path / "a.safetensors").integrity == "checksums match"


@pytest.mark.parametrize("zipped", [True, False])
def test_shards_are_as_certain_as_the_least_certain_of_them(tmp_path: Path, zipped: bool) -> None:
    torch.save({"v": torch.randn(4)}, tmp_path / "a.bin")
    torch.save({"w": torch.randn(4)}, tmp_path / "b.bin", _use_new_zipfile_serialization=zipped)
    index = {"weight_map": {"v": "a.bin", "w": "b.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    expected = "checksums match" if zipped else "no checksums in this format"
    assert read_raw(tmp_path).integrity == expected
