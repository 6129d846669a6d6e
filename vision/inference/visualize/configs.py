"""What images of attention can be told. Free of torch, so that a typo is answered at once."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vision.checkpoints.configs import SizedConfig
from vision.config import Count, PositiveInt, several
from vision.data.configs import DataConfig, Split, Text
from vision.inspection.methods.requests import parse_request

Places = Annotated[tuple[Text, ...], BeforeValidator(several)]
"""One or several."""

FigureName = Literal[
    "sheet", "heads", "queries", "microscope", "filmstrip", "comparison", "diagnostics", "page"
]
Format = Literal["png", "svg", "pdf", "npz"]
INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}


def inches(length: str) -> float:
    """`3.3in`, `84mm`, `8.4cm` or `240pt` as a number of inches."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(in|cm|mm|pt)\s*", length)
    if match is None or not 0.5 <= float(match[1]) * INCHES[match[2]] <= 60:
        raise ValueError(
            f"'{length}' is no width; write 3.3in, 84mm, 8.4cm or 240pt, from half an inch to 60."
        )
    return float(match[1]) * INCHES[match[2]]


def _check_width(length: str) -> str:
    inches(length)
    return length


def _check_method(text: str) -> str:
    parse_request(text)
    return text


Asked = Annotated[str, AfterValidator(_check_method)]
"""A method, with options if you like: rollout:fusion:max."""
Cell = tuple[int, int]


class VisualizeConfig(SizedConfig):
    """Images of where models look, and how far these can be believed."""

    checkpoint: Places
    """A run's folder, a checkpoint file of any known format, or timm:… or hf:… names; several as
    [a,b] are drawn side by side with one scale of colours."""
    images: Places
    """Files, folders, patterns with *, or - for a list on standard input; also as plain words."""
    data: DataConfig | None
    """Instead of images: images of a data set, data=folder data.root=…"""
    split: Split
    count: PositiveInt | None
    """Take so many of the images or of the split, evenly spread; null: all."""
    figures: Annotated[tuple[FigureName, ...], BeforeValidator(several)]
    """sheet: methods for the top classes; heads: heads × layers; queries: where patches look;
    microscope: one patch through all windows (Swin); filmstrip: rollout layer by layer; comparison:
    every method; diagnostics: what kind of heads; page: an interactive HTML page."""
    page: bool
    """The same as one more figure, page."""
    methods: Literal["auto"] | tuple[Asked, ...]
    """With options if you like: [rollout:fusion:max,attention:layer:3:head:0]. auto: three that
    suit the model; for a comparison or scores all that it can have."""
    classes: PositiveInt | tuple[Text, ...]
    """Explain so many of the most probable classes, or those named."""
    query: Literal["pool", "cam"] | Cell | Text | None
    """Whose view: what the model pools (null), a token's (class, register 1, …) or the patch's at
    [row, column] of the last layer; for queries and microscope the patch in the middle (null)."""
    interpolation: Literal["bilinear", "nearest"]
    """Between cells of a map; nearest shows the cells as they are."""
    percentile: Annotated[float, Field(gt=0, le=100)]
    """Colours end at this percentile of all values that share a scale; 100: at the largest."""
    style: Literal["screen", "paper"]
    """paper: vector text, no titles, small type."""
    width: Annotated[str, AfterValidator(_check_width)] | None
    """Of a figure, such as 3.3in or 84mm; null: as wide as it needs."""
    formats: Annotated[tuple[Format, ...], BeforeValidator(several), Field(min_length=1)]
    dpi: Annotated[int, Field(ge=30, le=1200)]
    score: bool
    """Measure how well maps point to the object, and what hiding their cells does to the answer,
    beside random maps and the image's centre."""
    masks: Path | None
    """Folder of masks for images: a file of the same name (.png), also below folders of the same
    names, that is not black on the object."""
    boxes: Path | None
    """Instead of masks: a CSV file with the columns path, left, top, right and bottom."""
    steps: Annotated[int, Field(ge=2)]
    """Steps from a whole image to a hidden one, for perturbation, deletion and insertion."""
    seed: Count
    """Of random maps, and of the order of pixels with equal values."""
    batch_size: PositiveInt
    overwrite: bool
    """Draw also what has been drawn already with the same settings."""
    output: Path
    """Folder of the figures."""
    format: Literal["table", "json", "csv"]
    """Of the scores."""
    device: Literal["auto", "cpu", "cuda", "mps"]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.checkpoint:
            raise ValueError("checkpoint is empty; name a run's folder or a checkpoint file.")
        if self.images and self.data is not None:
            raise ValueError("give either images or data, not both.")
        if self.masks is not None and self.boxes is not None:
            raise ValueError("give either masks or boxes, not both.")
        given = self.masks is not None or self.boxes is not None
        if given and not (self.score or self.page or "page" in self.figures):
            raise ValueError("masks and boxes are for scores: add score=true (or page=true).")
        if given and not self.images:
            raise ValueError("masks and boxes belong to images=…")
        if self.methods == ():
            raise ValueError("methods is empty; name some, or use methods=auto.")
        if self.classes == ():
            raise ValueError("classes is empty; name some, or give a number.")
        return self
