"""`report.html`: one self-contained file that a browser shows without a network."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from PIL import Image

from vision.data.images.augment import to_image
from vision.data.images.decode import open_image
from vision.data.images.transforms import evaluation_pixels
from vision.evaluation.evaluated_model import Answers
from vision.evaluation.model_metrics import confident_mistakes
from vision.evaluation.report.self_contained import self_contained

SCRIPTS = ("draw.js", "confusion.js", "sections.js", "report.js")
LARGEST = 192
"""Longer side of an image on the page, in pixels."""
SMALL = 64
"""Images up to this size are stored without loss, because single pixels are visible."""


def page(report: Mapping[str, Any], galleries: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The page of a report (from `Report.as_dict`) with a gallery for each of its models."""
    static = files("vision.evaluation.report") / "static"
    html, style, *scripts = (
        (static / name).read_text(encoding="utf-8")
        for name in ("report.html", "report.css", *SCRIPTS)
    )
    shown = {key: value for key, value in report.items() if key not in ("files", "settings")}
    return self_contained(html, style, scripts, {"report": shown, "galleries": galleries})


def gallery(answers: Answers, most: int, max_pixels: int) -> list[dict[str, Any]]:
    """The most confident mistakes, with the images as the model saw them."""
    source, preprocess = answers.model.source, answers.model.preprocess
    entries = []
    for mistake in confident_mistakes(answers.predictions.logits, answers.labels, most):
        index = int(answers.predictions.ids[mistake.row])
        name = source.name(index)
        opened = open_image(source.read(index), preprocess.channels, name, max_pixels)
        image = to_image(evaluation_pixels(opened, preprocess))
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
