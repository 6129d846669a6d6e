"""The positions of objects: masks of a folder, boxes of a table, and the embedded data set."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vision.config import ConfigError
from vision.data.images.decode import Pixels, decode, open_image
from vision.data.preprocess import input_pixels
from vision.data.sources.shapes import Scene, two_objects
from vision.inspection.explain import Subject, shown_pixels
from vision.inspection.trust.localization import Mask

COLUMNS = ("path", "left", "top", "right", "bottom")
Boxes = list[tuple[float, float, float, float]]
"""Left, top, right and bottom in pixels."""


@dataclass(frozen=True, eq=False)
class Sample:
    """An image as the model sees it, and the mask of its object if known."""

    name: str
    pixels: Pixels
    mask: Mask | None


@dataclass(frozen=True, eq=False)
class Pair:
    """An image with two objects of different classes, with a mask for each."""

    pixels: Pixels
    labels: tuple[int, int]
    masks: tuple[Mask, Mask]


def shown_mask(subject: Subject, mask: Mask, name: str) -> Mask:
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


def read_mask(folder: Path, image: Path) -> Mask:
    """The mask of an image: not black on the object."""
    found = mask_file(folder, image)
    mask = np.asarray(decode(found.read_bytes(), 1, str(found))[..., 0] > 0)
    shown = open_image(image.read_bytes(), 3, str(image))
    height, width = mask.shape
    # The size may differ, but not the proportions: the mask would mark another place.
    off = abs(width * shown.height / shown.width - height)
    if off > max(1, height / shown.height):
        raise ConfigError(
            f"masks: {found} is {width} x {height} pixels, but its image {image} is "
            f"{shown.width} x {shown.height}: a mask must have the proportions of its image."
        )
    return mask


def read_boxes(table: Path) -> dict[str, Boxes]:
    """The boxes of every image by its path in the table."""
    boxes: dict[str, Boxes] = {}
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
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


def box_mask(size: tuple[int, int], boxes: Boxes) -> Mask:
    """Boxes in pixels as a mask of an image of (height, width)."""
    mask = np.zeros(size, dtype=np.bool_)
    for left, top, right, bottom in boxes:
        mask[max(0, round(top)) : round(bottom), max(0, round(left)) : round(right)] = True
    return mask


def boxes_of(boxes: dict[str, Boxes], image: Path, table: Path) -> Boxes:
    """The boxes of an image, which the table names by its whole path or the end of it."""
    for path, found in boxes.items():
        parts = Path(path).parts
        if image.parts[-len(parts) :] == parts:
            return found
    raise ConfigError(f"boxes: {table} has no box for {image}.")


def two_object_pairs(
    subject: Subject, number: int, seed: int, classes: Sequence[str]
) -> list[Pair]:
    """Images of the embedded data set with two objects, labelled in the model's order.

    classes: of the embedded data set.
    """
    places = [list(subject.classes).index(name) for name in classes]
    pairs = []
    for index in range(number):
        scene: Scene = two_objects(subject.preprocess.image_size, seed, index)
        name = f"two objects {index}"
        pixels = shown_pixels(subject, scene.image, name)
        masks = [shown_mask(subject, mask, name) for mask in scene.masks]
        if all(mask.any() for mask in masks):
            labels = places[scene.labels[0]], places[scene.labels[1]]
            pairs.append(Pair(pixels, labels, (masks[0], masks[1])))
    return pairs
