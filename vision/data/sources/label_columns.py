"""The labels of a CSV table, in one of three forms that its first line shows.

label        one class per image
labels       any number of classes, as `a;b`; empty: none; `?c`: whether it is a c is unknown
(otherwise)  a column for each class with 1, 0, or nothing where it is unknown
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vision.config import ConfigError, shorten, suggest
from vision.data.sources.source import Labels

COLUMNS = ("path", "label", "labels", "split", "group")
"""Columns with a meaning of their own."""
ENTRIES = {"1": 1, "0": 0, "": -1}
"""Values in the column of a class."""
SEPARATOR, UNKNOWN = ";", "?"


def check_columns(table: Path, header: object) -> list[str]:
    """Return the columns of a table, path first, or raise an error that names the fault."""
    names = [str(name).strip() for name in header] if isinstance(header, list) else []
    if "path" not in names or len(set(names)) != len(names) or not label_columns(names):
        raise ConfigError(
            f"data.table: the first line of {table} must name each column once, path and label at "
            f"least (or labels, or a column for each class); found {', '.join(names) or 'nothing'}."
        )
    if header != names:
        raise ConfigError(f"data.table: remove the spaces in the first line of {table}.")
    first, *others = label_columns(names)
    if first in ("label", "labels") and others:
        unknown, kind = others[0], first
    elif first not in ("label", "labels") and not others:  # one class is not a choice: misspelt
        unknown, kind = first, "label"
    else:
        return sorted(names, key=lambda name: name != "path")
    raise ConfigError(
        f"data.table: {table} has a column '{unknown}'. {suggest(unknown, COLUMNS)} Expected a "
        f"first line with path, {kind} and, optionally, split and group."
    )


def label_columns(names: list[str]) -> list[str]:
    """Return the columns that hold labels: label or labels first, if there is one of them."""
    found = [name for name in names if name not in ("path", "split", "group")]
    return sorted(found, key=lambda name: name not in ("label", "labels"))


def read_labels(table: Path, columns: Mapping[str, list[str]]) -> tuple[tuple[str, ...], Labels]:
    """Return the classes and the labels of all rows.

    Names in the rows are sorted, as class folders are; columns keep their order.
    """
    if "label" in columns:
        _check_single(table, columns)
        classes = tuple(sorted(set(columns["label"])))
        number = {name: i for i, name in enumerate(classes)}
        return classes, np.array([number[label] for label in columns["label"]], dtype=np.int64)
    if "labels" in columns:
        return _read_lists(table, columns["labels"])
    classes = tuple(label_columns(list(columns)))
    entries = np.empty((len(columns["path"]), len(classes)), dtype=np.int8)
    for place, name in enumerate(classes):
        other = next((value for value in columns[name] if value not in ENTRIES), None)
        if other is not None:
            raise ConfigError(
                f"data.table: {table} has a column '{name}' with the value '{other}'. "
                f"{suggest(name, COLUMNS)} A table has the columns path and label (one class per "
                "image), path and labels (several, as a;b), or path and a column for each class "
                "with 1, 0 or nothing where it is unknown; and, optionally, split and group."
            )
        entries[:, place] = [ENTRIES[value] for value in columns[name]]
    return classes, entries


def check_known(table: Path, classes: tuple[str, ...], training: Labels, listed: bool) -> None:
    """Refuse classes that no training image has; `listed`: their names are in the rows."""
    if training.ndim == 1:
        present = set(np.unique(training).tolist())
    elif listed:
        present = set(np.flatnonzero((training == 1).any(axis=0)).tolist())
    else:
        return
    unknown = [name for i, name in enumerate(classes) if i not in present]
    if unknown:
        hint = suggest(unknown[0], [classes[i] for i in sorted(present)])
        near = f" ({unknown[0]}: {hint})" if hint.startswith("Did you") else ""
        raise ConfigError(
            f"data.table: {table} has no training images of the classes {shorten(unknown)}.{near}"
        )


def _check_single(table: Path, columns: Mapping[str, list[str]]) -> None:
    """Refuse lists in a column of single labels; a class folder may have any name."""
    for path, label in zip(columns["path"], columns["label"], strict=True):
        if SEPARATOR in label and label not in path.split("/"):
            raise ConfigError(
                f"data.table: {table} has the label '{label}' for {path}, a list of classes, but "
                "the column label holds one class per image. For several name the column labels "
                "and train with task=multi_label; a single class must not contain ';'."
            )


def _read_lists(table: Path, cells: list[str]) -> tuple[tuple[str, ...], NDArray[np.int8]]:
    rows = [[part.strip() for part in cell.split(SEPARATOR) if part.strip()] for cell in cells]
    classes = tuple(sorted({part.removeprefix(UNKNOWN) for row in rows for part in row}))
    reserved = [name for name in classes if name in COLUMNS or not name]
    if reserved or not classes:
        found = f"a class named '{reserved[0]}'" if reserved else "no image with a label"
        raise ConfigError(f"data.table: {table} has {found}; rename the class, or add labels.")
    number = {name: i for i, name in enumerate(classes)}
    entries = np.zeros((len(rows), len(classes)), dtype=np.int8)
    for entry, row in zip(entries, rows, strict=True):
        for part in row:
            entry[number[part.removeprefix(UNKNOWN)]] = -1 if part.startswith(UNKNOWN) else 1
    return classes, entries
