"""Read every image of a data set once: counts, sizes, unreadable files and duplicates."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np
from rich.table import Table

from vision.data.configs import DataConfig, FolderConfig, Split
from vision.data.images.decode import decode
from vision.data.sources.build_source import build_source, list_splits
from vision.data.sources.folder import ignored_line
from vision.data.sources.source import Source, class_sizes, label_names
from vision.data.sources.subsets import imbalance
from vision.data.sources.table import read_table
from vision.data.tools.configs import DataCommandConfig
from vision.data.tools.pool import ordered_map
from vision.data.workers import resolve_workers
from vision.terminal import plain, print_result, tracked

_SHOWN = 20
"""Length at which printed lists are cut; the JSON output is complete."""


@dataclass
class SplitCheck:
    """Findings in one split."""

    count: int
    per_class: dict[str, int]
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of images of each (height, width), without unreadable ones."""
    unreadable: list[str] = field(default_factory=list)
    """Names and reasons."""
    warning: str | None = None
    """Warning of very unequal classes."""

    def extent(self) -> str:
        """Return smallest, median and largest size as text."""
        if not self.sizes:
            return "no readable image"
        if len(self.sizes) == 1:
            ((height, width),) = self.sizes
            return f"{width} × {height}"
        sizes, counts = np.array(list(self.sizes)), np.array(list(self.sizes.values()))
        low, high = sizes.min(axis=0), sizes.max(axis=0)
        middle = np.median(np.repeat(sizes, counts, axis=0), axis=0)
        return " … ".join(f"{width:.0f} × {height:.0f}" for height, width in (low, middle, high))


@dataclass
class DataCheck:
    """Findings in a data set."""

    splits: dict[Split, SplitCheck]
    across: list[tuple[str, ...]]
    """Images with the same content in different splits."""
    within: list[tuple[str, ...]]
    """Images with the same content in one split."""
    conflicts: list[tuple[str, ...]]
    """Images with the same content but different labels."""
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Number of files in the folders that are not images, by reason."""

    @property
    def clean(self) -> bool:
        """Whether no image is unreadable, in two splits, or labelled in two ways."""
        unreadable = any(split.unreadable for split in self.splits.values())
        return not (unreadable or self.across or self.conflicts)

    def table(self) -> Table:
        """Return the number of images per class and split."""
        table = Table(title="Images per class")
        table.add_column("class")
        for split in self.splits:
            table.add_column(split, justify="right")
        for name in next(iter(self.splits.values())).per_class:
            table.add_row(plain(name), *(str(s.per_class[name]) for s in self.splits.values()))
        table.add_section()
        table.add_row("all", *(str(split.count) for split in self.splits.values()))
        return table

    def lines(self) -> list[str]:
        """Return the other findings as text."""
        lines = []
        if ignored := ignored_line(self.ignored):
            lines.append(ignored)
        for name, split in self.splits.items():
            lines.append(f"{name}: {split.count} images, {split.extent()} pixels")
            if split.warning:
                lines.append(f"{name}: {split.warning}")
            lines += _listed(f"{name}: unreadable", split.unreadable)
        for what, groups in (
            ("in several splits", self.across),
            ("several times in one split", self.within),
            ("with the same content but different labels", self.conflicts),
        ):
            lines += _listed(f"images {what}", [" = ".join(group) for group in groups])
        return lines

    def to_json(self) -> str:
        """Return all findings as JSON."""
        content = asdict(self) | {"clean": self.clean}
        for name, split in self.splits.items():
            sizes = [[*size, count] for size, count in sorted(split.sizes.items())]
            content["splits"][name]["sizes"] = sizes
        return json.dumps(content, indent=1, ensure_ascii=False)


def check_data(config: DataConfig, workers: int = 0) -> DataCheck:
    """Read and decode every image of every split once; workers=0 reads in this process."""
    sources = {split: build_source(config, split) for split in list_splits(config)}
    splits: dict[Split, SplitCheck] = {}
    places: dict[bytes, list[tuple[Split, int]]] = {}
    for split, source in sources.items():
        counts = class_sizes(source.labels, len(source.classes)).tolist()
        per_class = dict(zip(source.classes, counts, strict=True))
        warning = imbalance(source.labels, source.classes)
        found = splits[split] = SplitCheck(len(source), per_class, warning=warning)
        results = ordered_map(partial(_inspect, source), range(len(source)), workers)
        for index, result in enumerate(tracked(results, f"check {split}", len(source))):
            if result.digest:
                places.setdefault(result.digest, []).append((split, index))
            if result.error:
                found.unreadable.append(result.error)
            else:
                found.sizes[result.size] += 1
    repeated = [group for group in places.values() if len(group) > 1]
    return DataCheck(
        splits,
        _named(sources, [g for g in repeated if len({split for split, _ in g}) > 1]),
        _named(sources, [g for g in repeated if len({split for split, _ in g}) < len(g)]),
        _named(sources, [g for g in repeated if len({_class(sources, *p) for p in g}) > 1]),
        dict(read_table(config).ignored) if isinstance(config, FolderConfig) else {},
    )


@dataclass(frozen=True)
class _Finding:
    """Size and digest of an image, or its error."""

    size: tuple[int, int] = (0, 0)
    digest: bytes = b""
    error: str = ""


def _inspect(source: Source, index: int) -> _Finding:
    """Read and decode one image."""
    digest = b""
    try:
        image = source.read(index)
        if isinstance(image, bytes):
            content = image
        else:
            content = repr(image.shape).encode() + image.tobytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        pixels = decode(image, source.channels, source.name(index))
    except OSError as error:
        return _Finding(digest=digest, error=str(error))
    return _Finding((pixels.shape[0], pixels.shape[1]), digest)


def _class(sources: Mapping[Split, Source], split: Split, index: int) -> str:
    return label_names(sources[split].labels[index], sources[split].classes)


def _named(
    sources: Mapping[Split, Source], groups: list[list[tuple[Split, int]]]
) -> list[tuple[str, ...]]:
    return [tuple(sources[split].name(index) for split, index in group) for group in groups]


def _listed(title: str, entries: list[str]) -> list[str]:
    """Return a heading with the number of entries, and the first of them."""
    if not entries:
        return [f"{title}: none"]
    lines = [f"{title}: {len(entries)}", *(f"  {entry}" for entry in entries[:_SHOWN])]
    return lines + [f"  … and {len(entries) - _SHOWN} more"] * (len(entries) > _SHOWN)


def report_check(config: DataCommandConfig) -> int:
    """Check the data and print what is found; returns 1 if anything is."""
    result = check_data(config.data, resolve_workers(config.loader.workers))
    if config.format == "json":
        print(result.to_json())
    else:
        print_result(result.table())
        print("\n".join(result.lines()))
    return 0 if result.clean else 1
