"""No pickle runs anything, and a few bytes of pickle never take much memory or time."""

import builtins
import importlib
import io
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from vision.checkpoints.errors import CheckpointError, MalformedError
from vision.checkpoints.files import torch_file
from vision.checkpoints.files.reading import read_raw
from vision.checkpoints.files.rebuild import Inert, storage
from vision.checkpoints.files.unpickle import LIMIT, unpickle


class Call:
    """Pickled as a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def attacks(marker: Path) -> dict[str, Call]:
    """Calls that would make a file if anything called them."""
    shell = f"touch {marker}"
    python = f"open({str(marker)!r}, 'w').close()"
    payload = pickle.dumps(Call(os.system, shell))
    return {
        "system": Call(os.system, shell),
        "eval": Call(eval, python),
        "exec": Call(exec, python),
        "open": Call(open, str(marker), "w"),
        "popen": Call(subprocess.Popen, ["touch", str(marker)]),
        "run": Call(subprocess.run, ["touch", str(marker)]),
        "mkdir": Call(os.mkdir, str(marker)),
        "loads": Call(pickle.loads, payload),
        "load": Call(torch.load, io.BytesIO(payload), None, None, False),
        "touch": Call(Path.touch, marker),
        "write": Call(Path.write_text, marker, "x"),
        "getattr": Call(getattr(importlib, "import_module"), "os"),  # noqa: B009
        "compile": Call(builtins.compile, python, "x", "exec"),
    }


def run(data: bytes, limit: int = LIMIT) -> tuple[Any, dict[str, None]]:
    inert: dict[str, None] = {}
    return unpickle(io.BytesIO(data), storage, inert, limit), inert


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_hostile_call_in_a_checkpoint_is_never_made(
    tmp_path: Path, zipped: bool, protocol: int
) -> None:
    marker = tmp_path / "marker"
    for name, attack in attacks(marker).items():
        for content in ({"w": torch.ones(2), "x": attack}, {"w": [attack]}, attack):
            path = tmp_path / f"{name}.pth"
            torch.save(
                content,
                path,
                pickle_protocol=protocol,
                _use_new_zipfile_serialization=zipped,
            )
            with suppress(CheckpointError):
                assert read_raw(path).inert  # read as a record, and said so
            assert not marker.exists(), name
    # The attacks are real: pickle itself falls for them.
    pickle.loads(pickle.dumps(attacks(marker)["system"]))
    assert marker.exists()


def test_call_of_a_shell_is_named_in_the_refusal(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Call(os.system, "true")}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"would call posix.system .* nothing was called"):
        read_raw(tmp_path / "a.pth")


@pytest.mark.parametrize("protocol", range(6))
def test_harmless_object_becomes_a_record_of_its_state(protocol: int) -> None:
    value, inert = run(pickle.dumps({"x": CallableState(3)}, protocol))
    assert isinstance(value["x"], Inert) and value["x"].state == {"number": 3}
    assert list(inert) == [f"{__name__}.CallableState"]


class CallableState:
    """Would act when it gets its state; here it never does."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("was built")


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_of_every_protocol_equals_what_pickle_reads(protocol: int) -> None:
    value = {
        "numbers": [0, -1, 255, 2**31, -(2**40), 2**100, 1.5, True, False, None],
        "texts": ["", "ä€", "x" * 300, "line\nbreak", b"\x00\xff"],
        "nested": {"a": {"b": [[], {}, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]}},
        3: "three",
        (1, "x"): "pair",
    }
    shared = [1]
    value["shared"] = [shared, shared]
    found, inert = run(pickle.dumps(value, protocol))
    assert found == value and not inert
    assert found["shared"][0] is found["shared"][1]


def bomb(name: str) -> bytes:
    """Pickles of a few bytes that ask for a lot."""
    match name:
        case "memo":
            return MEMO
        case "bytes":
            return b"\x80\x04\x8e" + struct.pack("<Q", 2**50) + b"x."
        case "text":
            return b"\x80\x02X\xff\xff\xff\x7fabc."
        case "long":
            return b"\x80\x02\x8b\xff\xff\xff\x7fabc."
        case "digits":
            return b"L" + b"9" * 1_000_000 + b"L\n."
        case "instructions":
            return b"\x80\x02" + b"N" * 200_000 + b"0" * 200_000 + b"N."
        case "key":
            return KEY
        case "range":
            return b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."
        case _:
            raise ValueError(name)


@pytest.mark.parametrize(
    "name", ["memo", "bytes", "text", "long", "digits", "instructions", "key", "range"]
)
def test_pickle_that_asks_for_a_lot_gets_little(name: str) -> None:
    data = bomb(name)
    tracemalloc.start()
    with suppress(MalformedError):
        run(data, 10_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(data) + 10**6


MEMO = b"\x80\x02Nr" + struct.pack("<I", 2**27) + b"."
"""Nine bytes: put None into place 2²⁷ of the memo."""
KEY = b"\x80\x02}" + b"N" + b"2\x86" * 60 + b"Ns."
"""A tuple of twice the same tuple, 60 times over, as a key: 2⁶⁰ hashes."""


def standard_library(data: bytes, seconds: float) -> str:
    """What `pickle.Unpickler` with an allow-list makes of a pickle, in a gigabyte of memory."""
    program = f"""
import io, pickle, resource
class Allowed(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(name)
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
try:
    print(Allowed(io.BytesIO({data!r})).load())
except MemoryError:
    print("MemoryError")
"""
    command = [sys.executable, "-c", program]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds).stdout
    except subprocess.TimeoutExpired:
        return "no end"


def test_the_standard_library_fails_where_this_reader_does_not() -> None:
    """The reasons of docs/decisions/0006-pickle.md. The memory of this reader is measured above."""
    assert standard_library(MEMO, 30).strip() == "MemoryError"
    assert run(MEMO)[0] is None
    assert standard_library(KEY, 1.5) == "no end"
    with pytest.raises(MalformedError, match="key"):
        run(KEY)


class Settings(dict[str, Any]):
    """As programs of training have them."""


@pytest.mark.parametrize(
    ("content", "protocol"),
    [({"w": torch.ones(2)}, 4), ({"w": torch.ones(2), "args": Settings(lr=0.1)}, 2)],
    ids=["protocol 4", "subclass of dict"],
)
def test_torch_refuses_harmless_files_that_this_reader_reads(
    content: dict[str, Any], protocol: int, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "a.pth", pickle_protocol=protocol)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "a.pth", weights_only=True)
    assert read_raw(tmp_path / "a.pth").tensors["w"].equal(torch.ones(2))


@pytest.mark.parametrize("name", ["laughs", "deep", "self"])
def test_nested_data_without_an_end_is_refused_or_cut(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_file, "_NODES", 100_000)
    value: Any = []
    match name:
        case "laughs":
            for _ in range(60):
                value = [value, value]
        case "deep":
            for _ in range(400):
                value = [value]
        case "self":
            value.append(value)
    torch.save({"w": torch.ones(2), "x": value}, tmp_path / "a.pth")
    if name == "self":
        assert read_raw(tmp_path / "a.pth").extra == {"x": [None]}
        return
    with pytest.raises(CheckpointError, match="nested too deeply or without an end"):
        read_raw(tmp_path / "a.pth")


def tensor_pickle(shape: str, strides: str, offset: str, count: int = 4) -> bytes:
    """The pickle of {"w": tensor}, in the text notation of protocol 0."""
    return (
        "(dVw\nctorch._utils\n_rebuild_tensor_v2\n((Vstorage\nctorch\nFloatStorage\n"
        f"V0\nVcpu\nI{count}\ntQ{offset}{shape}{strides}I00\nccollections\nOrderedDict\n(tRtRs."
    ).encode()


def numbers(*values: int) -> str:
    return "(" + "".join(f"I{value}\n" for value in values) + "t"


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "message"),
    [
        ((2, 2), (2, 1), 0, None),
        ((2, 2), (2, 1), 1, "reach item 4 of a storage that has 4"),
        ((5,), (1,), 0, "reach item 4"),
        ((2,), (2**62,), 0, "reach item"),
        ((-1,), (1,), 0, "cannot be"),
        ((2,), (-1,), 0, "cannot be"),
        ((2,), (1,), -1, "cannot be"),
        ((2, 2), (1,), 0, "2 axes, 1 strides"),
        ((2**40,), (0,), 0, "repeats a storage of only 4 items"),
        ((2**30, 2**30), (0, 0), 0, "repeats a storage of only 4 items"),
        ((2**62, 2**62), (0, 0), 0, "repeats a storage of only 4 items"),
        ((0, 2**62), (1, 1), 0, "is not the shape of a tensor"),
        ((1,) * 65, (1,) * 65, 0, "65 axes"),
    ],
)
def test_tensor_beyond_its_storage_is_refused_by_name(
    tmp_path: Path,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    message: str | None,
) -> None:
    data = tensor_pickle(numbers(*shape), numbers(*strides), f"I{offset}\n")
    path = tmp_path / "a.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/data/0", torch.arange(4.0).numpy().tobytes())
    if message is None:
        assert read_raw(path).tensors["w"].tolist() == [[0, 1], [2, 3]]
        return
    with pytest.raises(CheckpointError, match=message):
        read_raw(path)


def test_many_names_of_one_large_storage_are_refused(tmp_path: Path) -> None:
    weight = torch.zeros(2**20)
    torch.save({str(i): weight[:] for i in range(100)}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="its tensors claim"):
        read_raw(tmp_path / "a.pth")
