"""From an image to a figure in one call, for notebooks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from vision.data.images.decode import Pixels
from vision.inspection.explain import Interpolation, Subject, explain, shown_pixels
from vision.inspection.figures.drawing import SCREEN, Drawing, Style
from vision.inspection.figures.sheet import overlay_sheet
from vision.inspection.methods.rollout import Query
from vision.inspection.methods.spec import parse_methods


def show_attention(
    subject: Subject,
    image: str | Path | Image.Image | Pixels,
    *,
    methods: Sequence[str] | None = None,
    classes: int | Sequence[int] = 3,
    query: Query | None = None,
    interpolation: Interpolation = "bilinear",
    style: Style = SCREEN,
) -> Drawing:
    """Where a model looks in an image. A notebook shows the result; `save` writes it.

    subject: the result of `vision.load`. methods: such as ["rollout", "attention:layer:3"]; by
    default three that suit the model. classes: the number of most probable classes to explain, or
    numbers of classes.
    """
    named = isinstance(image, str | Path)
    name = str(image) if named else "the image"
    content = Path(image).read_bytes() if isinstance(image, str | Path) else image
    explanations = explain(
        subject,
        [shown_pixels(subject, content, name)],
        None if methods is None else parse_methods(methods),
        classes=classes,
        query=query,
        interpolation=interpolation,
    )
    style = replace(style, interpolation=interpolation)
    return overlay_sheet(explanations, style=style, title=Path(name).name if named else "")
