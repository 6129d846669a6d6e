"""The embedded data set: images generated from (seed, split, index), without any file.

Every image has one object in clutter. Its class is the combination of a shape, a texture and a
colour, and every combination is a class: all three must be recognised at the same place. The
clutter has the same colours and textures, but other shapes. So the mean colour, the colour
histogram and any single patch say little about the class (see
`tests/data/sources/test_shapes.py`). Position, size and angle of the object are random.

Numbers without a unit are shares of the image's shorter side.
"""

from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from math import cos, hypot, pi, sin
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vision.config import pair
from vision.data.configs import SPLITS, ShapesConfig, Split
from vision.data.sources.source import Source

Floats = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]
Pixels = NDArray[np.uint8]

COLOURS = {"orange": (225, 125, 40), "blue": (50, 115, 215)}
PERIODS = {"striped": 0.16, "two-tone": 0.5}
"""Period of each texture: the distance from one light band to the next."""
TEXTURES = tuple(PERIODS)
SHAPES = ("disc", "cross")
KINDS = tuple(product(COLOURS, TEXTURES, SHAPES))
CLASSES = tuple(map(" ".join, KINDS))

RADIUS = (0.28, 0.38)
"""Range of an object's radius."""
PAIR_RADIUS = (0.24, 0.25)
"""The same for images with two objects, which must not overlap."""
DISTRACTORS = 5
DISTRACTOR_RADIUS = (0.07, 0.13)

_BACKGROUND_GRID = 4
_PAIRS = len(SPLITS)
"""Key of the random draws of images with two objects that are scored; the splits have 0, 1, 2."""
_TWO = _PAIRS + 1
"""Key of the first split of `ShapesTwo`."""


class Shapes(Source):
    """One split: a `Source` that also has the mask of every object."""

    def __init__(self, image_size: tuple[int, int], seed: int, split: Split, samples: int) -> None:
        super().__init__(np.arange(samples, dtype=np.int64) % len(CLASSES), CLASSES, 3)
        self.image_size = image_size
        self.seed = seed
        self.split = split

    def name(self, index: int) -> str:
        """Return the key of the image: seed, split and index."""
        return f"shapes:{self.seed}:{self.split}:{index}"

    def read(self, index: int) -> Pixels:
        """Return the image, uint8 (height, width, 3)."""
        return self._scene(index).image

    def mask(self, index: int) -> Mask:
        """Return the pixels that show the object: bool (height, width)."""
        return self._scene(index).masks[0]

    def _scene(self, index: int) -> "Scene":
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        label = int(self.labels[index])
        random = np.random.default_rng([self.seed, SPLITS.index(self.split), index])
        return _draw(random, self.image_size, (label,), RADIUS)


class ShapesTwo(Source):
    """One split of images with two objects of different classes, the labels of the image."""

    def __init__(self, image_size: tuple[int, int], seed: int, split: Split, samples: int) -> None:
        labels = np.zeros((samples, len(CLASSES)), dtype=np.int8)
        super().__init__(labels, CLASSES, 3)
        self.image_size, self.seed, self.split = image_size, seed, split
        for index, row in enumerate(labels):
            row[list(_different(self._random(index)))] = 1

    def name(self, index: int) -> str:
        """Return the key of the image: seed, split and index."""
        return f"shapes_two:{self.seed}:{self.split}:{index}"

    def read(self, index: int) -> Pixels:
        """Return the image, uint8 (height, width, 3)."""
        random = self._random(index)
        return _draw(random, self.image_size, _different(random), PAIR_RADIUS).image

    def _random(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, _TWO + SPLITS.index(self.split), index])


@dataclass(frozen=True)
class Scene:
    """An image, the classes of its objects and their masks."""

    image: Pixels
    labels: tuple[int, ...]
    masks: tuple[Mask, ...]


def build_shapes(config: ShapesConfig, split: Split) -> Shapes | ShapesTwo:
    """Return one split of the data set that the config describes."""
    samples = {
        "train": config.train_samples,
        "val": config.val_samples,
        "test": config.test_samples,
    }
    kind = Shapes if config.kind == "shapes" else ShapesTwo
    return kind(pair(config.image_size), config.seed, split, samples[split])


def two_objects(image_size: tuple[int, int], seed: int, index: int) -> Scene:
    """Draw an image with two separate objects of different classes, to score attention maps."""
    random = np.random.default_rng([seed, _PAIRS, index])
    return _draw(random, image_size, _different(random), PAIR_RADIUS)


def _different(random: np.random.Generator) -> tuple[int, int]:
    """Draw two different classes."""
    first, step = int(random.integers(len(CLASSES))), int(random.integers(1, len(CLASSES)))
    return first, (first + step) % len(CLASSES)


def _draw(
    random: np.random.Generator,
    image_size: tuple[int, int],
    labels: tuple[int, ...],
    radius_range: tuple[float, float],
) -> Scene:
    """Draw the background, then clutter, then the objects, then noise."""
    height, width = image_size
    unit = min(image_size)
    canvas = _background(random, height, width)
    for _ in range(DISTRACTORS):
        y, x, size, colour, texture = random.random(5).tolist()
        radius = _between(DISTRACTOR_RADIUS, size) * unit
        kind = _pick(tuple(COLOURS), colour), _pick(TEXTURES, texture), "rectangle"
        _stamp(random, canvas, kind, y * height, x * width, radius)
    places = _places(
        random, image_size, [_between(radius_range, r) for r in random.random(len(labels))]
    )
    masks = []
    for label, (y, x, radius) in zip(labels, places, strict=True):
        mask = np.zeros(image_size, dtype=np.bool_)
        window, alpha = _stamp(random, canvas, KINDS[label], y, x, radius)
        mask[window] = alpha > 0.5
        masks.append(mask)
    canvas += random.random(canvas.shape, dtype=np.float32) * 30 - 15
    image = np.clip(canvas, 0, 255, out=canvas).astype(np.uint8)
    return Scene(image, labels, tuple(masks))


def _pick(choices: tuple[str, ...], share: float) -> str:
    return choices[int(share * len(choices))]


def _between(bounds: tuple[float, float], share: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * share


def _places(
    random: np.random.Generator, image_size: tuple[int, int], radii: list[float]
) -> list[tuple[float, float, float]]:
    """Return (y, x, radius) of each object in pixels: inside the image, without overlap."""
    height, width = image_size
    while True:
        places = []
        for radius, (y, x) in zip(radii, random.random((len(radii), 2)).tolist(), strict=True):
            r = radius * min(image_size)
            places.append((r + y * (height - 2 * r), r + x * (width - 2 * r), r))
        if all(hypot(a[0] - b[0], a[1] - b[1]) > a[2] + b[2] for a, b in combinations(places, 2)):
            return places


def _background(random: np.random.Generator, height: int, width: int) -> Floats:
    """Return a smooth field of dull colours: a coarse random grid, interpolated."""
    n = _BACKGROUND_GRID
    colours = random.random((n, n, 3), dtype=np.float32) * 45
    colours += random.random((n, n, 1), dtype=np.float32) * 105 + 50
    rows = (_interpolation(height) @ colours.reshape(n, n * 3)).reshape(height, n, 3)
    return np.matmul(_interpolation(width), rows)


@cache
def _interpolation(length: int) -> Floats:
    """Return the weights of linear interpolation, (length, grid)."""
    position = np.linspace(0, _BACKGROUND_GRID - 1, length, dtype=np.float32)
    distance = np.abs(position[:, None] - np.arange(_BACKGROUND_GRID, dtype=np.float32))
    return np.maximum(1 - distance, 0)


def _stamp(
    random: np.random.Generator,
    canvas: Floats,
    kind: tuple[str, str, str],
    y: float,
    x: float,
    radius: float,
) -> tuple[tuple[slice, slice], Floats]:
    """Draw one item at a random angle; return the window that contains it and its opacity there."""
    colour_name, texture, shape = kind
    height, width, _ = canvas.shape
    top, bottom = max(int(y - radius), 0), min(int(y + radius) + 2, height)
    left, right = max(int(x - radius), 0), min(int(x + radius) + 2, width)
    ys = np.arange(top - y, bottom - y - 0.5, dtype=np.float32)[:, None]
    xs = np.arange(left - x, right - x - 0.5, dtype=np.float32)
    angle, aspect, *shift = random.random(5).tolist()
    cosine, sine = cos(2 * pi * angle) / radius, sin(2 * pi * angle) / radius
    along: Floats = cosine * xs + sine * ys
    across: Floats = cosine * ys - sine * xs
    alpha = np.clip(0.5 - radius * _distance(shape, along, across, aspect), 0, 1)
    colour = np.array([c + 50 * s - 25 for c, s in zip(COLOURS[colour_name], shift, strict=True)])
    brightness = _brightness(random, texture, ys, xs, min(height, width))
    paint = brightness[..., None] * colour.astype(np.float32)
    window = slice(top, bottom), slice(left, right)
    canvas[window] += alpha[..., None] * (paint - canvas[window])
    return window, alpha


def _distance(shape: str, x: Floats, y: Floats, aspect: float) -> Floats:
    """Return the distance to the outline of a shape of radius 1, negative inside."""
    distance: Floats
    match shape:
        case "disc":
            distance = np.hypot(x, y) - 0.84
        case "cross":
            x, y = np.abs(x), np.abs(y)
            distance = np.maximum(np.maximum(x, y) - 0.95, np.minimum(x, y) - 0.24)
        case "rectangle":
            distance = np.maximum(np.abs(x) - 0.8, np.abs(y) - 0.3 - 0.3 * aspect)
        case _:
            raise AssertionError(shape)
    return distance


def _brightness(
    random: np.random.Generator, texture: str, y: Floats, x: Floats, unit: int
) -> Floats:
    """Return the texture as a factor per pixel; textures have equal shares of light and dark."""
    angle, phase, light, dark = random.random(4).tolist()
    frequency = 2 * pi / (PERIODS[texture] * unit)
    row = frequency * sin(2 * pi * angle) * y + 2 * pi * phase
    wave = np.sin(row + frequency * cos(2 * pi * angle) * x)
    return np.clip(0.6 + wave, 0.25 + 0.2 * dark, 0.85 + 0.25 * light)
