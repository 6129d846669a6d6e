"""A file that is not as it was written is refused with its name and a reason, never half read."""

import os
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.native.checkpoint import read_checkpoint, write_checkpoint
from vision.checkpoints.native.header import FORMAT, HEADER_LIMIT, MARK, read_record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "step_00000012.safetensors"
    weight = torch.randn(3, 4)
    tensors = {"weight": weight, "tied": weight, "mean": torch.randn(2).half(), "turned": weight.T}
    write_checkpoint(path, tensors, {"step": 12, "classes": ["cat", "dog"]})
    return path


def test_file_cut_at_any_length_is_refused(path: Path) -> None:
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        for read in (read_record, read_checkpoint):
            with pytest.raises(
                CheckpointError, match=r"step_00000012\.safetensors is not complete"
            ):
                read(path)


def test_file_with_more_at_its_end_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=r"not complete: \d+ bytes instead of \d+"):
        read_record(path)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_any_changed_byte_is_found(path: Path, mask: int) -> None:
    content = path.read_bytes()
    data_start = 8 + int.from_bytes(content[:8], "little")
    with path.open("r+b", buffering=0) as file:
        for place, byte in enumerate(content):
            os.pwrite(file.fileno(), bytes([byte ^ mask]), place)
            with pytest.raises(CheckpointError, match=r"step_00000012\.safetensors"):
                read_checkpoint(path)
            if place < data_start:
                with pytest.raises(CheckpointError, match=r"step_00000012\.safetensors"):
                    read_record(path)
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert read_record(path)["step"] == 12


def test_damaged_tensor_is_named(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum of 'mean' is wrong"):
        read_checkpoint(path)
    assert read_record(path)["step"] == 12


def test_missing_file_is_told_as_missing(tmp_path: Path) -> None:
    for read in (read_record, read_checkpoint):
        with pytest.raises(CheckpointError, match=r"none\.safetensors does not exist"):
            read(tmp_path / "none.safetensors")


def test_folder_in_place_of_a_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_checkpoint(tmp_path)


def test_file_of_torch_save_is_told_as_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    torch.save({"a": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        read_checkpoint(path)


@pytest.mark.parametrize("length", [HEADER_LIMIT + 1, 2**40, 2**64 - 1])
def test_claim_of_a_huge_header_takes_no_memory(length: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + MARK)
    os.truncate(path, 2**30)  # a sparse file: it takes no space
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"header of {length} bytes"):
        read_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shape":[3,4]', b'"shape":[9,9]'),
        (b'"shape":[3,4]', b'"shape":[-3,-4]'),
        (b'"dtype":"F16"', b'"dtype":"F17"'),
        (b'{\\"tied\\":\\"weight\\"}', b'{\\"tied\\":\\"height\\"}'),
        (b'{\\"turned\\":[1,0]}', b'{\\"turned\\":[1,1]}'),
        (rf"\"format\":{FORMAT}".encode(), b'\\"format\\":0'),
        (b'"record":', b'"recent":'),
    ],
)
def test_header_with_a_right_checksum_but_no_sense_is_refused(
    path: Path, old: bytes, new: bytes
) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length]
    assert old in text
    text = text.replace(old, new)
    text = MARK + b"0" * 8 + text[len(MARK) + 8 :].rstrip()
    prefix = len(text).to_bytes(8, "little")
    checksum = f"{zlib.crc32(prefix + text):08x}".encode()
    path.write_bytes(prefix + text.replace(b"0" * 8, checksum, 1) + content[8 + length :])
    with pytest.raises(CheckpointError, match=r"step_00000012\.safetensors has"):
        read_checkpoint(path)
