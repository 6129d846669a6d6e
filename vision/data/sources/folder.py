"""Image files: their formats, listing them (`list_images`) and reading them (`FolderSource`)."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vision.config import ConfigError, shorten
from vision.data.sources.packed import PackedStrings
from vision.data.sources.source import Source
from vision.files import read_file

FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "JPEG2000": (".jp2",),
    "AVIF": (".avif",),
    "TGA": (),
    "ICO": (),
}
"""Formats that are read, by Pillow's names, with the suffixes of their files, the usual one first.

Formats of pixels only: a file named .jpg is never passed to an interpreter, as EPS's would be.
"""
HEIC = (".heic", ".heif")
"""Suffixes of the photographs of many phones, which the package pillow-heif reads."""
if READS_HEIC := find_spec("pillow_heif") is not None:
    FORMATS["HEIF"] = HEIC
INSTALL_HEIC = "pip install 'vit-swin[heic]'"
SUFFIXES = frozenset(chain.from_iterable(FORMATS.values()))
"""Files with other suffixes are not read as images."""


@dataclass(eq=False, repr=False)
class FolderSource(Source):
    """A `Source` of image files below one folder."""

    root: Path
    paths: PackedStrings

    def name(self, index: int) -> str:
        """Return the file's path."""
        return os.path.join(self.root, self.paths[index])  # noqa: PTH118 (five times faster)

    def read(self, index: int) -> bytes:
        """Return the file's content."""
        return read_file(self.name(index))


Listing = tuple[tuple[str, ...], list[str], NDArray[np.int64], Counter[str]]
"""Image files below a folder: the names of its class folders, sorted; the paths relative to the
folder, class by class and sorted within each; their labels; the number of other files, by reason.
"""


def list_classes(folder: Path) -> tuple[str, ...]:
    """Return the names of the class folders in a folder, sorted, without hidden ones."""
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir()]
    return tuple(sorted(names))


def list_images(folder: Path) -> Listing:
    """List all images in the class folders of a folder, including nested folders.

    Raises ConfigError if there is no class folder, no image at all, or a class without images.
    """
    classes = list_classes(require_folder(folder))
    ignored: Counter[str] = Counter()
    with os.scandir(folder) as entries:
        ignored["outside of the class folders"] = sum(not entry.is_dir() for entry in entries)
    paths: list[str] = []
    counts = []
    for name in classes:
        found = _walk(folder, name, ignored)
        counts.append(len(found))
        paths += found
    ignored = +ignored  # drop zeros
    if not classes or not paths:
        raise ConfigError(
            f"data.root: no images in the class folders of {folder}. Expected "
            f"{folder}/<class>/<image>, an image being a file that ends in "
            f"{', '.join(sorted(SUFFIXES))}; {_found(classes, ignored)}."
        )
    empty = [name for name, count in zip(classes, counts, strict=True) if count == 0]
    if empty:
        raise ConfigError(
            f"data.root: {len(empty)} of {len(classes)} class folders in {folder} have no "
            f"images: {shorten(empty)}. Fill or remove "
            f"them{'; ' + _found((), ignored) if ignored else ''}."
        )
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
    return classes, paths, labels, ignored


def ignored_line(ignored: Mapping[str, int]) -> str:
    """A sentence on the files of a folder that are not used; empty if there are none."""
    if not (number := sum(ignored.values())):
        return ""
    listed = ", ".join(f"{count:,} {reason}" for reason, count in Counter(ignored).most_common(5))
    files = f"{number:,} file{'' if number == 1 else 's'}"
    unread = any(suffix in reason for reason in ignored for suffix in HEIC)
    advice = f" HEIC photographs are read with pillow-heif: {INSTALL_HEIC}." if unread else ""
    return f"{files} in data.root ignored: {listed}.{advice}"


def require_folder(folder: Path) -> Path:
    """Return the folder, or raise a ConfigError that names the part of its path that exists."""
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"data.root: {folder} is a file; a folder is expected.")
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    raise ConfigError(f"data.root: the folder {folder} does not exist ({existing} exists).")


def check_same_classes(
    problem: str,
    first: tuple[str, tuple[str, ...]],
    second: tuple[str, tuple[str, ...]],
    advice: str = "",
) -> None:
    """Raise a ConfigError that lists the differences between two sets of classes, if any.

    Each set comes with the words before its classes that the other one does not have.
    """
    differences = [
        f"{words} {shorten(only)}"
        for (words, classes), (_, others) in ((first, second), (second, first))
        if (only := sorted(set(classes) - set(others)))
    ]
    if differences:
        raise ConfigError(f"{problem}: {'; '.join(differences)}. {advice}".rstrip())


def _walk(root: Path, top: str, ignored: Counter[str]) -> list[str]:
    """Return the images below root/top, sorted, relative to root; links are followed once."""
    found: list[str] = []
    folders: list[str] = [top]
    links: list[str] = []
    seen: set[tuple[int, int]] = set()
    while folders or links:
        # Links last, so that a folder that is also linked to is listed under its own name.
        if not folders:
            links.sort(reverse=True)
        folder = (folders or links).pop()
        status = os.stat(os.path.join(root, folder))  # noqa: PTH116, PTH118
        if (status.st_dev, status.st_ino) in seen:  # a link to a parent would be followed forever
            ignored["link to a folder already read"] += 1
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(os.path.join(root, folder)) as entries:  # noqa: PTH118
            for entry in entries:
                path = f"{folder}/{entry.name}"
                if entry.name.startswith("."):
                    ignored["hidden"] += 1
                elif entry.is_dir():
                    (links if entry.is_symlink() else folders).append(path)
                elif (suffix := suffix_of(entry.name)) in SUFFIXES:
                    found.append(path)
                else:
                    ignored[f"suffix '{suffix}'" if suffix else "no suffix"] += 1
    found.sort()
    return found


def suffix_of(name: str) -> str:
    """Return the same as `Path.suffix`, in lower case and five times faster."""
    _, dot, last = name.rpartition(".")
    return f".{last.lower()}" if dot else ""


def _found(classes: tuple[str, ...], ignored: Counter[str]) -> str:
    """Describe what was found instead of images."""
    parts = [f"{number} files ignored ({reason})" for reason, number in ignored.most_common(5)]
    if classes:
        parts.insert(0, f"{len(classes)} folders ({shorten(classes, 3)})")
    return "found " + (" and ".join(parts) if parts else "nothing")
