"""The page: image, numbers, style and script in one HTML file that opens from disk."""

import base64
import html
import io
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import matplotlib
import numpy as np
from PIL import Image
from torch import Tensor, nn

from vision.inspection.explorer.gather import Material, gather
from vision.inspection.explorer.pack import Rung, pack
from vision.inspection.trust.scoring import METRICS

SCRIPTS = (
    "core.js",
    "rollout.js",
    "methods.js",
    "state.js",
    "draw.js",
    "tiles.js",
    "panels.js",
    "explain.js",
    "input.js",
    "main.js",
)
"""In the order in which the page runs them."""
PICTURE_SIDE = 1024
"""Pixels along the longer side of the stored image, at most."""
METHODS = {
    "attention": "attention",
    "rollout": "rollout",
    "cam_rollout": "cam_rollout",
    "gradient_rollout": "gradient_rollout:clamp:before:normalize:true",
    "chefer": "chefer",
    "cam": "cam",
    "token_gradcam": "token_gradcam",
    "attention_gradcam": "attention_gradcam",
    "norm": "norm",
}
"""What the page can show, by its names, and how the same is asked for elsewhere."""
Scores = Mapping[str, Mapping[str, float]]
"""By the page's name of a method and by metric, in percent; `random` and `centre` are baselines."""


@dataclass(frozen=True)
class PageInfo:
    """What was written."""

    path: Path
    bytes: int
    rung: Rung
    """How much of the attention the page keeps."""
    largest_error: float
    """Of any attention weight in the page."""
    seconds: float


def write_page(
    model: nn.Module,
    image: Tensor,
    shown: Image.Image,
    output: Path,
    *,
    classes: Sequence[str] | None = None,
    top: int = 3,
    max_megabytes: float = 10.0,
    scores: Scores | None = None,
    scores_note: str = "",
    title: str = "Attention",
    subtitle: str = "",
) -> PageInfo:
    """Write one self-contained page in which the attention for an image can be explored.

    image: what the model is given, (channels height width) or with a batch of one. shown: the
    same view for the eye. classes: names in the model's order. top: how many of the most probable
    classes can be asked for. scores: how well methods do on this image; scores_note: what is to
    be said of them, or why there are none. A model whose attention does not fit into max_megabytes
    keeps less of it, and the page says so.
    """
    begin = time.perf_counter()
    image = _single(image)
    _check_image(shown, image)
    if not max_megabytes > 0:
        raise ValueError(f"max_megabytes must be above 0, found {max_megabytes}.")
    material = gather(model, image, names=classes, top=top)
    checked = _checked_scores(scores)
    about = {
        "title": title,
        "subtitle": subtitle,
        "scores": checked,
        "scores_note": scores_note,
        "metrics": {m: METRICS[m] for row in checked.values() for m in row if m in METRICS},
    }
    frame = _frame(title, _data_address(shown))
    budget = int(max_megabytes * 1e6) - len(frame.encode())
    packed = pack(material, limit=(budget - _header_room(material, about)) * 3 // 4)
    page = _filled(frame, packed.header | about, packed.stream)
    _write(output, page)
    return PageInfo(
        path=output,
        bytes=len(page),
        rung=packed.rung,
        largest_error=packed.largest_error,
        seconds=time.perf_counter() - begin,
    )


def _single(image: Tensor) -> Tensor:
    image = image if image.ndim == 4 else image[None]
    if image.ndim != 4 or image.shape[0] != 1:
        raise ValueError(
            f"A page shows one image (channels, height, width), found {tuple(image.shape)}."
        )
    return image


def _check_image(shown: Image.Image, image: Tensor) -> None:
    """The image to look at shows what the model sees, if perhaps larger."""
    height, width = image.shape[-2:]
    ratio = (shown.width / shown.height) / (width / height)
    # One pixel of rounding along the shorter side is no other view.
    allowed = 0.01 + 1 / min(height, width, *shown.size)
    if abs(math.log(ratio)) > allowed:
        raise ValueError(
            f"The image is {shown.width} x {shown.height}, but the model is given "
            f"{width} x {height} (width x height), which has other proportions: pass the image "
            "as it is after resizing and cropping."
        )


def _checked_scores(scores: Scores | None) -> dict[str, dict[str, float]]:
    checked: dict[str, dict[str, float]] = {}
    for method, row in (scores or {}).items():
        for metric, value in row.items():
            if not math.isfinite(value):
                raise ValueError(f"The score {metric} of {method} is {value}, not a number.")
        checked[method] = {metric: float(value) for metric, value in row.items()}
    return checked


def _data_address(image: Image.Image) -> str:
    """The image as an address that holds it: JPEG, or PNG where it is small."""
    shown = image.convert("RGB")
    longest = max(shown.size)
    if longest > PICTURE_SIDE:
        factor = PICTURE_SIDE / longest
        size = (max(1, round(shown.width * factor)), max(1, round(shown.height * factor)))
        shown = shown.resize(size, Image.Resampling.LANCZOS)
    small = shown.width * shown.height <= 128 * 128
    buffer = io.BytesIO()
    if small:
        shown.save(buffer, "PNG", optimize=True)
    else:
        shown.save(buffer, "JPEG", quality=85)
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _frame(title: str, image: str) -> str:
    """The page but for its numbers: a template whose last two places are open."""
    static = files("vision.inspection.explorer") / "static"
    script = "\n".join((static / name).read_text("utf-8") for name in SCRIPTS)
    page = Template((static / "page.html").read_text("utf-8"))
    return page.substitute(
        title=html.escape(title),
        image=image,
        colours=base64.b64encode(_colours()).decode(),
        style=(static / "page.css").read_text("utf-8"),
        script=f"(() => {{\n'use strict';\n{script}\n}})();",
    )


def _filled(frame: str, header: Mapping[str, Any], stream: bytes) -> bytes:
    before, between, after = frame.split(">@@</script>")
    numbers = base64.b64encode(stream).decode()
    return "".join(
        (before, ">", _json(header), "</script>", between, ">", numbers, "</script>", after)
    ).encode()


def _json(value: Mapping[str, Any]) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _header_room(material: Material, about: Mapping[str, Any]) -> int:
    """More bytes than the header takes: references, window outlines, names."""
    windows = sum(
        layer.layout.index.shape[0]
        for layer in material.captured.layers
        if layer.layout.index is not None
    )
    names = sum(len(json.dumps(c.name)) for c in material.classes)
    layers = len(material.captured.layers) * (1500 + 500 * len(material.classes))
    return 10_000 + len(_json(about).encode()) + names + layers + 120 * windows


def _colours() -> bytes:
    """256 colours for shares from 0 to the limit, then 256 for differences: red, green, blue."""
    steps = np.linspace(0, 1, 256)
    tables = [matplotlib.colormaps[name](steps)[:, :3] for name in ("inferno", "PuOr_r")]
    return np.rint(np.concatenate(tables) * 255).astype(np.uint8).tobytes()


def _write(output: Path, content: bytes) -> None:
    """Under a name of its own first, so that a broken write leaves no half page."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
