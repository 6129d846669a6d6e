"""Small models with sharp attention, and their pages, for the tests of the explorer."""

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from model_settings import random_images, small_model
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vision.inspection.explorer.page import write_page

NAMES = ("ant", "bee", "cow", "dog", "eel", "fox", "gnu")


def explained_model(kind: str) -> tuple[nn.Module, Tensor]:
    """A small model of a kind, and one image for it."""
    size = (48, 64)
    match kind:
        case "vit":
            model = small_model("vit_tiny", size, registers=2)
        case "vit mean":
            model = small_model("vit_tiny", size, class_token=False, pool="mean")
        case "vit with many heads":
            model = small_model("vit_tiny", size, registers=2, heads=12)
        case "swin with many heads":
            model = small_model("swin_tiny", size, heads=[8, 8, 16])
        case "swin":
            model = small_model("swin_tiny", size)
        case "swin padded":
            size = (44, 60)  # grids of 22 x 30, 11 x 15, 6 x 8: odd, and no multiple of the window
            model = small_model("swin_tiny", size)
        case "swin_v2":
            model = small_model("swinv2_tiny", size)
        case _:
            raise ValueError(kind)
    return model.eval(), random_images(1, 3, *size)


def make_page(kind: str, output: Path, **options: Any) -> Path:
    """Write the page of such a model."""
    model, image = explained_model(kind)
    height, width = image.shape[-2:]
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    write_page(model, image, Image.fromarray(noise), output, **({"classes": NAMES} | options))
    return output


def read_page(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and numbers of a page, read without its script."""
    text = path.read_text()
    header = re.search(r'<script type="application/json" id="header">(.*?)</script>', text, re.S)
    numbers = re.search(r'<script type="text/plain" id="numbers">(.*?)</script>', text, re.S)
    assert header is not None and numbers is not None
    return json.loads(header[1]), zlib.decompress(base64.b64decode(numbers[1]))


def part(stream: bytes, reference: dict[str, Any]) -> NDArray[Any]:
    """The numbers that a reference of the header points to."""
    kind = {"u8": "<u1", "i32": "<i4", "f32": "<f4"}[reference["type"]]
    return np.frombuffer(stream, kind, reference["count"], reference["at"])


def decoded(stream: bytes, rows: dict[str, Any]) -> NDArray[np.float64]:
    """Companded rows as numbers (rows length), by the words of `stream.py` alone."""
    codes = part(stream, rows["codes"])
    if rows["bits"] == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=1).ravel()
    codes = codes[: rows["rows"] * rows["length"]].reshape(rows["rows"], rows["length"])
    levels = 2 ** rows["bits"] - 1
    values = (codes / levels) ** 2 * part(stream, rows["scales"])[:, None].astype(float)
    if "corrected" in rows:
        places = part(stream, rows["corrected"]).cumsum()
        values.ravel()[places] = part(stream, rows["corrections"])
    return values


def weights_by_plane(weights: Tensor, windowed: bool) -> NDArray[np.float32]:
    """The weights of one image's layer in the order in which a page has them: rows, keys."""
    ordered = weights[0].transpose(0, 1) if windowed else weights[0]
    return ordered.reshape(-1, ordered.shape[-1]).numpy()
