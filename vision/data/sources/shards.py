"""Images in tar shards, with WebDataset's names: `key.jpg` and `key.cls` or `key.json`."""

import glob
import json
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vision.config import ConfigError, shorten
from vision.data.configs import ShardsConfig, Split
from vision.data.sources.folder import require_folder
from vision.data.sources.shard_index import ShardIndex, index_file, open_index
from vision.data.sources.source import Source
from vision.data.sources.subsets import named_splits

DESCRIPTION = "dataset.json"
"""File that `vision prepare` writes beside its shards: classes, channels, counts, checksums."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(eq=False, repr=False)
class ShardSource(Source):
    """A `Source` that reads its images from tar files by position."""

    index: ShardIndex

    def name(self, index: int) -> str:
        """Return `shard.tar:member`."""
        return f"{self.index.shards[self.index.shard[index]]}:{self.index.members[index]}"

    def read(self, index: int) -> bytes:
        """Return the member's content; opening the shard each time leaves no state to share."""
        size = int(self.index.size[index])
        shard = self.index.shards[self.index.shard[index]]
        with open(shard, "rb", buffering=0) as file:  # noqa: PTH123
            file.seek(int(self.index.offset[index]))
            content = file.read(size)
        if len(content) != size:
            raise OSError(
                f"{self.name(index)}: the shard ends too early; it changed since it was opened."
            )
        return content


def read_shards(config: ShardsConfig, split: Split) -> ShardSource:
    """Read one split."""
    index = _open(config, split)
    channels, classes = describe_shards(config)
    return ShardSource(_numbers(index, classes, config.root), classes, channels, index)


def describe_shards(config: ShardsConfig) -> tuple[int, tuple[str, ...]]:
    """Return channels and class names: as recorded beside the shards, or from training labels."""
    noted = read_description(config.root)
    channels: int = config.channels if config.channels != "auto" else noted.get("channels", 3)
    if "classes" in noted:
        return channels, tuple(noted["classes"])
    labels = _open(config, "train").label_names
    if _are_numbers(labels):
        return channels, tuple(str(number) for number in range(max(map(int, labels)) + 1))
    return channels, tuple(sorted(labels))


def read_description(root: Path) -> dict[str, Any]:
    """Return what is recorded beside the shards; empty if `vision prepare` did not write them."""
    file = root / DESCRIPTION
    if not file.is_file():
        return {}
    try:
        noted = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"{file} is damaged: {error}") from error
    return dict(noted)


def expand(pattern: str) -> list[str]:
    """Expand braces: `a{00..02}` to a00, a01, a02, and `{x,y}.tar` to x.tar, y.tar."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    inside = match[1]
    numbers = _RANGE.fullmatch(inside)
    if numbers:
        first, last = int(numbers[1]), int(numbers[2])
        width = len(numbers[1])
        if last < first:
            raise ConfigError(f"data: {{{inside}}} in '{pattern}' counts backwards.")
        choices = [f"{n:0{width}d}" for n in range(first, last + 1)]
    elif "," in inside:
        choices = inside.split(",")
    else:
        raise ConfigError(
            f"data: {{{inside}}} in '{pattern}' is neither a range such as {{000..099}} nor a list "
            f"such as {{a,b}}."
        )
    before, after = pattern[: match.start()], pattern[match.end() :]
    return list(chain.from_iterable(expand(before + choice + after) for choice in choices))


def find_shards(root: Path, pattern: str) -> tuple[Path, ...]:
    """Return the files that match a pattern, in its order (wildcards: sorted by name)."""
    if pattern.startswith("pipe:") or "://" in pattern:
        raise ConfigError(
            f"data: '{pattern}' is not on a local disk. Shards are read by position: copy them "
            "first."
        )
    require_folder(root)
    found: list[Path] = []
    missing = []
    for name in expand(pattern):
        if glob.has_magic(name):
            matches = sorted(glob.glob(str(root / name)))  # noqa: PTH207 (absolute patterns too)
        else:
            matches = [str(root / name)] * (root / name).is_file()
        found += map(Path, matches)
        if not matches:
            missing.append(name)
    if missing:
        raise ConfigError(f"data: no shards {shorten(missing)} found in {root}.")
    return tuple(dict.fromkeys(found))


def _open(config: ShardsConfig, split: Split) -> ShardIndex:
    pattern = named_splits(config)[split]
    file = index_file(config.root, pattern, config.label_field, config.index_folder)
    index = open_index(find_shards(config.root, pattern), file, config.label_field)
    if len(index.offset) == 0:
        raise ConfigError(f"data.{split}: the shards {pattern} of {config.root} have no images.")
    return index


def _numbers(index: ShardIndex, classes: tuple[str, ...], root: Path) -> NDArray[np.int64]:
    """Return the labels as numbers; they are written as numbers or as class names."""
    names = index.label_names
    if _are_numbers(names):
        values = [int(name) if int(name) < len(classes) else None for name in names]
    else:
        number = {name: i for i, name in enumerate(classes)}
        values = [number.get(name) for name in names]
    unknown = [name for name, value in zip(names, values, strict=True) if value is None]
    if unknown:
        raise ConfigError(
            f"data: the labels {shorten(unknown)} in {root} are not among the "
            f"{len(classes)} classes ({shorten(classes)}) of the training shards."
        )
    return np.array(values, dtype=np.int64)[index.labels]


def _are_numbers(labels: tuple[str, ...]) -> bool:
    return all(label.isdecimal() for label in labels)
