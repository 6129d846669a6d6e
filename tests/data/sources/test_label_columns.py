"""Tables and sequences of several labels: the same matrix from every form, mistakes refused."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_settings import data_config, image_bytes, make_folder

from vision.config import ConfigError, parse
from vision.data.batches import build_loader, evaluation_batches, training_batches
from vision.data.configs import LoaderConfig
from vision.data.order import BatchOrder
from vision.data.preprocess import Preprocess
from vision.data.sources.build_source import build_source, describe, list_splits
from vision.data.sources.shapes import ShapesTwo, two_objects
from vision.data.sources.subsets import nested_subset, split_by_fraction
from vision.data.sources.table import read_table, write_table

LOADER = parse(
    LoaderConfig,
    {
        "workers": 0,
        "prefetch": 1,
        "start_method": "auto",
        "tail": "drop",
        "memory": 0,
        "max_pixels": 10**6,
    },
)
ROWS = ["cat;dog", "", "dog", "?cat;dog", "cat", "cat; dog"]
MATRIX = [[1, 1], [0, 0], [0, 1], [-1, 1], [1, 0], [1, 1]]


def write(path: Path, rows: list[list[str]]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def folder(tmp_path: Path, **given: Any) -> Any:
    if not (tmp_path / "x").exists():
        make_folder(tmp_path, {"x": len(ROWS)})
    return data_config("folder", root=str(tmp_path), **given)


def paths() -> list[str]:
    return [f"x/{i:04d}.png" for i in range(len(ROWS))]


def listed() -> list[list[str]]:
    return [["path", "labels"], *([p, r] for p, r in zip(paths(), ROWS, strict=True))]


def columns() -> list[list[str]]:
    cells = [["" if v < 0 else str(v) for v in row] for row in MATRIX]
    return [["path", "cat", "dog"], *([p, *r] for p, r in zip(paths(), cells, strict=True))]


@pytest.mark.parametrize("form", ["list", "matrix", "folder of tables", "written again"])
def test_every_form_of_a_table_gives_the_same_labels(tmp_path: Path, form: str) -> None:
    table = tmp_path / "t"
    match form:
        case "list":
            config = folder(tmp_path, table=write(table, listed()))
        case "matrix":
            config = folder(tmp_path, table=write(table, columns()))
        case "folder of tables":
            table.mkdir()
            write(table / "train.csv", listed()[:4])
            write(table / "val.csv", [listed()[0], *listed()[4:]])
            config = folder(tmp_path, table=str(table))
            assert list_splits(config) == ("train", "val")
        case _:
            whole = read_table(folder(tmp_path, table=write(table, listed())))
            write_table(whole, tmp_path / "again.csv")
            config = folder(tmp_path, table=str(tmp_path / "again.csv"))
    found = read_table(config)
    assert found.classes == describe(config).classes == ("cat", "dog")
    assert found.labels.tolist() == MATRIX
    source = build_source(config, "train")
    assert source.multi_label
    assert source.labels.dtype == np.int8


@pytest.mark.parametrize("form", ["ClassLabel", "words"])
def test_huggingface_sequences_give_a_matrix(tmp_path: Path, form: str) -> None:
    library = pytest.importorskip("datasets", reason="optional extra: pip install datasets")
    inner = library.ClassLabel(names=["cat", "dog"]) if form == "ClassLabel" else None
    features = {
        "image": library.Image(),
        "labels": library.Sequence(inner or library.Value("string")),
    }
    cells = [[0, 1], [], None, [1]] if inner else [["cat", "dog"], [], None, ["dog"]]
    images = [{"bytes": image_bytes(i), "path": None} for i in range(4)]
    data = library.Dataset.from_dict(
        {"image": images, "labels": cells}, features=library.Features(features)
    )
    library.DatasetDict({"train": data, "validation": data}).save_to_disk(tmp_path / "d")
    config = data_config("huggingface", path=str(tmp_path / "d"), label_column="labels")
    for split in ("train", "val"):
        source = build_source(config, split)
        assert source.classes == ("cat", "dog")
        assert source.labels.tolist() == [[1, 1], [0, 0], [-1, -1], [0, 1]]


WRONG = {
    "list in a column of single labels": (
        [["path", "label"], ["x/0000.png", "a;b"], ["x/0001.png", "a"]],
        r"'a;b' for x/0000.png.*name the column labels.*task=multi_label",
    ),
    "unknown class": (
        [
            *[["path", "labels", "split"], ["x/0000.png", "dog;cat", "train"]],
            ["x/0001.png", "dgo", "val"],
        ],
        r"no training images of the classes dgo. \(dgo: Did you mean 'dog'",
    ),
    "empty": ([["path", "labels"]], "has no rows"),
    "no labels at all": ([["path", "labels"], ["x/0000.png", ""]], "no image with a label"),
    "value in a matrix": (
        [["path", "cat", "dog"], ["x/0000.png", "1", "yes"]],
        "column 'dog' with the value 'yes'.*1, 0 or nothing",
    ),
    "class named like a column": (
        [["path", "labels"], ["x/0000.png", "split;a"]],
        "class named 'split'.*rename",
    ),
    "two forms": ([["path", "labels", "cat"], ["x/0000.png", "a", "1"]], "has a column 'cat'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_table_of_several_labels_with_a_mistake_is_refused(tmp_path: Path, case: str) -> None:
    rows, message = WRONG[case]
    config = folder(tmp_path, table=write(tmp_path / "t.csv", rows))
    with pytest.raises(ConfigError, match=message):
        read_table(config)


def test_tables_of_a_folder_must_agree_and_be_named_after_splits(tmp_path: Path) -> None:
    table = tmp_path / "tables"
    table.mkdir()
    with pytest.raises(ConfigError, match=r"no train.csv"):
        read_table(folder(tmp_path, table=str(table)))
    write(table / "train.csv", columns()[:3])
    write(table / "val.csv", [["path", "cat", "dgo"], ["x/0003.png", "1", "0"]])
    with pytest.raises(ConfigError, match=r"columns of .*val.csv differ.*dgo"):
        read_table(folder(tmp_path, table=str(table)))
    (table / "val.csv").rename(table / "holdout.csv")
    with pytest.raises(ConfigError, match=r"holdout.csv .* named after a split"):
        read_table(folder(tmp_path, table=str(table)))


def test_class_folder_may_have_a_semicolon_in_its_name(tmp_path: Path) -> None:
    make_folder(tmp_path, {"a;b": 2, "c": 2})
    whole = read_table(data_config("folder", root=str(tmp_path)))
    write_table(whole, tmp_path / "split.csv")
    again = read_table(data_config("folder", root=str(tmp_path), table=str(tmp_path / "split.csv")))
    assert again.classes == ("a;b", "c")


def test_held_out_share_is_that_of_every_class() -> None:
    labels = ShapesTwo((16, 16), 0, "train", 400).labels
    labels[:40] = 0  # images without any label are split as well
    parts = split_by_fraction(labels, {"val": 0.25}, seed=0)
    assert sorted([*parts["val"], *parts["train"]]) == list(range(400))
    np.testing.assert_allclose(labels[parts["val"]].sum(0), labels.sum(0) / 4, atol=2)
    assert len(parts["val"]) == pytest.approx(100, abs=3)
    assert sum(parts["val"] < 40) == pytest.approx(10, abs=3)


def test_smaller_share_of_several_labels_is_a_subset() -> None:
    labels = np.zeros((50, 3), dtype=np.int8)
    small, large = (set(nested_subset(labels, f, None, 1).tolist()) for f in (0.2, 0.6))
    assert small < large
    assert (len(small), len(large)) == (10, 30)


def test_two_shapes_have_the_labels_of_their_objects_and_differ_by_split() -> None:
    train, val = (ShapesTwo((16, 16), 0, split, 20) for split in ("train", "val"))
    assert (train.labels.sum(1) == 2).all()
    assert not np.array_equal(train.read(0), val.read(0))
    assert not np.array_equal(train.read(0), two_objects((16, 16), 0, 0).image)
    again = ShapesTwo((16, 16), 0, "train", 5)
    assert np.array_equal(again.read(3), train.read(3))
    assert np.array_equal(again.labels, train.labels[:5])


def test_batches_carry_the_rows_of_the_matrix() -> None:
    config = data_config("shapes_two", image_size=16, train_samples=20, val_samples=5)
    train, val = (build_source(config, split) for split in ("train", "val"))
    half = (0.5, 0.5, 0.5)
    preprocess = Preprocess((16, 16), 3, half, half, "bicubic", 1.0, {})
    loader = build_loader(val, preprocess, config, LOADER)
    batches = list(evaluation_batches(loader, 2, rank=1, ranks=2))
    assert [batch.ids.tolist() for batch in batches] == [[1, 3], [-1]]  # the last one is padding
    assert batches[0].labels.tolist() == val.labels[[1, 3]].tolist()
    assert batches[1].labels.tolist() == [[0] * 8]
    loader = build_loader(train, preprocess, config, LOADER)
    batch = next(training_batches(loader, BatchOrder(0, 4)))
    assert batch.labels.tolist() == train.labels[batch.ids.numpy()].tolist()
