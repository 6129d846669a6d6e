"""Two of the three RandAugments (Cubuk et al., 2020) in use; the third is torchvision's own class.

Operations act on Pillow images ("RGB" or "L"). A magnitude of 10 is a strong change in both.
"""

import math
from typing import Literal

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from vision.data.configs import Interpolation
from vision.data.images.policy import RandAugment

TIMM_OPERATIONS = (
    "auto_contrast",
    "equalize",
    "invert",
    "rotate",
    "posterize",
    "solarize",
    "solarize_add",
    "color",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
BIG_VISION_OPERATIONS = (*TIMM_OPERATIONS, "cutout")

_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    # A rotation cannot use Lanczos' filter.
    "lanczos": Image.Resampling.BICUBIC,
}
_IDENTITY = tuple(range(256))


def timm_rand_augment(
    image: Image.Image,
    settings: RandAugment,
    mean: tuple[float, ...],
    interpolation: Interpolation | None,
    random: np.random.Generator,
) -> Image.Image:
    """timm's: 15 operations, each chosen one applied with a probability, its magnitude spread.

    What is moved in from outside has the mean colour of the data.
    """
    fill = tuple(min(255, round(255 * part)) for part in mean)
    for choice in random.integers(len(TIMM_OPERATIONS), size=settings.layers):
        if random.random() >= settings.probability:
            continue
        magnitude = float(settings.magnitude)
        if settings.magnitude_std == math.inf:
            magnitude = random.uniform(0, magnitude)
        elif settings.magnitude_std > 0:
            magnitude = random.normal(magnitude, settings.magnitude_std)
        strength = max(0.0, min(magnitude, settings.magnitude_max)) / 10
        sign: Literal[1, -1] = 1 if random.random() < 0.5 else -1
        filter_name = interpolation or ("bilinear" if random.random() < 0.5 else "bicubic")
        operation = TIMM_OPERATIONS[choice]
        image = timm_operation(
            image, operation, strength, sign, settings.increasing, _RESAMPLING[filter_name], fill
        )
    return image


def timm_operation(
    image: Image.Image,
    operation: str,
    strength: float,
    sign: Literal[1, -1],
    increasing: bool,
    resample: Image.Resampling,
    fill: tuple[int, ...],
) -> Image.Image:
    """One operation; strength 1 is a magnitude of 10. `increasing`: more of it, more change."""
    signed = sign * strength
    enhance = max(0.1, 1 + 0.9 * signed) if increasing else 0.1 + 1.8 * strength
    match operation:
        case "rotate":
            return image.rotate(30 * signed, resample, fillcolor=_for_mode(image, fill))
        case "posterize":
            bits = int(4 * strength)
            return _posterize(image, 4 - bits if increasing else bits)
        case "solarize":
            threshold = min(256, int(256 * strength))
            return _solarize(image, 256 - threshold if increasing else threshold)
        case "solarize_add":
            return _solarize_add(image, min(128, int(110 * strength)))
        case "color" | "contrast" | "brightness" | "sharpness":
            return _enhance(image, operation, enhance)
        case "shear_x":
            return _affine(image, (1, 0.3 * signed, 0, 0, 1, 0), resample, fill)
        case "shear_y":
            return _affine(image, (1, 0, 0, 0.3 * signed, 1, 0), resample, fill)
        case "translate_x":
            return _affine(image, (1, 0, 0.45 * signed * image.width, 0, 1, 0), resample, fill)
        case "translate_y":
            return _affine(image, (1, 0, 0, 0, 1, 0.45 * signed * image.height), resample, fill)
        case _:
            return _histogram_operation(image, operation)


def big_vision_rand_augment(
    image: Image.Image, settings: RandAugment, random: np.random.Generator
) -> Image.Image:
    """big_vision's: 16 operations, always applied, magnitudes without an upper end."""
    for choice in random.integers(len(BIG_VISION_OPERATIONS), size=settings.layers):
        operation = BIG_VISION_OPERATIONS[choice]
        strength = settings.magnitude / 10
        if operation == "cutout":
            center = int(random.integers(image.height)), int(random.integers(image.width))
            image = _cutout(image, center, int(40 * strength))
        else:
            sign: Literal[1, -1] = 1 if random.random() < 0.5 else -1
            image = big_vision_operation(image, operation, strength, sign)
    return image


def big_vision_operation(
    image: Image.Image, operation: str, strength: float, sign: Literal[1, -1]
) -> Image.Image:
    """One operation as in big_vision's pp/autoaugment.py; nearest pixel, grey (128) from outside.

    Two particulars are kept on purpose. Contrast blends with a grey of height × width / 256 (196
    for 224 pixels) where others take the image's mean. Solarize and posterize get weaker as the
    magnitude grows; they change nothing from a magnitude of 10 and 20 on.
    """
    signed = sign * strength
    match operation:
        case "rotate":
            return _tf_affine(image, _rotation(image, math.radians(30 * signed)))
        case "posterize":
            return _posterize(image, min(8, int(4 * strength)))
        case "solarize":
            return _solarize(image, min(256, int(256 * strength)))
        case "solarize_add":
            return _solarize_add(image, int(110 * strength))
        case "contrast":
            grey = int(min(255, image.width * image.height / 256))
            flat = Image.new(image.mode, image.size, _for_mode(image, (grey, grey, grey)))
            return Image.blend(flat, image, 0.1 + 1.8 * strength)
        case "color" | "brightness" | "sharpness":
            return _enhance(image, operation, 0.1 + 1.8 * strength)
        case "shear_x":
            return _tf_affine(image, (1, 0.3 * signed, 0, 0, 1, 0))
        case "shear_y":
            return _tf_affine(image, (1, 0, 0, 0.3 * signed, 1, 0))
        case "translate_x":
            return _tf_affine(image, (1, 0, 100 * signed, 0, 1, 0))
        case "translate_y":
            return _tf_affine(image, (1, 0, 0, 0, 1, 100 * signed))
        case _:
            return _histogram_operation(image, operation)


# Single operations ------------------------------------------------------------------------------

Matrix = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): pixel (x, y) comes from (a x + b y + c, d x + e y + f)."""


def _histogram_operation(image: Image.Image, operation: str) -> Image.Image:
    match operation:
        case "auto_contrast":
            return ImageOps.autocontrast(image)
        case "equalize":
            return ImageOps.equalize(image)
        case "invert":
            return ImageOps.invert(image)
        case _:
            raise ValueError(f"there is no operation '{operation}'.")


def _enhance(image: Image.Image, operation: str, factor: float) -> Image.Image:
    match operation:
        case "color":
            return ImageEnhance.Color(image).enhance(factor)
        case "contrast":
            return ImageEnhance.Contrast(image).enhance(factor)
        case "brightness":
            return ImageEnhance.Brightness(image).enhance(factor)
        case _:
            return ImageEnhance.Sharpness(image).enhance(factor)


def _posterize(image: Image.Image, bits: int) -> Image.Image:
    """Keep the upper bits. (Pillow's own function refuses 0 bits in later versions.)"""
    mask = 0xFF & ~(2 ** (8 - bits) - 1)
    return _map_values(image, [value & mask for value in _IDENTITY])


def _solarize(image: Image.Image, threshold: int) -> Image.Image:
    return _map_values(image, [v if v < threshold else 255 - v for v in _IDENTITY])


def _solarize_add(image: Image.Image, addition: int) -> Image.Image:
    return _map_values(image, [min(255, v + addition) if v < 128 else v for v in _IDENTITY])


def _map_values(image: Image.Image, table: list[int]) -> Image.Image:
    return image.point(table * len(image.getbands()))


def _affine(
    image: Image.Image, matrix: Matrix, resample: Image.Resampling, fill: tuple[int, ...]
) -> Image.Image:
    return image.transform(
        image.size,
        Image.Transform.AFFINE,
        matrix,
        resample,
        fillcolor=_for_mode(image, fill),
    )


def _tf_affine(image: Image.Image, matrix: Matrix) -> Image.Image:
    """As TensorFlow Addons does: whole coordinates in, results rounded to the nearest pixel."""
    a, b, c, d, e, f = matrix
    # Pillow adds one half to x and y before multiplying, and cuts off the result.
    shifted = (a, b, c + 0.5 - 0.5 * (a + b), d, e, f + 0.5 - 0.5 * (d + e))
    return _affine(image, shifted, Image.Resampling.NEAREST, (128, 128, 128))


def _rotation(image: Image.Image, angle: float) -> Matrix:
    """About the middle of the image."""
    x, y = (image.width - 1) / 2, (image.height - 1) / 2
    cos, sin = math.cos(angle), math.sin(angle)
    return cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y


def _cutout(image: Image.Image, center: tuple[int, int], half: int) -> Image.Image:
    """A square of twice `half`, as far as it is inside, made grey."""
    (y, x), cut = center, image.copy()
    corners = (max(0, x - half), max(0, y - half), x + half, y + half)
    cut.paste(_for_mode(image, (128, 128, 128)), corners)
    return cut


def _for_mode(image: Image.Image, colour: tuple[int, ...]) -> int | tuple[int, ...]:
    return colour[0] if image.mode == "L" else colour
