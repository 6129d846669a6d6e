"""From an image to a figure in one call, for notebooks."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vision.data.images.decode import Pixels
from vision.inspection.explain import Interpolation, Query, Subject, look_at, shown_pixels
from vision.inspection.figures.drawing import Drawing, Style
from vision.inspection.figures.sheet import overlay_sheet
from vision.inspection.methods.requests import parse_requests


def show_attention(
    subject: Subject,
    image: str | Path | Image.Image | Pixels,
    *,
    methods: Sequence[str] | None = None,
    classes: int | Sequence[int] = 3,
    query: Query | None = None,
    interpolation: Interpolation = "bilinear",
    style: Style | None = None,
) -> Drawing:
    """Where a model looks in an image. A notebook shows the result; `save` writes it.

    subject: what `vision.load` gives. methods: such as ["rollout", "attention:layer:3"]; by default
    three that suit the model. classes: so many of the most probable ones, or numbers of classes.
    """
    named = isinstance(image, str | Path)
    name = str(image) if named else "the image"
    content = Path(image).read_bytes() if isinstance(image, str | Path) else image
    pixels = shown_pixels(subject, content, name)
    looks = look_at(
        subject,
        [pixels],
        None if methods is None else parse_requests(methods),
        classes=classes,
        query=query,
        interpolation=interpolation,
    )
    title = Path(name).name if named else ""
    return overlay_sheet(looks, style=style, interpolation=interpolation, title=title)
