"""Small models with what figures and scores need of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from model_settings import small_model
from numpy.typing import NDArray

from vision.data.preprocess import Preprocess

NAMES = tuple(f"class {i}" for i in range(7))


@dataclass(frozen=True)
class Seen:
    model: Any
    classes: tuple[str, ...]
    preprocess: Preprocess


def seen(name: str = "vit_mini", size: tuple[int, int] = (32, 32), **changes: Any) -> Seen:
    """A model with weights that are not trivial, and how it is shown images."""
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    preprocess = Preprocess(size, 3, mean, std, "bilinear", 1.0, {})
    classes = changes.pop("classes", len(NAMES))
    model = small_model(name, size, classes=classes, **changes).eval()
    return Seen(model, NAMES[:classes], preprocess)


def noise(size: tuple[int, int] = (32, 32), number: int = 1) -> list[NDArray[np.uint8]]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, (*size, 3), dtype=np.uint8) for _ in range(number)]
