"""Prepared shards: the same images, smaller; killed and resumed to the same bytes; verified."""

import hashlib
import io
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from source_settings import data_config, image_bytes, make_folder

from vision.config import ConfigError
from vision.data.sources.build_source import build_source, describe
from vision.data.sources.folder import FolderSource
from vision.data.sources.packed import PackedStrings
from vision.data.sources.source import ArraySource, Source
from vision.data.tools.configs import PrepareConfig
from vision.data.tools.prepare import prepare, prepare_split, verify


def settings(output: Path, **changed: object) -> PrepareConfig:
    """Settings that keep every image, for a source that is built elsewhere."""
    values: dict[str, object] = {
        "data": data_config("folder", root="unused"),
        "output": output,
        "short_side": None,
        "image_format": "png",
        "quality": 90,
        "shard_size": 1,
        "workers": 0,
    }
    return PrepareConfig(**values | changed)


def noise(number: int, size: tuple[int, int] = (40, 30)) -> ArraySource:
    images = np.random.default_rng(0).integers(0, 256, (number, *size, 3), dtype=np.uint8)
    return ArraySource(np.arange(number) % 3, ("a", "b", "c"), 3, "noise", images)


def checksums(folder: Path) -> dict[str, str]:
    files = [p for p in folder.iterdir() if not p.name.startswith("index-")]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def by_key(source: Source) -> list[int]:
    """Index in the prepared source of each index in the original."""
    keys = [int(Path(source.name(i).rpartition(":")[2]).stem) for i in range(len(source))]
    return np.argsort(keys).tolist()


def test_prepare_arrays_as_png_gives_the_same_pixels_and_labels(tmp_path: Path) -> None:
    original = noise(20)
    prepared = prepare_split(original, "train", settings(tmp_path))
    assert prepared.count == 20
    config = data_config("webdataset", root=str(tmp_path))
    source = build_source(config, "train")
    assert describe(config).classes == ("a", "b", "c")
    for i, j in enumerate(by_key(source)):
        pixels = np.asarray(Image.open(io.BytesIO(source.read(j))))
        assert np.array_equal(pixels, original.read(i))
        assert source.labels[j] == original.labels[i]


def test_prepare_grey_images_stay_grey(tmp_path: Path) -> None:
    images = np.arange(5 * 8 * 8, dtype=np.uint8).reshape(5, 8, 8, 1)
    grey = ArraySource(np.zeros(5, dtype=np.int64), ("x",), 1, "grey", images)
    prepare_split(grey, "train", settings(tmp_path))
    config = data_config("webdataset", root=str(tmp_path))
    source = build_source(config, "train")
    assert source.channels == describe(config).channels == 1
    image = Image.open(io.BytesIO(source.read(by_key(source)[3])))
    assert image.mode == "L"
    assert np.array_equal(np.asarray(image), images[3, ..., 0])


def test_prepare_large_files_are_shrunk_as_pillow_does_and_small_ones_kept(tmp_path: Path) -> None:
    files = tmp_path / "files" / "x"
    files.mkdir(parents=True)
    random = np.random.default_rng(1)
    large = Image.fromarray(random.integers(0, 256, (4, 6, 3), dtype=np.uint8)).resize((180, 120))
    large.save(files / "0.png")
    (files / "1.bmp").write_bytes(image_bytes(7, (40, 30), "JPEG"))  # the name lies
    paths = PackedStrings(["x/0.png", "x/1.bmp"])
    labels = np.zeros(2, dtype=np.int64)
    source = FolderSource(labels, ("x",), 3, tmp_path / "files", paths)
    prepare_split(
        source, "train", settings(tmp_path / "out", short_side=32, image_format="jpeg", quality=95)
    )
    result = build_source(data_config("webdataset", root=str(tmp_path / "out")), "train")
    shrunk, kept = (result.read(i) for i in by_key(result))
    assert kept == (files / "1.bmp").read_bytes()
    assert result.name(by_key(result)[1]).endswith(".jpg")
    image = Image.open(io.BytesIO(shrunk))
    assert (image.format, image.size) == ("JPEG", (48, 32))
    expected = np.asarray(large.resize((48, 32), Image.Resampling.BICUBIC), dtype=float)
    assert np.abs(np.asarray(image, dtype=float) - expected).mean() < 4


SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path += {path!r}
import test_prepare
from vision.data.tools.prepare import prepare_split
source = test_prepare.noise(130, (120, 100))
read, count = source.read, 0
def fragile(index):
    global count
    count += 1
    if count > {limit}:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(index)
source.read = fragile
prepare_split(source, "train", test_prepare.settings(Path({output!r})))
"""


def test_prepare_killed_twice_and_run_again_gives_identical_bytes(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    prepare_split(noise(130, (120, 100)), "train", settings(whole))
    assert len(list(whole.glob("train-*.tar"))) > 3
    for limit in (40, 45):
        code = SCRIPT.format(path=sys.path, output=str(broken), limit=limit)
        killed = subprocess.run([sys.executable, "-c", code], check=False)
        assert killed.returncode == -signal.SIGKILL
    done = len(list(broken.glob("train-*.tar")))
    assert 1 <= done < len(list(whole.glob("train-*.tar")))
    stamps = {p: p.stat().st_mtime_ns for p in broken.glob("train-*.tar")}
    prepare_split(noise(130, (120, 100)), "train", settings(broken))
    assert checksums(broken) == checksums(whole)
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in stamps.items())  # none written again


def test_prepare_with_workers_gives_identical_bytes(tmp_path: Path) -> None:
    for workers in (0, 2):
        prepare_split(noise(70), "train", settings(tmp_path / str(workers), workers=workers))
    assert checksums(tmp_path / "0") == checksums(tmp_path / "2")


def test_prepare_again_with_other_settings_or_images_is_refused(tmp_path: Path) -> None:
    prepare_split(noise(10), "train", settings(tmp_path))
    before = checksums(tmp_path)
    with pytest.raises(ConfigError, match="quality was 90, is 50"):
        prepare_split(noise(10), "train", settings(tmp_path, quality=50))
    with pytest.raises(ConfigError, match="other images"):
        prepare_split(noise(11), "train", settings(tmp_path))
    assert checksums(tmp_path) == before
    (tmp_path / "val-000000.tar").write_bytes(b"something of the user's")
    with pytest.raises(ConfigError, match=r"val-000000\.tar exists already"):
        prepare_split(noise(10), "val", settings(tmp_path))


def test_prepare_damaged_shard_is_found_by_its_checksum(tmp_path: Path) -> None:
    prepared = prepare_split(noise(10), "train", settings(tmp_path))
    verify(tmp_path, prepared)
    path = tmp_path / "train-000000.tar"
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"train-000000\.tar is damaged"):
        prepare_split(noise(10), "train", settings(tmp_path))


def prepare_config(root: Path, output: Path, **data: object) -> PrepareConfig:
    folder = data_config("folder", root=str(root), val_fraction=0.25, **data)
    return settings(output, data=folder, image_format="jpeg")


def test_prepare_whole_data_set_writes_every_split(tmp_path: Path) -> None:
    make_folder(tmp_path / "in", {"a": 8, "b": 8})
    config = prepare_config(tmp_path / "in", tmp_path / "out")
    assert [p.line().split(" images")[0] for p in prepare(config)] == ["train: 12", "val: 4"]
    shards = data_config("webdataset", root=str(tmp_path / "out"))
    for split in ("train", "val"):
        contents = [s.read(i) for s in [build_source(shards, split)] for i in range(len(s))]
        expected = build_source(config.data, split)
        assert sorted(contents) == sorted(expected.read(i) for i in range(len(expected)))


def test_prepare_unreadable_images_stop_or_are_skipped_as_configured(tmp_path: Path) -> None:
    make_folder(tmp_path / "in", {"a": 20, "b": 20})
    bad = tmp_path / "in" / "a" / "0007.png"
    bad.write_bytes(b"")
    with pytest.raises(OSError, match=r"a/0007\.png"):
        prepare(prepare_config(tmp_path / "in", tmp_path / "one"))
    skip = prepare_config(tmp_path / "in", tmp_path / "two", on_error="skip", max_error_share=0.05)
    results = prepare(skip)
    assert sum(p.count for p in results) == 39
    (reason,) = [reason for p in results for reason in p.skipped]
    assert str(bad) in reason
    assert ["1 unreadable" in p.line() for p in results].count(True) == 1
    strict = skip.data.model_copy(update={"max_error_share": 0.01})
    update = {"data": strict, "output": tmp_path / "three"}
    with pytest.raises(OSError, match="allow 0"):
        prepare(skip.model_copy(update=update))


def test_prepare_finished_leaves_nothing_half_done_behind(tmp_path: Path) -> None:
    prepare_split(noise(4), "train", settings(tmp_path))
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith("index-")}
    assert names == {"train-000000.tar", "dataset.json"}
