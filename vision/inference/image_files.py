"""The image files that a command is given, and the folder beside a checkpoint that it writes to."""

import sys
from collections.abc import Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import TextIO

from vision.config import ConfigError
from vision.data.sources.folder import SUFFIXES
from vision.evaluation.configs import HUBS
from vision.files import files_below

ATTENTION = "_attention"
"""Suffix of the names of attention figures."""


def beside_checkpoint(place: str, file: Path) -> Path:
    """The run's folder, or that of the file; the current folder for a hub name."""
    if place.startswith(HUBS):
        return Path()
    return file.parent.parent if file.parent.name == "checkpoints" else file.parent


def find_images(places: Sequence[str], listed: TextIO | None = None) -> list[Path]:
    """Expand files, folders, patterns and a list of names (-) to image files.

    Every file occurs once, in the order of the places and within a folder by name.
    """
    if not places:
        raise ConfigError("images: none given. Example: images=photo.jpg or images=photos/")
    found: dict[Path, None] = {}
    for place in places:
        if place == "-":
            lines = (line.strip() for line in (listed or sys.stdin))
            found.update(dict.fromkeys(Path(line) for line in lines if line))
            continue
        path = Path(place).expanduser()
        if path.is_dir():
            files = [f for f in files_below(path) if _is_image(f)]
        elif not path.exists() and has_magic(place):
            matches = sorted(glob(place, recursive=True))  # noqa: PTH207 (absolute patterns too)
            files = [f for f in map(Path, matches) if not f.is_dir()]
        else:
            files = [path]
        if not files:
            raise ConfigError(f"images: there is no image in '{place}'.")
        found.update(dict.fromkeys(files))
    return list(found)


def _is_image(file: Path) -> bool:
    """By its suffix; figures that `attention=true` has written do not count."""
    return file.suffix.lower() in SUFFIXES and not file.stem.endswith(ATTENTION)
