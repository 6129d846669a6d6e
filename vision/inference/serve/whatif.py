"""Changes of an image before the model sees it: a region hidden, or moved to another place."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vision.data.images.decode import Pixels
from vision.data.preprocess import Preprocess

Fraction = Annotated[float, Field(ge=0, le=1)]
MOST = 4096
"""Number of changes of one image."""


class ImageChange(BaseModel):
    """A rectangle of what the model sees, in fractions of its height and width."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    kind: Literal["mask", "move"]
    """mask: the mean colour instead; move: its pixels at `to`, the mean colour where it was."""
    box: tuple[Fraction, Fraction, Fraction, Fraction]
    """Top, left, height and width."""
    to: tuple[Fraction, Fraction] | None = None
    """New top and left of a rectangle that is moved."""


_CHANGES = TypeAdapter(Annotated[list[ImageChange], Field(max_length=MOST)])


def parse_changes(text: str) -> list[ImageChange]:
    """Changes from JSON, or a ValueError that names the first mistake."""
    try:
        return _CHANGES.validate_json(text or "[]")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"changes: {where}: {first['msg']}") from error


def changed(pixels: Pixels, changes: Sequence[ImageChange], preprocess: Preprocess) -> Pixels:
    """Pixels (height width channels) after the changes, in their order."""
    if not changes:
        return pixels
    height, width = pixels.shape[:2]
    mean = np.rint(np.array(preprocess.mean) * 255).clip(0, 255).astype(np.uint8)
    result = pixels.copy()
    for change in changes:
        top, left, tall, wide = change.box
        rows = slice(round(top * height), round((top + tall) * height))
        columns = slice(round(left * width), round((left + wide) * width))
        region = result[rows, columns].copy()
        result[rows, columns] = mean
        if change.kind == "move" and change.to is not None:
            y, x = round(change.to[0] * height), round(change.to[1] * width)
            target = result[y : y + region.shape[0], x : x + region.shape[1]]
            target[:] = region[: target.shape[0], : target.shape[1]]
    return result
