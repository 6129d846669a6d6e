"""`report.html`: one file with everything in it, which a browser shows without any network."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from PIL import Image

from vision.data.images.augment import to_image
from vision.data.images.decode import open_image
from vision.data.images.transforms import evaluation_pixels
from vision.data.preprocess import Preprocess
from vision.data.sources.source import Source
from vision.evaluation.all_metrics import Mistake

SCRIPTS = ("draw.js", "confusion.js", "sections.js", "report.js")
LARGEST = 192
"""Pixels of an image's longer side on the page."""
SMALL = 64
"""Up to this size images are stored without loss, since each pixel can be seen."""


def page(report: Mapping[str, Any], galleries: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The page for a report (as `Report.as_dict` gives it) and a gallery for each of its models."""
    static = files("vision.evaluation.report") / "static"
    scripts = "\n".join((static / name).read_text(encoding="utf-8") for name in SCRIPTS)
    shown = {key: value for key, value in report.items() if key not in ("files", "settings")}
    payload = json.dumps({"report": shown, "galleries": galleries}, separators=(",", ":"))
    # Within a script element only "</script" and "<!--" mean anything to a browser.
    payload = payload.replace("<", "\\u003c")
    template = (static / "report.html").read_text(encoding="utf-8")
    parts = {
        "/*STYLE*/": (static / "report.css").read_text(encoding="utf-8"),
        "/*DATA*/": payload,
        "/*SCRIPT*/": scripts,
    }
    for mark, text in parts.items():
        before, _, after = template.partition(mark)
        template = before + text + after
    return template


def gallery(
    mistakes: Sequence[Mistake],
    ids: Sequence[int],
    source: Source,
    preprocess: Preprocess,
    max_pixels: int,
) -> list[dict[str, Any]]:
    """Images that the model got wrong, as the model saw them, with what it said."""
    shown = []
    for mistake in mistakes:
        number = ids[mistake.place]
        name = source.name(number)
        opened = open_image(source.read(number), preprocess.channels, name, max_pixels)
        image = to_image(evaluation_pixels(opened, preprocess))
        shown.append(
            {
                "name": name,
                "label": mistake.label,
                "predicted": mistake.predicted,
                "confidence": mistake.confidence,
                "own": mistake.own,
                "image": data_address(image),
            }
        )
    return shown


def data_address(image: Image.Image) -> str:
    """An image as a data: address."""
    image = image.copy()
    image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    kind = "PNG" if max(image.size) <= SMALL else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=88)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
