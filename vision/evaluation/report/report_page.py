"""`report.html`: one self-contained file that a browser shows without a network."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from PIL import Image

from vision.data.images.decode import to_image
from vision.data.preprocess import input_pixels
from vision.evaluation.evaluated_model import Answers
from vision.evaluation.model_metrics import confident_mistakes

SCRIPTS = ("draw.js", "confusion.js", "sections.js", "report.js")
LARGEST = 192
"""Longer side of an image on the page, in pixels."""
SMALL = 64
"""Images up to this size are stored without loss, because single pixels are visible."""


def page(report: Mapping[str, Any], galleries: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The page of a report (from `Report.as_dict`) with a gallery for each of its models."""
    static = files("vision.evaluation.report") / "static"
    scripts = "\n".join((static / name).read_text(encoding="utf-8") for name in SCRIPTS)
    shown = {key: value for key, value in report.items() if key not in ("files", "settings")}
    payload = json.dumps({"report": shown, "galleries": galleries}, separators=(",", ":"))
    # Within a script element a browser interprets only "</script" and "<!--".
    payload = payload.replace("<", "\\u003c")
    style = (static / "report.css").read_text(encoding="utf-8")
    text = (static / "report.html").read_text(encoding="utf-8")
    # The data comes last, because names of classes may look like a mark.
    for mark, part in (("/*STYLE*/", style), ("/*SCRIPT*/", scripts), ("/*DATA*/", payload)):
        text = text.replace(mark, part, 1)
    return text


def gallery(answers: Answers, most: int, max_pixels: int) -> list[dict[str, Any]]:
    """The most confident mistakes, with the images as the model saw them."""
    source, preprocess = answers.model.source, answers.model.preprocess
    entries = []
    for mistake in confident_mistakes(answers.predictions.logits, answers.labels, most):
        index = int(answers.predictions.ids[mistake.row])
        name = source.name(index)
        image = to_image(input_pixels(source.read(index), name, preprocess, max_pixels))
        entries.append({"name": name, **asdict(mistake), "image": data_url(image)})
    return entries


def data_url(image: Image.Image) -> str:
    """An image as a data: URL."""
    image = image.copy()
    image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    kind = "PNG" if max(image.size) <= SMALL else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=88)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
