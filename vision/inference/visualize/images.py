"""The images to visualize with the positions of their objects, read when needed.

Images come from files or from a data set; positions from masks of a folder, from boxes of a table,
or with the embedded data set.
"""

import csv
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path

import numpy as np

from vision.config import ConfigError
from vision.data.configs import DataConfig, Split
from vision.data.images.decode import Pixels, UnreadableImageError, decode, open_image
from vision.data.preprocess import input_pixels
from vision.data.sources.build_source import build_source
from vision.data.sources.shapes import CLASSES, Shapes, two_objects
from vision.data.sources.source import StoredImage
from vision.files import open_file, read_file
from vision.inspection.explain import Subject
from vision.inspection.figures.parts import evenly_spread
from vision.inspection.trust.localization import Mask
from vision.inspection.trust.scoring import Pair

COLUMNS = ("path", "left", "top", "right", "bottom")
Boxes = list[tuple[float, float, float, float]]
"""Left, top, right and bottom in pixels."""


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
            return input_pixels(self.read(), self.name, subject.preprocess)
        except UnreadableImageError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise UnreadableImageError(f"{self.name}: {reason}") from error

    def object_mask(self, subject: Subject) -> Mask | None:
        """The object in what a model sees of the image; None if unknown or cropped away."""
        mask = None if self.mask is None else _shown_mask(subject, self.mask(), self.name)
        return mask if mask is not None and mask.any() else None


def items_of_files(
    files: Sequence[Path], masks: Path | None = None, boxes: Path | None = None
) -> list[Item]:
    """Files, with masks or boxes if given."""
    if masks is not None and not masks.is_dir():
        raise ConfigError(f"masks: the folder {masks} does not exist.")
    table = None if boxes is None else _read_boxes(boxes)
    items = []
    for key, file in zip(_keys(files), files, strict=True):
        mask: Callable[[], Mask] | None = None
        if masks is not None:
            mask = partial(_read_mask, masks, file)
        elif table is not None and boxes is not None:
            mask = partial(_box_mask, file, _boxes_of(table, file, boxes))
        items.append(Item(key, str(file), partial(read_file, file), file, mask))
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
    return [items[i] for i in evenly_spread(len(items), number or len(items))]


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


def _shown_mask(subject: Subject, mask: Mask, name: str) -> Mask:
    """A mask resized and cropped like the image for the model."""
    preprocess = replace(subject.preprocess, channels=1, interpolation="nearest")
    return input_pixels(mask.astype(np.uint8)[..., None] * 255, name, preprocess)[..., 0] > 127


def mask_file(folder: Path, image: Path) -> Path:
    """The mask of an image, or a ConfigError: a file of its name, below folders named like those
    of the image if there are any.
    """
    folders = image.resolve().parent.parts[1:]
    below = [folder.joinpath(*folders[number:]) for number in range(len(folders) + 1)]
    candidates = [place / name for place in below for name in (f"{image.stem}.png", image.name)]
    there = (file for file in candidates if file.is_file() and not file.samefile(image))
    found = next(there, None)
    if found is None:
        raise ConfigError(f"masks: {image} has no mask; expected {candidates[-2]}.")
    return found


def _read_mask(folder: Path, image: Path) -> Mask:
    """The mask of an image: not black on the object."""
    found = mask_file(folder, image)
    mask = np.asarray(decode(read_file(found), 1, str(found))[..., 0] > 0)
    shown = open_image(read_file(image), 3, str(image))
    height, width = mask.shape
    # The size may differ, but not the proportions: the mask would mark another place.
    off = abs(width * shown.height / shown.width - height)
    if off > max(1, height / shown.height):
        raise ConfigError(
            f"masks: {found} is {width} x {height} pixels, but its image {image} is "
            f"{shown.width} x {shown.height}: a mask must have the proportions of its image."
        )
    return mask


def _read_boxes(table: Path) -> dict[str, Boxes]:
    """The boxes of every image by its path in the table."""
    boxes: dict[str, Boxes] = {}
    try:
        with TextIOWrapper(open_file(table), encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            missing = [c for c in COLUMNS if c not in (rows.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"boxes: {table} has no column {', '.join(missing)}; it needs "
                    f"{', '.join(COLUMNS)}."
                )
            for number, row in enumerate(rows, start=2):
                try:
                    left, top, right, bottom = (float(row[c]) for c in COLUMNS[1:])
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"boxes: {table}, line {number}: {error}.") from error
                if left >= right or top >= bottom:
                    raise ConfigError(f"boxes: {table}, line {number}: the box has no area.")
                boxes.setdefault(row["path"], []).append((left, top, right, bottom))
    except OSError as error:
        raise ConfigError(f"boxes: {table} cannot be read: {error.strerror}.") from error
    return boxes


def _boxes_of(boxes: dict[str, Boxes], image: Path, table: Path) -> Boxes:
    """The boxes of an image, which the table names by its whole path or the end of it."""
    for path, found in boxes.items():
        parts = Path(path).parts
        if image.parts[-len(parts) :] == parts:
            return found
    raise ConfigError(f"boxes: {table} has no box for {image}.")


def _box_mask(file: Path, boxes: Boxes) -> Mask:
    """Boxes in pixels of an image as its mask."""
    mask = np.zeros(decode(read_file(file), 3, str(file)).shape[:2], dtype=np.bool_)
    for left, top, right, bottom in boxes:
        mask[max(0, round(top)) : round(bottom), max(0, round(left)) : round(right)] = True
    return mask


def two_object_pairs(subject: Subject, number: int, seed: int) -> list[Pair]:
    """Images of the embedded data set with two objects, labelled in the model's order."""
    places = [list(subject.classes).index(name) for name in CLASSES]
    pairs = []
    for index in range(number):
        scene = two_objects(subject.preprocess.image_size, seed, index)
        name = f"two objects {index}"
        pixels = input_pixels(scene.image, name, subject.preprocess)
        masks = [_shown_mask(subject, mask, name) for mask in scene.masks]
        if all(mask.any() for mask in masks):
            labels = places[scene.labels[0]], places[scene.labels[1]]
            pairs.append(Pair(pixels, labels, (masks[0], masks[1])))
    return pairs
