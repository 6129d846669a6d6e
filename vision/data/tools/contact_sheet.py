"""A contact sheet: training images as the model sees them, with their targets."""

from collections.abc import Sequence

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vision.data.images.decode import Pixels, to_image
from vision.data.preprocess import Preprocess

TILE = 160
"""Smallest width of an image on the sheet; smaller images are enlarged by an integer."""
_GAP, _LINE, _FONT_SIZE = 8, 17, 14


def contact_sheet(
    images: Tensor,
    targets: Tensor,
    classes: Sequence[str],
    preprocess: Preprocess,
    columns: int = 8,
    title: str = "",
) -> Image.Image:
    """Draw images (n, c, h, w), uint8 or normalised, above labels (n,) or targets (n, classes).

    Mixed targets are written out, as "cat 0.70 / dog 0.30".
    """
    if len(images) == 0 or len(images) != len(targets):
        raise ValueError(
            f"{len(images)} images and {len(targets)} targets do not make a contact sheet."
        )
    tiles = [to_image(pixels) for pixels in _pixels(images, preprocess)]
    factor = max(1, -(-TILE // tiles[0].width))
    width, height = tiles[0].width * factor, tiles[0].height * factor
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    top = _GAP + (_LINE + _GAP if title else 0)
    step_x, step_y = width + _GAP, height + 2 * _LINE + _GAP
    sheet = Image.new("RGB", (_GAP + columns * step_x, top + rows * step_y), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_FONT_SIZE)
    draw.text((_GAP, _GAP), title, "black", font)
    for place, (tile, target) in enumerate(zip(tiles, targets, strict=True)):
        x, y = _GAP + place % columns * step_x, top + place // columns * step_y
        sheet.paste(tile.resize((width, height), Image.Resampling.NEAREST), (x, y))
        for line, text in enumerate(_lines(describe_target(target, classes), width, font)):
            draw.text((x, y + height + 1 + line * _LINE), text, "black", font)
    return sheet


def describe_target(target: Tensor, classes: Sequence[str]) -> str:
    """Return the main classes of a target, with their probabilities unless there is only one."""
    if target.ndim == 0:
        return classes[int(target)]
    # Label smoothing gives every class the same minimum.
    floor = max(float(target.min()), 0.0) if len(classes) > 1 else 0.0  # −1: unknown
    ranked = sorted(zip(target.tolist(), classes, strict=True), reverse=True)
    above = [(share, name) for share, name in ranked if share > floor + 5e-3]
    if len(above) == 1 and above[0][0] > 0.995:
        return above[0][1]
    return " / ".join(f"{name} {share:.2f}" for share, name in above)


def _pixels(images: Tensor, preprocess: Preprocess) -> list[Pixels]:
    images = images.detach().cpu()
    if images.dtype != torch.uint8:
        mean, std = (
            rearrange(torch.tensor(numbers), "c -> 1 c 1 1")
            for numbers in (preprocess.mean, preprocess.std)
        )
        images = (images.float() * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
    return [np.ascontiguousarray(p) for p in rearrange(images, "n c h w -> n h w c").numpy()]


def _lines(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """Return the text on one line, or on two if it does not fit, shortened to the width."""
    parts = [text] if font.getlength(text) <= width else text.split(" / ")
    return [_shortened(part, width, font) for part in parts[:2]]


def _shortened(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Shorten a long name in its middle, so that the probability at its end remains."""
    cut = len(text)
    short = text
    while cut > 2 and font.getlength(short) > width:
        cut -= 1
        short = f"{text[: -(-cut // 2)]}…{text[len(text) - cut // 2 :]}"
    return short
