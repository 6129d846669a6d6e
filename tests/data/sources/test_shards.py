"""Tar shards: found, indexed once, read by seek, and harmless whatever their members are called."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from source_settings import data_config, image_bytes, make_tar, shade_of

from vision.config import ConfigError
from vision.data.sources import shard_index
from vision.data.sources.build_source import build_source, describe
from vision.data.sources.shards import expand, find_shards
from vision.data.sources.source import Source


def make_shards(root: Path, split: str, shards: int, each: int, first: int = 0) -> None:
    root.mkdir(exist_ok=True)
    for shard in range(shards):
        members = {}
        for i in range(each):
            number = first + shard * each + i
            members[f"dir/{number:04d}.png"] = image_bytes(number)
            members[f"dir/{number:04d}.cls"] = str(number % 3).encode()
        make_tar(root / f"{split}-{shard:06d}.tar", members)


def shards_config(root: Path, **changes: object) -> object:
    return data_config("webdataset", root=str(root), **changes)


def test_shards_read_by_index_give_the_members_in_order(tmp_path: Path) -> None:
    make_shards(tmp_path, "train", 3, 5)
    make_shards(tmp_path, "val", 1, 4, first=100)
    source = build_source(shards_config(tmp_path), "train")
    assert isinstance(source, Source)
    assert [shade_of(source.read(i)) for i in range(15)] == list(range(15))
    assert source.labels.tolist() == [i % 3 for i in range(15)]
    assert source.name(6) == f"{tmp_path}/train-000001.tar:dir/0006.png"
    assert source.read(6) == image_bytes(6)  # the very bytes
    assert [shade_of(build_source(shards_config(tmp_path), "val").read(i)) for i in range(4)] == [
        *range(100, 104)
    ]
    assert describe(shards_config(tmp_path)).classes == ("0", "1", "2")


def test_shards_opened_again_are_not_scanned_and_changed_ones_alone_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards(tmp_path, "train", 3, 5)
    scanned = []
    scan = shard_index._scan
    monkeypatch.setattr(shard_index, "_scan", lambda s, f: scanned.append(s.name) or scan(s, f))
    build_source(shards_config(tmp_path), "train")
    assert len(scanned) == 3
    build_source(shards_config(tmp_path), "train")
    assert len(scanned) == 3
    make_tar(tmp_path / "train-000001.tar", {"z.png": image_bytes(77), "z.cls": b"1"})
    source = build_source(shards_config(tmp_path), "train")
    assert scanned[3:] == ["train-000001.tar"]
    assert [shade_of(source.read(i)) for i in range(11)] == [*range(5), 77, *range(10, 15)]
    os.utime(tmp_path / "train-000002.tar", ns=(1, 1))
    build_source(shards_config(tmp_path), "train")
    assert scanned[4:] == ["train-000002.tar"]


def test_shards_moved_with_their_index_are_not_scanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards(tmp_path / "here", "train", 2, 2)
    build_source(shards_config(tmp_path / "here"), "train")
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.setattr(shard_index, "_scan", None)
    source = build_source(shards_config(tmp_path / "there"), "train")
    assert [shade_of(source.read(i)) for i in range(4)] == [0, 1, 2, 3]


def test_shards_with_a_damaged_index_are_indexed_anew(tmp_path: Path) -> None:
    make_shards(tmp_path, "train", 1, 3)
    build_source(shards_config(tmp_path), "train")
    (index,) = tmp_path.glob("index-*.npz")
    index.write_bytes(index.read_bytes()[:100])
    assert len(build_source(shards_config(tmp_path), "train")) == 3


def test_shards_with_json_labels_use_the_field(tmp_path: Path) -> None:
    members = {}
    for i, name in enumerate(["dog", "cat", "dog"]):
        members[f"{i}.json"] = json.dumps({"category": name, "width": 8}).encode()
        members[f"{i}.jpg"] = image_bytes(i, kind="JPEG")
    make_tar(tmp_path / "train-0.tar", members)
    source = build_source(shards_config(tmp_path, label_field="category"), "train")
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [1, 0, 1]
    with pytest.raises(ConfigError, match="no label 'label'; it has: category, width"):
        build_source(shards_config(tmp_path), "train")


def test_shards_with_hostile_names_and_links_never_touch_the_disk(tmp_path: Path) -> None:
    root = tmp_path / "shards"
    root.mkdir()
    outside = tmp_path / "outside.png"
    secret = tmp_path / "secret.png"
    secret.write_bytes(image_bytes(200))
    with tarfile.open(root / "train-0.tar", "w") as tar:
        for name, content in (
            (str(outside), image_bytes(1)),
            (str(outside.with_suffix(".cls")), b"0"),
            ("../../escape.png", image_bytes(2)),
            ("../../escape.cls", b"1"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo("link.png")
            link.type, link.linkname = kind, str(secret)
            tar.addfile(link)
    before = sorted(p for p in tmp_path.rglob("*") if not p.name.startswith("index-"))
    source = build_source(shards_config(root), "train")
    assert [shade_of(source.read(i)) for i in range(len(source))] == [1, 2]
    assert sorted(p for p in tmp_path.rglob("*") if not p.name.startswith("index-")) == before


def test_shards_indexed_when_samples_without_an_image_were_left_out_are_indexed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards(tmp_path, "train", 1, 3)
    monkeypatch.setattr(shard_index, "_FORMAT", 1)
    build_source(shards_config(tmp_path), "train")
    monkeypatch.undo()
    scanned = []
    scan = shard_index._scan
    monkeypatch.setattr(shard_index, "_scan", lambda *a: scanned.append(a) or scan(*a))
    build_source(shards_config(tmp_path), "train")
    assert len(scanned) == 1


def test_shards_with_members_that_describe_the_shard_are_read(tmp_path: Path) -> None:
    members = {"__shard__.json": b"{}", "a.png": image_bytes(3), "a.cls": b"0"}
    make_tar(tmp_path / "train-0.tar", members)
    assert len(build_source(shards_config(tmp_path), "train")) == 1


def test_shards_with_long_and_unusual_names_are_read(tmp_path: Path) -> None:
    long = "a" * 150 + "/" + "ü" * 60 + "/x"
    make_tar(
        tmp_path / "train-0.tar",
        {f"{long}.seg.png": image_bytes(3), f"{long}.cls": b"0", "note.txt": b"no sample"},
    )
    source = build_source(shards_config(tmp_path), "train")
    assert source.name(0).endswith(f":{long}.seg.png")
    assert shade_of(source.read(0)) == 3


def test_expand_braces_and_wildcards_give_the_files(tmp_path: Path) -> None:
    assert expand("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand("{x,y}/{0..1}") == ["x/0", "x/1", "y/0", "y/1"]
    make_shards(tmp_path, "train", 3, 1)
    assert [p.name for p in find_shards(tmp_path, "train-{000002..000002}.tar")] == [
        "train-000002.tar"
    ]
    assert len(find_shards(tmp_path, "*.tar")) == 3
    for pattern, message in (
        ("train-{000000..000005}.tar", r"no shards train-000003\.tar, .* in"),
        ("test-*.tar", "no shards test-"),
        ("{3..1}.tar", "counts backwards"),
        ("{x}.tar", "neither a range"),
        ("https://example.org/{0..9}.tar", "not on a local disk"),
        ("pipe:curl x", "not on a local disk"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_shards(tmp_path, pattern)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"a.png": b"x"}, ConfigError, r"the sample 'a' of .*train-0\.tar has no label"),
        ({"a.png": b"x", "a.jpg": b"y", "a.cls": b"0"}, ConfigError, "several images"),
        ({"a.txt": b"x"}, ConfigError, "the shards .* have no images"),
        (
            {"a.png": b"x", "a.cls": b"0", "b.heic": b"x", "b.cls": b"1"},
            ConfigError,
            r"the sample 'b' of .*train-0\.tar has a label but no image.*b\.heic.*\.jpg",
        ),
        (
            {"a.png": b"x", "a.cls": b"0", "b.json": b"{}"},
            ConfigError,
            r"the sample 'b' of .*train-0\.tar has a label but no image",
        ),
    ],
)
def test_shards_with_incomplete_samples_are_refused(
    tmp_path: Path, content: dict[str, bytes], error: type[Exception], message: str
) -> None:
    make_tar(tmp_path / "train-0.tar", content)
    with pytest.raises(error, match=message):
        build_source(shards_config(tmp_path), "train")


@pytest.mark.parametrize("damage", ["cut", "gzip", "noise"])
def test_shards_that_are_no_whole_tar_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    make_shards(tmp_path, "train", 1, 40)
    path = tmp_path / "train-000000.tar"
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[: 512 * 21 + 100])
        case "gzip":
            import gzip

            path.write_bytes(gzip.compress(path.read_bytes()))
        case "noise":
            path.write_bytes(np.random.default_rng(0).bytes(5000))
    with pytest.raises(OSError, match=r"train-000000\.tar cannot be read as a tar file"):
        build_source(shards_config(tmp_path), "train")


def test_shards_cut_after_indexing_name_the_member(tmp_path: Path) -> None:
    make_shards(tmp_path, "train", 1, 5)
    source = build_source(shards_config(tmp_path), "train")
    path = tmp_path / "train-000000.tar"
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(OSError, match=r"train-000000\.tar:dir/0003\.png"):
        source.read(3)


def test_shards_val_label_unknown_in_train_is_refused(tmp_path: Path) -> None:
    make_tar(tmp_path / "train-0.tar", {"a.png": image_bytes(0), "a.cls": b"1"})
    make_tar(tmp_path / "val-0.tar", {"a.png": image_bytes(0), "a.cls": b"7"})
    with pytest.raises(ConfigError, match=r"the labels 7 .* 2 classes"):
        build_source(shards_config(tmp_path), "val")


def test_shards_val_fraction_is_taken_from_train(tmp_path: Path) -> None:
    make_shards(tmp_path, "train", 2, 15)
    config = shards_config(tmp_path, val=None, val_fraction=0.2)
    train, val = (build_source(config, split) for split in ("train", "val"))
    assert (len(train), len(val)) == (24, 6)
    assert np.bincount(val.labels).tolist() == [2, 2, 2]
    assert not {train.name(i) for i in range(24)} & {val.name(i) for i in range(6)}
