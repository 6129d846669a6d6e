"""Settings of `vision visualize`. Free of torch, so that a typo is reported at once."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vision.checkpoints.configs import SizedConfig
from vision.config import Amount, Count, FilePath, OutputFolder, Seed, several
from vision.data.configs import DataConfig, Split, Text
from vision.inference.configs import Places
from vision.inspection.methods.spec import METHODS, parse_method

FigureName = Literal[
    "sheet", "heads", "queries", "microscope", "filmstrip", "comparison", "diagnostics", "page"
]
Format = Literal["png", "svg", "pdf", "npz"]
INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}


def inches(length: str) -> float:
    """A length such as `3.3in`, `84mm`, `8.4cm` or `240pt`, in inches."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(in|cm|mm|pt)\s*", length)
    if match is None or not 0.5 <= float(match[1]) * INCHES[match[2]] <= 60:
        raise ValueError(
            f"'{length}' is not a width; write 3.3in, 84mm, 8.4cm or 240pt, from 0.5 to 60 inches."
        )
    return float(match[1]) * INCHES[match[2]]


def _check_width(length: str) -> str:
    inches(length)
    return length


MethodText = Annotated[str, AfterValidator(lambda text: str(parse_method(text)))]
"""A method, optionally with options: rollout:fusion:max."""
Cell = tuple[Count, Count]


class VisualizeConfig(SizedConfig):
    """Settings of `vision visualize`."""

    checkpoint: Annotated[Places, Field(min_length=1)]
    """A run's folder, a checkpoint file of any known format, or a name timm:… or hf:…; several as
    [a,b] are drawn side by side with one colour scale."""
    images: Places
    """Files, folders, patterns with *, or - for a list on standard input; also without images=."""
    data: DataConfig | None
    """Images of a data set instead of files, such as data=folder data.root=…"""
    split: Split
    count: Amount | None
    """Number of images to take from the files or the split, evenly spread; null: all."""
    figures: Annotated[tuple[FigureName, ...], BeforeValidator(several)]
    """sheet: some methods for the top classes; heads: heads × layers; queries: where patches look;
    microscope: one patch through all windows (Swin); filmstrip: rollout layer by layer; comparison:
    every method; diagnostics: statistics of heads; page: an interactive HTML page."""
    page: bool
    """Add page to figures."""
    methods: Annotated[
        Literal["auto"] | tuple[MethodText, ...],
        Field(
            description="auto: three that suit the model, and all available ones for a comparison "
            "and scores. Options follow the name: [rollout:fusion:max,attention:layer:3:head:0]. "
            f"({' | '.join(METHODS)})"
        ),
    ]
    classes: Amount | tuple[Text, ...]
    """Number of most probable classes to explain, or names of classes."""
    query: Literal["pool", "cam"] | Cell | Text | None
    """The query: what the model pools (null), a token (class, register 1, …) or the patch at
    [row, column] of the last layer; null is the patch in the middle for the microscope."""
    interpolation: Literal["bilinear", "nearest"]
    """Between the cells of a map; nearest keeps them visible."""
    percentile: Annotated[float, Field(gt=0, le=100)]
    """Colours end at this percentile of all values that share a scale; 100: at the largest."""
    style: Literal["screen", "paper"]
    """paper: small font, no titles, text as text in SVG and PDF files."""
    width: Annotated[str, AfterValidator(_check_width)] | None
    """Width of a figure, such as 3.3in or 84mm; null: by its content."""
    formats: Annotated[tuple[Format, ...], BeforeValidator(several), Field(min_length=1)]
    dpi: Annotated[int, Field(ge=30, le=1200)]
    score: bool
    """Score the maps: whether they point to the object, and how hiding their pixels changes the
    prediction, beside a random map and the image's centre."""
    masks: FilePath | None
    """Folder of masks, not black on the object: a file of the image's name (.png), also below
    folders of the same names."""
    boxes: FilePath | None
    """CSV file with the columns path, left, top, right and bottom, instead of masks."""
    steps: Annotated[int, Field(ge=2, le=10**6)]
    """Number of steps from a whole image to a hidden one when scoring."""
    seed: Seed
    """Seed of random maps and of the order of pixels with equal values."""
    batch_size: Amount
    """Images in a forward pass of scores and diagnostics."""
    overwrite: bool
    """Draw again what was drawn with the same settings."""
    output: OutputFolder
    """Folder of the figures and scores; auto: `attention` in the run's folder, beside the file of a
    checkpoint, or in the current folder for a hub name or several checkpoints."""
    format: Literal["table", "json", "csv"]
    """Format of the printed scores."""
    device: Literal["auto", "cpu", "cuda", "mps"]

    @model_validator(mode="after")
    def _check(self) -> Self:
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
