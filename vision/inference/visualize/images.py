"""The images to visualize, from files or from a data set, read when needed."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vision.config import ConfigError
from vision.data.configs import DataConfig, Split
from vision.data.images.decode import Pixels, UnreadableImageError, decode
from vision.data.sources.build_source import build_source
from vision.data.sources.shapes import Shapes
from vision.data.sources.source import StoredImage
from vision.inspection.explain import Subject, shown_pixels
from vision.inspection.trust.localization import Mask
from vision.inspection.trust.masks import (
    Boxes,
    box_mask,
    boxes_of,
    read_boxes,
    read_mask,
    shown_mask,
)


@dataclass(frozen=True)
class Item:
    """An image that has not been read yet."""

    key: str
    """Path of its figures below the output folder, without suffix."""
    name: str
    """For captions and messages."""
    read: Callable[[], StoredImage]
    file: Path | None = None
    mask: Callable[[], Mask] | None = None
    """Of the whole image."""

    def pixels(self, subject: Subject) -> Pixels:
        """The image as a model sees it, or an UnreadableImageError."""
        try:
            return shown_pixels(subject, self.read(), self.name)
        except UnreadableImageError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise UnreadableImageError(f"{self.name}: {reason}") from error

    def object_mask(self, subject: Subject) -> Mask | None:
        """The object in what a model sees of the image; None if unknown or cropped away."""
        mask = None if self.mask is None else shown_mask(subject, self.mask(), self.name)
        return mask if mask is not None and mask.any() else None


def items_of_files(
    files: Sequence[Path], masks: Path | None = None, boxes: Path | None = None
) -> list[Item]:
    """Files, with masks or boxes if given."""
    if masks is not None and not masks.is_dir():
        raise ConfigError(f"masks: the folder {masks} does not exist.")
    table = None if boxes is None else read_boxes(boxes)
    items = []
    for key, file in zip(_keys(files), files, strict=True):
        mask: Callable[[], Mask] | None = None
        if masks is not None:
            mask = partial(read_mask, masks, file)
        elif table is not None and boxes is not None:
            mask = partial(_boxes, file, boxes_of(table, file, boxes))
        items.append(Item(key, str(file), file.read_bytes, file, mask))
    return items


def items_of_data(config: DataConfig, split: Split) -> list[Item]:
    """The images of a split; those of the embedded data set come with the mask of their object."""
    source = build_source(config, split)
    digits = len(str(len(source) - 1))
    items = []
    for index in range(len(source)):
        mask = partial(source.mask, index) if isinstance(source, Shapes) else None
        key = f"{split}-{index:0{digits}d}"
        items.append(Item(key, source.name(index), partial(source.read, index), mask=mask))
    return items


def some(items: Sequence[Item], number: int | None) -> list[Item]:
    """A number of them, evenly spread; None: all."""
    if number is None or number >= len(items):
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, number).round().astype(int)]


def _boxes(file: Path, boxes: Boxes) -> Mask:
    height, width = decode(file.read_bytes(), 3, str(file)).shape[:2]
    return box_mask((height, width), boxes)


def _keys(files: Sequence[Path]) -> list[str]:
    """A name for each file: its path below the folder that all share, with its suffix if two
    would have the same name.
    """
    absolute = [Path(os.path.abspath(file)) for file in files]  # noqa: PTH100 (links stay links)
    shared = Path(os.path.commonpath([file.parent for file in absolute]))
    below = [file.relative_to(shared) for file in absolute]
    plain = [str(path.with_suffix("")) for path in below]
    return [
        name if plain.count(name) == 1 else str(path)
        for name, path in zip(plain, below, strict=True)
    ]
