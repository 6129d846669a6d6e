"""The image files of a `folder` data set with label, split and group: from folders or a CSV file.

A `Table` can be written as CSV and read again, so that a split is kept with the run that used it
and can be used by others (`data.table=outputs/…/split.csv`).
"""

import csv
import io
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vision.config import ConfigError, shorten, suggest
from vision.data.configs import SPLITS, FolderConfig, Split
from vision.data.sources.folder import (
    FolderSource,
    check_same_classes,
    list_classes,
    list_images,
    require_folder,
)
from vision.data.sources.label_columns import check_columns, check_known, label_columns, read_labels
from vision.data.sources.packed import PackedStrings
from vision.data.sources.source import Labels
from vision.data.sources.subsets import split_by_fraction
from vision.data.sources.wordnet import readable_names
from vision.files import open_file, replacing, write_all

SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
"""Usual names of splits."""


@dataclass(frozen=True)
class Table:
    """Images with their labels and, if known, their split and group."""

    root: Path
    classes: tuple[str, ...]
    """The labels as written: names of class folders, values of a column, or names of columns."""
    paths: PackedStrings
    labels: Labels
    splits: dict[Split, NDArray[np.int64]]
    """Indices of each split. A data set that is not split yet has only train."""
    groups: list[str] | None
    ignored: Counter[str] = field(default_factory=Counter)
    """Number of files in the folders that are not used, by reason."""

    def source(self, split: Split, channels: int) -> FolderSource:
        """Return the images of one split."""
        indices = self.splits[split]
        paths = self.paths.take(indices)
        classes = readable_names(self.classes)
        return FolderSource(self.labels[indices], classes, channels, self.root, paths)


def read_table(config: FolderConfig, only: Split | None = None) -> Table:
    """Return the images of a data set, each in its final split. With `only` the others may be
    missing, which saves time.

    val_fraction takes validation images from the training images; the set's own validation images
    then become test images if it has no others.
    """
    require_folder(config.root)
    if config.val_fraction or config.test_fraction:
        only = None
    whole = _read_csv(config) if config.table else _read_folders(config.root, only)
    fractions: dict[str, float] = {}
    if config.test_fraction:
        if set(whole.splits) != {"train"}:
            raise ConfigError(
                f"data.test_fraction: only for images that are not yet split, but {config.root} "
                f"has {' and '.join(whole.splits)}. Set it to null."
            )
        fractions["test"] = config.test_fraction
    if config.val_fraction:
        if "train" not in whole.splits:
            raise ConfigError("data.val_fraction: no training images to take them from.")
        fractions["val"] = config.val_fraction
    if not fractions:
        return whole
    fractions = dict(sorted(fractions.items(), reverse=True))  # val first: small classes need it
    return replace(whole, splits=_cut(whole, fractions, config.seed))


def folder_classes(config: FolderConfig) -> tuple[str, ...]:
    """Return the class names, without listing the class folders."""
    require_folder(config.root)
    if config.table:
        return readable_names(_read_csv(config).classes)
    folders = _split_folders(config.root)
    return readable_names(list_classes(next(iter(folders.values()), config.root)))


def write_table(table: Table, path: Path) -> None:
    """Write every image with its split as a CSV file for `data.table`, atomically.

    Several labels are written as a column for each class, which can also be unknown.
    """
    split_of = np.empty(len(table.paths), dtype=object)
    for split, indices in table.splits.items():
        split_of[indices] = split
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    several, groups = table.labels.ndim == 2, table.groups
    group = [] if groups is None else ["group"]
    writer.writerow(["path", *(table.classes if several else ["label"]), "split", *group])
    for i, name in enumerate(table.paths):
        label = table.labels[i]
        cells = ("" if v < 0 else str(v) for v in label) if several else [table.classes[label]]
        writer.writerow([name, *cells, split_of[i], *(groups[i : i + 1] if groups else [])])
    with replacing(path) as file:
        write_all(file, text.getvalue().encode("utf-8", "surrogateescape"))


def with_saved_split(config: FolderConfig, path: Path) -> FolderConfig:
    """Return the config of the same data set with the split of a file of `write_table`."""
    return config.model_copy(update={"table": path, "val_fraction": None, "test_fraction": None})


def _cut(whole: Table, fractions: dict[str, float], seed: int) -> dict[Split, NDArray[np.int64]]:
    """Return the splits after taking the fractions out of the training images."""
    pool = whole.splits["train"]
    groups = None
    if whole.groups is not None:
        groups = np.unique([whole.groups[i] for i in pool], return_inverse=True)[1].astype(np.int64)
    try:
        parts = split_by_fraction(whole.labels[pool], fractions, seed, groups)
    except ValueError as error:
        raise ConfigError(f"data.{next(iter(fractions))}_fraction: {error}") from None
    splits = dict(whole.splits)
    if "val" in fractions and "val" in splits:
        splits.setdefault("test", splits.pop("val"))
    return splits | {SPLIT_NAMES[part]: pool[indices] for part, indices in parts.items()}


def _split_folders(root: Path) -> dict[Split, Path]:
    """Return the folders of the splits, if the data set is split."""
    folders: dict[Split, Path] = {}
    for name in list_classes(root):
        split = SPLIT_NAMES.get(name.lower())
        if split is None:
            continue
        if split in folders:
            raise ConfigError(
                f"data.root: {root} has both {folders[split].name}/ and {name}/; which one is "
                f"{split}?"
            )
        folders[split] = root / name
    others = [n for n in list_classes(root) if n.lower() not in SPLIT_NAMES]
    if "train" not in folders and others:
        _refuse_splits_below(root, others)
        return {}  # a class may be called test
    return {split: folders[split] for split in SPLITS if split in folders}


def _refuse_splits_below(root: Path, names: list[str]) -> None:
    """Refuse a folder above the one that is split: its classes would be the names of data sets."""
    deeper = []
    for name in names:
        found = {SPLIT_NAMES.get(inner.lower()) for inner in list_classes(root / name)}
        if {"train", "val"} <= found or {"train", "test"} <= found:
            deeper.append(f"data.root={root / name}")
    if deeper:
        raise ConfigError(
            f"data.root: {root} has no train/, but {len(deeper)} of its folders "
            f"{'has' if len(deeper) == 1 else 'have'} one. One level deeper is meant: "
            f"{' or '.join(deeper[:3])}."
        )


def _refuse_classes_below(folders: Mapping[Split, Path]) -> None:
    """Refuse a folder whose single class is a folder of classes: every answer would be right."""
    folder = next(iter(folders.values()))
    names = list_classes(folder)
    if len(names) != 1:
        return
    below = folder / names[0]
    classes = list_classes(below)
    if len(classes) > 1 and not any(entry.is_file() for entry in below.iterdir()):
        raise ConfigError(
            f"data.root: {folder} has a single class, {names[0]}, with {len(classes)} folders in "
            f"it ({shorten(classes, 3)}). One level deeper is meant: data.root={below}."
        )


def _read_folders(root: Path, only: Split | None) -> Table:
    """Read a folder per class, in one folder or in one for each split."""
    folders = _split_folders(root) or {"train": root}
    _refuse_classes_below(folders)
    first = next(iter(folders.values()))
    classes = list_classes(first)
    for folder in folders.values():
        check_same_classes(
            f"data.root: the classes in {root} differ",
            (f"only in {first.name}/:", classes),
            (f"only in {folder.name}/:", list_classes(folder)),
        )
    if only in folders:
        folders = {only: folders[only]}
    paths: list[str] = []
    labels: list[NDArray[np.int64]] = []
    splits: dict[Split, NDArray[np.int64]] = {}
    ignored: Counter[str] = Counter()
    for split, folder in folders.items():
        _, found, own, others = list_images(folder)
        ignored += others
        prefix = "" if folder == root else f"{folder.name}/"
        splits[split] = np.arange(len(paths), len(paths) + len(found))
        paths += [prefix + path for path in found]
        labels.append(own)
    packed, numbers = PackedStrings(paths), np.concatenate(labels)
    return Table(root, classes, packed, numbers, splits, None, ignored)


def _read_csv(config: FolderConfig) -> Table:
    """Read and check the rows of `config.table`, a file or a folder with one for each split."""
    assert config.table is not None
    table = config.table
    columns: dict[str, list[str]] = {}
    for split, file in _tables(table).items():
        rows = _read_rows(file)
        if split is not None:
            rows |= {"split": [split] * len(rows["path"])}
        if columns and columns.keys() != rows.keys():
            extra = sorted(columns.keys() ^ rows.keys())
            raise ConfigError(
                f"data.table: the columns of {file} differ from those of the other tables in "
                f"{table}: {shorten(extra)}. {suggest(extra[0], columns.keys() & rows.keys())}"
            )
        for name, values in rows.items():
            columns.setdefault(name, []).extend(values)
    _check_files(config.root, table, columns["path"])
    classes, labels = read_labels(table, columns)
    splits = _check_splits(table, columns)
    if "train" in splits:
        check_known(table, classes, labels[splits["train"]], "labels" in columns)
    paths = PackedStrings(columns["path"])
    return Table(config.root, classes, paths, labels, splits, columns.get("group"))


def _tables(table: Path) -> dict[Split | None, Path]:
    """Return the CSV file, or those of a folder by the split that they are named after."""
    if table.is_file():
        return {None: table}
    if not table.is_dir():
        raise ConfigError(f"data.table: {table} does not exist.")
    found: dict[Split | None, Path] = {}
    for file in sorted(table.glob("*.csv")):
        split = SPLIT_NAMES.get(file.stem.lower())
        if split is None or split in found:
            raise ConfigError(
                f"data.table: {file} in a folder of tables must be named after a split, each once: "
                "train.csv, val.csv or test.csv."
            )
        found[split] = file
    if not found:
        raise ConfigError(f"data.table: {table} has no train.csv, val.csv or test.csv.")
    return found


def _read_rows(table: Path) -> dict[str, list[str]]:
    """Return the columns of a file by name."""
    columns: dict[str, list[str]] = defaultdict(list)
    try:
        with io.TextIOWrapper(
            open_file(table), newline="", encoding="utf-8-sig", errors="surrogateescape"
        ) as file:
            reader = csv.DictReader(file, strict=True)
            header = check_columns(table, reader.fieldnames)
            required = {"path"} | {"label"} & set(label_columns(header))
            for row in reader:
                values = {name: row[name] for name in header}
                empty = [name for name in required if not values[name]]
                if None in row or None in values.values() or empty:
                    raise ConfigError(
                        f"data.table: line {reader.line_num} of {table} does not have "
                        f"{len(header)} values ({shorten(header)}), or path or label is empty."
                    )
                for name, value in values.items():
                    columns[name].append(value)
    except csv.Error as error:
        raise ConfigError(f"data.table: {table} is not a valid CSV file: {error}.") from None
    except OSError as error:
        raise ConfigError(f"data.table: {table} cannot be read: {error.strerror}.") from error
    if not columns:
        raise ConfigError(f"data.table: {table} has no rows.")
    return columns


def _check_files(root: Path, table: Path, paths: list[str]) -> None:
    """Check that every file exists and is listed once; listing folders is faster than `stat`."""
    twice = [path for path, count in Counter(map(os.path.normpath, paths)).items() if count > 1]
    if twice:
        raise ConfigError(f"data.table: {table} lists {shorten(twice)} more than once.")
    listed: dict[str, frozenset[str]] = {}
    missing = []
    for path in paths:
        folder, name = os.path.split(os.path.join(root, path))  # noqa: PTH118
        if folder not in listed:
            exists = os.path.isdir(folder)  # noqa: PTH112
            listed[folder] = frozenset(os.listdir(folder) if exists else ())  # noqa: PTH208
        if name not in listed[folder]:
            missing.append(path)
    if missing:
        raise ConfigError(
            f"data.table: {len(missing)} of {len(paths)} files that {table} lists are not in "
            f"{root}: {shorten(missing)}. Paths are relative to data.root."
        )


def _check_splits(table: Path, columns: dict[str, list[str]]) -> dict[Split, NDArray[np.int64]]:
    """Return the indices of each split; without that column everything is train."""
    if "split" not in columns:
        return {"train": np.arange(len(columns["path"]))}
    found = np.array(columns["split"])
    unknown = sorted(set(columns["split"]) - set(SPLIT_NAMES))
    if unknown:
        raise ConfigError(
            f"data.table: {table} has the split '{unknown[0]}'. {suggest(unknown[0], SPLIT_NAMES)}"
        )
    canonical = np.array([SPLIT_NAMES[name] for name in found])
    if "group" in columns:
        first: dict[str, str] = {}
        for group, split in zip(columns["group"], canonical.tolist(), strict=True):
            if first.setdefault(group, split) != split:
                raise ConfigError(
                    f"data.table: the group '{group}' is both in {first[group]} and in {split} of "
                    f"{table}; a group must stay together."
                )
    return {s: np.flatnonzero(canonical == s) for s in SPLITS if (canonical == s).any()}
