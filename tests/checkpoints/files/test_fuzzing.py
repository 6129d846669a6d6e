"""Damaged and hostile files by the thousand: a CheckpointError or success, no crash, little memory.

The files are opened in a process of their own, whose memory is limited: a segmentation fault, an
endless loop or a file that asks for gigabytes is seen as well as a wrong exception.
"""

import argparse
import io
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from fuzzed_records import open_own, own_file, runs

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.containers import unwrap
from vision.checkpoints.files.reading import nonfinite, read_raw
from vision.checkpoints.native.checkpoint import write_checkpoint

EXTRA_MEMORY = 768 * 2**20
"""Bytes that the process may take beyond what it has after the imports."""
SECONDS = 60
"""For one file; the slowest kind, a list that holds itself many times over, takes a few."""
EXTREMES = [0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1]
GADGETS = [
    *("posix\nsystem", "builtins\neval", "builtins\nexec", "builtins\nopen", "os\nmkdir"),
    *("subprocess\nPopen", "builtins\ngetattr", "torch\nload", "pickle\nloads", "io\nopen"),
    *("pathlib\nPosixPath", "torch._utils\n_rebuild_tensor_v2", "numpy\nload", "shutil\nrmtree"),
    *("numpy.core.multiarray\n_reconstruct", "collections\nOrderedDict", "torch\nFloatStorage"),
]

KINDS = ("damaged", "records", "flips")
Opener = Callable[[Path], None]


class Attack:
    """Pickled as a call that would make the marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def originals(folder: Path) -> dict[str, bytes]:
    """One small file of each container, as its library writes it."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "patch_embed.proj.weight": torch.randn(4, 3, 2, 2, generator=generator),
        "blocks.0.norm1.weight": torch.randn(4, generator=generator),
        "head.weight": torch.randn(3, 4, generator=generator).half(),
        "count": torch.tensor(3),
    }
    content = {"model": tensors, "args": argparse.Namespace(lr=0.1), "best": np.float64(0.5)}
    content["optimizer"] = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1}]}
    path = folder / "original"
    files: dict[str, bytes] = {}
    for name, zipped in (("zip", True), ("legacy", False)):
        for protocol in (2, 4):
            torch.save(
                content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped
            )
            files[f"{name} {protocol}"] = path.read_bytes()
    torch.save({"w": torch.ones(2), "x": Attack(folder / "marker")}, path)
    files["hostile zip"] = path.read_bytes()
    torch.save({"x": Attack(folder / "marker")}, path, _use_new_zipfile_serialization=False)
    files["hostile legacy"] = path.read_bytes()
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    files["safetensors"] = path.read_bytes()
    write_checkpoint(path, {f"model.{name}": t for name, t in tensors.items()}, {"step": 1})
    files["vision"] = path.read_bytes()
    for name, write in (("npz", np.savez), ("npz compressed", np.savez_compressed)):
        stream = io.BytesIO()
        write(stream, **{key: tensor.numpy() for key, tensor in tensors.items()})
        files[name] = stream.getvalue()
    return files


def mutated(content: bytes, source: random.Random, marker: Path) -> bytes:
    """The file with one to four changes."""
    data = bytearray(content)
    for _ in range(source.choice([1, 1, 2, 4])):
        place = source.randrange(len(data) or 1)
        match source.randrange(9):
            case 0:  # a few bytes
                for _ in range(source.randint(1, 8)):
                    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
            case 1:  # cut, at either end
                data = data[:place] if source.random() < 0.8 else data[place:]
            case 2:  # a number of 4 or 8 bytes
                width = source.choice([4, 8])
                number = source.choice(EXTREMES) & (256**width - 1)
                data[place : place + width] = number.to_bytes(width, "little")
            case 3:  # digits: shapes and offsets in a header of text
                digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
                for index in source.sample(digits, min(len(digits), 3)):
                    data[index] = source.choice(b"0123456789-")
            case 4:  # two stretches change places
                other, length = source.randrange(len(data)), source.randint(1, 64)
                first, second = data[place : place + length], data[other : other + length]
                data[place : place + length] = second
                data[other : other + length] = first
            case 5:  # a stretch is there twice, or is gone
                length = source.randint(1, 200)
                data[place:place] = data[place : place + length] * source.randint(1, 3)
            case 6:
                del data[place : place + source.randint(1, 64)]
            case 7:  # a call of something, somewhere
                call = f"c{source.choice(GADGETS)}\n(Vtouch {marker}\ntR"
                data[place:place] = call.encode()
            case 8:  # instructions of pickle
                codes = bytes([source.choice(b"().0NRQabcdeosul}]tq2\x81\x85\x86\x87\x8f\x90\x93")])
                length = source.randint(1, 8)
                data[place : place + length] = codes * length
        if not data:
            break
    return bytes(data)


def random_pickle(source: random.Random, marker: Path) -> bytes:
    """Instructions that mostly make sense one by one, in an order that mostly does not."""
    parts = [b"(", b"}", b"]", b")", b"N", b"K\x05", b"X\x01\x00\x00\x00w", b"q\x01", b"h\x01"]
    parts += [b"t", b"R", b"s", b"a", b"b", b"e", b"u", b"\x81", b"\x85", b"\x86", b"2", b"0"]
    parts += [f"c{gadget}\n".encode() for gadget in GADGETS]
    parts += [f"X{chr(len(str(marker)))}\0\0\0{marker}".encode("latin-1")]
    chosen = source.choices(parts, k=source.randint(2, 40))
    return b"\x80\x02}" + b"".join(chosen) + b"."


def open_any(path: Path) -> None:
    raw = read_raw(path)
    unwrap(raw)
    nonfinite(raw.tensors)  # looks at every byte


def cases(kind: str, folder: Path) -> Callable[[random.Random, int], tuple[bytes, Opener]]:
    """A function that makes a file of a kind from a seed, with the function that opens it."""
    files, own, marker = originals(folder), runs(), folder / "marker"
    names = sorted(files)

    def damaged(source: random.Random, seed: int) -> tuple[bytes, Opener]:
        if seed % 8 == 0:
            mark = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {}))
            return mark + random_pickle(source, marker) + pickle.dumps([], 2), open_any
        return mutated(files[names[seed % len(names)]], source, marker), open_any

    def with_record(source: random.Random, seed: int) -> tuple[bytes, Opener]:
        return own_file(own[seed % len(own)], source), open_own

    def flipped(source: random.Random, seed: int) -> tuple[bytes, Opener]:
        content = files[("zip 2", "zip 4", "npz", "npz compressed")[seed % 4]]
        (folder / "original").write_bytes(content)
        expected = read_raw(folder / "original").tensors
        data = bytearray(content)
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)

        def open_equal(path: Path) -> None:
            found = read_raw(path).tensors
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name

        return bytes(data), open_equal

    makers = {"damaged": damaged, "records": with_record, "flips": flipped}

    def any_kind(source: random.Random, seed: int) -> tuple[bytes, Opener]:
        return makers[KINDS[seed % len(KINDS)]](source, seed // len(KINDS))

    return any_kind if kind == "every" else makers[kind]


def worker(folder: Path, kind: str, first: int, count: int) -> None:
    """Open `count` files and print what came of them; whatever else happens is a failure."""
    make = cases(kind, folder)
    path, marker = folder / "case", folder / "marker"
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + EXTRA_MEMORY,) * 2)

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("took too long")

    signal.signal(signal.SIGALRM, too_long)
    outcomes = {"read": 0, "refused": 0}
    for seed in range(first, first + count):
        content, open_file = make(random.Random(seed), seed)
        path.write_bytes(content)
        signal.alarm(SECONDS)
        try:
            open_file(path)
            outcomes["read"] += 1
        except CheckpointError as error:
            if str(path) not in str(error) or len(str(error)) > 2000:
                print(f"seed {seed} has a message without its file or end: {str(error)[:2000]}")
                sys.exit(1)
            outcomes["refused"] += 1
        except BaseException:
            print(f"seed {seed}")
            traceback.print_exc(file=sys.stdout)
            sys.exit(1)
        signal.alarm(0)
        if marker.exists():
            print(f"seed {seed} made the marker")
            sys.exit(1)
    print(outcomes["read"], outcomes["refused"])


def fuzz(folder: Path, kind: str, first: int, count: int) -> tuple[int, int]:
    command = [sys.executable, __file__, str(folder), kind, str(first), str(count)]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | path)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    read, refused = run.stdout.split()
    return int(read), int(refused)


def test_originals_are_read_and_hostile_ones_refused(tmp_path: Path) -> None:
    for name, content in originals(tmp_path).items():
        (tmp_path / "case").write_bytes(content)
        if name.startswith("hostile"):
            with pytest.raises(CheckpointError, match=r"would call posix\.system"):
                read_raw(tmp_path / "case")
        else:
            assert unwrap(read_raw(tmp_path / "case")).tensors
    assert not (tmp_path / "marker").exists()


def test_some_hundred_files_are_read_or_refused(tmp_path: Path) -> None:
    read, refused = fuzz(tmp_path, "every", 0, 450)
    assert read + refused == 450 and refused > 200


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 13_000, 3000))
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_files_are_read_or_refused(tmp_path: Path, kind: str, first: int) -> None:
    read, refused = fuzz(tmp_path, kind, first, 3000)
    assert read + refused == 3000 and refused > 1000


def test_file_with_a_size_that_its_timm_model_does_not_take_is_refused_by_its_name(
    tmp_path: Path,
) -> None:
    assert fuzz(tmp_path, "records", 1882, 1) == (0, 1)


if __name__ == "__main__":
    worker(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
