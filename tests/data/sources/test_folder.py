"""Image files: folders, tables, splits that are saved, and what a user may get wrong."""

import csv
from pathlib import Path

import numpy as np
import pytest
from source_settings import data_config, image_bytes, make_folder, shade_of
from torchvision.datasets import ImageFolder

from vision.config import ConfigError
from vision.data.sources.build_source import build_source, describe, list_splits
from vision.data.sources.folder import ignored_line
from vision.data.sources.source import Source
from vision.data.sources.table import read_table, with_saved_split, write_table


def write_csv(path: Path, rows: list[list[str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def names(source: Source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_folder_with_train_and_val_gives_what_torchvision_gives(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", {"cat": 5, "ant": 3, "bee": 4})
    make_folder(tmp_path / "val", {"cat": 2, "ant": 1, "bee": 1}, first=100)
    config = data_config("folder", root=str(tmp_path))
    for split in ("train", "val"):
        source = build_source(config, split)
        expected = ImageFolder(str(tmp_path / split))
        assert isinstance(source, Source)
        assert list(source.classes) == expected.classes
        assert list(zip(names(source), source.labels.tolist(), strict=True)) == expected.samples
    assert shade_of(build_source(config, "val").read(0)) == 102  # ant comes before bee and cat
    assert describe(config).classes == ("ant", "bee", "cat")
    assert list_splits(config) == ("train", "val")


def test_folder_with_nested_hidden_and_other_files_finds_images_alone(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "a" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "a" / "deep" / "er" / "x.JPEG").write_bytes(image_bytes(9, kind="JPEG"))
    (tmp_path / "a" / "deep" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / ".DS_Store").write_bytes(b"")
    (tmp_path / "b" / ".hidden.png").write_bytes(image_bytes(1))
    (tmp_path / "b" / "Thumbs.db").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").write_text("")
    table = read_table(data_config("folder", root=str(tmp_path)))
    assert table.classes == ("a", "b")
    assert list(table.paths) == [
        *("a/0000.png", "a/0001.png", "a/deep/er/x.JPEG"),
        *("b/0000.png", "b/0001.png"),
    ]
    assert table.labels.tolist() == [0, 0, 0, 1, 1]


def test_folder_above_the_one_that_is_split_names_the_one_meant(tmp_path: Path) -> None:
    make_folder(tmp_path / "flowers" / "train", {"rose": 2, "tulip": 2})
    make_folder(tmp_path / "flowers" / "valid", {"rose": 1, "tulip": 1})
    with pytest.raises(ConfigError, match=f"data.root={tmp_path / 'flowers'}"):
        build_source(data_config("folder", root=str(tmp_path), val_fraction=0.5), "train")
    with pytest.raises(ConfigError, match="deeper"):
        describe(data_config("folder", root=str(tmp_path)))
    assert len(build_source(data_config("folder", root=str(tmp_path / "flowers")), "val")) == 2


def test_folder_above_the_class_folders_names_the_one_meant(tmp_path: Path) -> None:
    """Before data.val_fraction is asked for, which would lead to a model with one class."""
    make_folder(tmp_path / "flowers", {"rose": 2, "tulip": 2})
    for fraction in (None, 0.5):
        config = data_config("folder", root=str(tmp_path), val_fraction=fraction)
        with pytest.raises(ConfigError, match=f"deeper .*data.root={tmp_path / 'flowers'}"):
            build_source(config, "train")
    (tmp_path / "flowers" / "lily.png").write_bytes(image_bytes(1))  # a class with folders in it
    config = data_config("folder", root=str(tmp_path), val_fraction=0.4)
    assert build_source(config, "train").classes == ("flowers",)


def test_files_that_are_not_images_are_counted_by_reason(tmp_path: Path) -> None:
    make_folder(tmp_path, {"a": 2, "b": 2})
    for name in ("a/x.mp4", "a/y.mp4", "b/notes.txt", "b/x.xyz.heic2"):
        (tmp_path / name).write_bytes(b"")
    ignored = read_table(data_config("folder", root=str(tmp_path))).ignored
    assert ignored == {"suffix '.mp4'": 2, "suffix '.txt'": 1, "suffix '.heic2'": 1}
    assert "4 files" in ignored_line(ignored) and "2 suffix '.mp4'" in ignored_line(ignored)
    assert ignored_line({}) == ""
    assert "vit-swin[heic]" in ignored_line({"suffix '.heic'": 3})


def test_folder_not_yet_split_is_split_by_class_and_seed(tmp_path: Path) -> None:
    make_folder(tmp_path, {"a": 40, "b": 20, "c": 2})
    config = data_config("folder", root=str(tmp_path), val_fraction=0.2, test_fraction=0.1)
    parts = {split: build_source(config, split) for split in ("train", "val", "test")}
    assert {s: np.bincount(p.labels, minlength=3).tolist() for s, p in parts.items()} == {
        "train": [28, 14, 1],
        "val": [8, 4, 1],
        "test": [4, 2, 0],
    }
    everything = [name for part in parts.values() for name in names(part)]
    assert len(everything) == len(set(everything)) == 62
    assert names(build_source(config, "val")) == names(parts["val"])
    other = config.model_copy(update={"seed": 1})
    assert names(build_source(other, "val")) != names(parts["val"])


def test_folder_split_saved_and_reloaded_is_the_same_split(tmp_path: Path) -> None:
    root = tmp_path / "images"
    make_folder(root, {"n01440764": 9, "n01443537": 7})  # synsets: shown by their names
    config = data_config("folder", root=str(root), val_fraction=0.3)
    write_table(read_table(config), tmp_path / "split.csv")
    again = with_saved_split(config, tmp_path / "split.csv")
    for split in ("train", "val"):
        before, after = build_source(config, split), build_source(again, split)
        assert names(before) == names(after)
        assert np.array_equal(before.labels, after.labels)
        assert (
            before.classes == after.classes == ("tench, Tinca tinca", "goldfish, Carassius auratus")
        )


def test_table_with_groups_keeps_each_group_on_one_side(tmp_path: Path) -> None:
    make_folder(tmp_path, {"x": 120})
    rows = [["path", "label", "group"]]
    rows += [[f"x/{i:04d}.png", "ab"[i % 2], f"patient{i // 4}"] for i in range(120)]
    table = write_csv(tmp_path / "t.csv", rows)
    config = data_config("folder", root=str(tmp_path), table=str(table), val_fraction=0.25)
    group_of = {row[0]: row[2] for row in rows[1:]}
    train, val = (
        {group_of[str(Path(n).relative_to(tmp_path))] for n in names(build_source(config, split))}
        for split in ("train", "val")
    )
    assert not train & val
    assert len(train | val) == 30
    assert np.bincount(build_source(config, "val").labels).tolist() == pytest.approx(
        [15, 15], abs=2
    )


def test_table_with_splits_is_followed(tmp_path: Path) -> None:
    make_folder(tmp_path, {"x": 4})
    rows = [["label", "path", "split"], ["10", "x/0000.png", "train"], ["9", "x/0001.png", "train"]]
    rows += [["9", "x/0002.png", "validation"], ["10", "x/0003.png", "test"]]
    config = data_config(
        "folder", root=str(tmp_path), table=str(write_csv(tmp_path / "t.csv", rows))
    )
    source = build_source(config, "val")
    assert names(source) == [str(tmp_path / "x" / "0002.png")]
    assert source.classes[source.labels[0]] == "9"
    assert list_splits(config) == ("train", "val", "test")


TABLES = {
    "unknown column": ([["path", "lable"]], "column 'lable'. Did you mean 'label'"),
    "no label": ([["path"]], "path and label at least"),
    "no rows": ([["path", "label"]], "no rows"),
    "missing file": ([["path", "label"], ["x/9.png", "a"]], "1 of 1 files .* x/9.png"),
    "short row": ([["path", "label"], ["x/0000.png"]], "line 2"),
    "empty label": ([["path", "label"], ["x/0000.png", ""]], "line 2"),
    "twice": ([["path", "label"], *[["x/0000.png", "a"]] * 2], "more than once"),
    "split": (
        [["path", "label", "split"], ["x/0000.png", "a", "vall"]],
        "'vall'. Did you mean 'val'",
    ),
    "group": (
        [
            ["path", "label", "split", "group"],
            ["x/0000.png", "a", "train", "g"],
            ["x/0001.png", "a", "val", "g"],
        ],
        "group 'g' is both in train and in val",
    ),
    "class not trained": (
        [["path", "label", "split"], ["x/0000.png", "a", "train"], ["x/0001.png", "b", "val"]],
        "no training images of the classes b",
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_table_with_a_mistake_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    make_folder(tmp_path, {"x": 2})
    rows, message = TABLES[case]
    table = write_csv(tmp_path / "t.csv", rows)
    with pytest.raises(ConfigError, match=message):
        read_table(data_config("folder", root=str(tmp_path), table=str(table)))


def test_folder_that_is_missing_is_refused_with_what_exists(tmp_path: Path) -> None:
    config = data_config("folder", root=str(tmp_path / "no" / "such"))
    with pytest.raises(ConfigError, match=rf"folder .*such does not exist .*{tmp_path} exists"):
        build_source(config, "train")


def test_folder_without_images_is_refused_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.heic").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no images .* 1 files ignored \(suffix '.heic'\)"):
        build_source(data_config("folder", root=str(tmp_path)), "train")


def test_folder_with_an_empty_class_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, {"a": 1, "b": 0})
    with pytest.raises(ConfigError, match=r"1 of 2 class folders .* no images: b"):
        build_source(data_config("folder", root=str(tmp_path)), "train")


def test_folder_with_other_classes_in_val_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", {"a": 1, "b": 1})
    make_folder(tmp_path / "val", {"a": 1, "c": 1})
    with pytest.raises(ConfigError, match=r"train/: b; .*val/: c"):
        build_source(data_config("folder", root=str(tmp_path)), "val")


def test_folder_without_val_says_how_to_get_one(tmp_path: Path) -> None:
    make_folder(tmp_path, {"a": 3, "b": 3})
    with pytest.raises(ConfigError, match=r"no images for val.*data.val_fraction"):
        build_source(data_config("folder", root=str(tmp_path)), "val")


def test_folder_val_fraction_of_a_split_set_leaves_its_val_for_testing(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", {"a": 10, "b": 10})
    make_folder(tmp_path / "val", {"a": 3, "b": 3})
    config = data_config("folder", root=str(tmp_path), val_fraction=0.2)
    assert [len(build_source(config, s)) for s in ("train", "val", "test")] == [16, 4, 6]
    assert all("/train/" in name for name in names(build_source(config, "val")))
    assert list_splits(config) == ("train", "val", "test")


def test_folder_source_unreadable_file_names_its_path(tmp_path: Path) -> None:
    make_folder(tmp_path, {"a": 1})
    source = build_source(data_config("folder", root=str(tmp_path)), "train")
    Path(source.name(0)).unlink()
    with pytest.raises(OSError, match=r"a/0000\.png"):
        source.read(0)
