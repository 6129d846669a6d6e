"""Pages in one file that a browser shows without a network."""

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

from PIL import Image


def self_contained(html: str, style: str, scripts: Sequence[str], data: Any) -> str:
    """HTML with its style, scripts and data in the places of their marks."""
    script = "\n".join(scripts)
    # The data comes last, because names of classes may look like a mark.
    parts = {"/*STYLE*/": style, "/*SCRIPT*/": script, "/*DATA*/": script_data(data)}
    for mark, part in parts.items():
        html = html.replace(mark, part, 1)
    return html


def script_data(data: Any) -> str:
    """JSON that cannot end the script element that it stands in."""
    # Within a script element a browser interprets only "</script" and "<!--".
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def data_url(image: Image.Image, longest: int, lossless: int) -> str:
    """An image as a data: URL, with at most `longest` pixels along its longer side.

    Up to `lossless` pixels it is stored without loss, because single pixels are visible.
    """
    image = image.convert("RGB")
    image.thumbnail((longest, longest), Image.Resampling.LANCZOS, reducing_gap=None)
    kind = "PNG" if max(image.size) <= lossless else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=88, optimize=kind == "PNG")
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
