"""Augmentation policies: those of torchvision, three_augment, and RandAugment (Cubuk et al., 2020)
as timm and as big_vision define it.

Random draws of RandAugment are made here, as a function of (seed, sample). The operations on pixels
are timm's, except for those that big_vision defines differently. They act on Pillow images ("RGB"
or "L"). In both forms a magnitude of 10 is a strong change.
"""

import math
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Literal, cast

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from vision.data.configs import Interpolation
from vision.data.images.policy_text import RandAugment, parse_policy
from vision.randomness import torch_seeded

_SHARED_OPERATIONS = (
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
)
TIMM_OPERATIONS = (*_SHARED_OPERATIONS, "translate_x_rel", "translate_y_rel")
BIG_VISION_OPERATIONS = (*_SHARED_OPERATIONS, "translate_x", "translate_y", "cutout")
"""Operations in the order of the random draws, by the names of timm's functions."""

Sign = Literal[1, -1]

_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    # A rotation cannot use Lanczos' filter.
    "lanczos": Image.Resampling.BICUBIC,
}
_GREY = (128, 128, 128)


def apply_policy(
    image: Image.Image,
    policy: str,
    mean: tuple[float, ...],
    interpolation: Interpolation | None,
    random: np.random.Generator,
) -> Image.Image:
    """Apply a policy of `AugmentConfig`. Without `interpolation` each operation draws its own."""
    match parse_policy(policy):
        case RandAugment(flavour="timm") as settings:
            return timm_rand_augment(image, settings, mean, interpolation, random)
        case RandAugment(flavour="big_vision") as settings:
            return big_vision_rand_augment(image, settings, random)
        case "three_augment":
            return three_augment(image, random)
        case _:
            with torch_seeded(random):
                return _torchvision_policy(policy)(image)


def import_policy(policy: str) -> None:
    """Import the library that a policy needs, if any, for worker processes to inherit."""
    match parse_policy(policy):
        case RandAugment(flavour="timm" | "big_vision"):
            timm_function("invert")
        case "none" | "three_augment":
            pass
        case _:
            _torchvision_policy(policy)


@cache
def _torchvision_policy(policy: str) -> Callable[[Image.Image], Image.Image]:
    """Return a transform of torchvision, as its reference training uses it."""
    v2 = torchvision_transforms()
    match parse_policy(policy):
        case RandAugment(flavour="torchvision", layers=layers, magnitude=magnitude):
            transform = v2.RandAugment(num_ops=layers, magnitude=magnitude)
        case "auto_augment":
            transform = v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET)
        case "trivial_augment":
            transform = v2.TrivialAugmentWide()
        case "augmix":
            transform = v2.AugMix()
        case other:
            raise AssertionError(other)
    return cast(Callable[[Image.Image], Image.Image], transform)


def three_augment(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Convert to greyscale, solarise or blur, with equal probability (DeiT III, section 3.2)."""
    match int(random.integers(3)):
        case 0:
            return image.convert("L").convert(image.mode)
        case 1:
            return ImageOps.solarize(image, threshold=128)
        case _:
            return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


def torchvision_transforms() -> ModuleType:
    """Import torchvision only if used: it takes as long as torch, in every spawned worker."""
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    module: ModuleType = v2
    return module


@cache
def timm_function(name: str) -> Callable[..., Image.Image]:
    """Return an operation of timm, which is imported only if needed: that takes seconds."""
    from timm.data import auto_augment

    return cast(Callable[..., Image.Image], getattr(auto_augment, name))


def timm_rand_augment(
    image: Image.Image,
    settings: RandAugment,
    mean: tuple[float, ...],
    interpolation: Interpolation | None,
    random: np.random.Generator,
) -> Image.Image:
    """Apply operations as timm does: each one drawn is applied with a probability, at a random
    magnitude.

    Pixels from outside the image have the mean colour of the data.
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
        sign = _draw_sign(random)
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
    sign: Sign,
    increasing: bool,
    resample: Image.Resampling,
    fill: tuple[int, ...],
) -> Image.Image:
    """Apply one operation. Strength 1 is a magnitude of 10. With `increasing` a greater strength is
    a greater change for every operation.
    """
    signed = sign * strength
    arguments: tuple[float, ...] = ()
    match operation:
        case "rotate":
            arguments = (30 * signed,)
        case "posterize":
            bits = int(4 * strength)
            arguments = (4 - bits if increasing else bits,)
        case "solarize":
            threshold = min(256, int(256 * strength))
            arguments = (256 - threshold if increasing else threshold,)
        case "solarize_add":
            arguments = (min(128, int(110 * strength)),)
        case "color" | "contrast" | "brightness" | "sharpness":
            arguments = (max(0.1, 1 + 0.9 * signed) if increasing else 0.1 + 1.8 * strength,)
        case "shear_x" | "shear_y":
            arguments = (0.3 * signed,)
        case "translate_x_rel" | "translate_y_rel":
            arguments = (0.45 * signed,)
    colour = _for_mode(image, fill)
    return timm_function(operation)(image, *arguments, resample=resample, fillcolor=colour)


def big_vision_rand_augment(
    image: Image.Image, settings: RandAugment, random: np.random.Generator
) -> Image.Image:
    """Apply operations as big_vision does: all that are drawn, at magnitudes without a limit."""
    strength = settings.magnitude / 10
    for choice in random.integers(len(BIG_VISION_OPERATIONS), size=settings.layers):
        operation = BIG_VISION_OPERATIONS[choice]
        if operation == "cutout":
            center = int(random.integers(image.height)), int(random.integers(image.width))
            image = _cutout(image, center, int(40 * strength))
        else:
            image = big_vision_operation(image, operation, strength, _draw_sign(random))
    return image


def big_vision_operation(
    image: Image.Image, operation: str, strength: float, sign: Sign
) -> Image.Image:
    """Apply one operation of big_vision's pp/autoaugment.py. Geometric ones take the nearest pixel,
    and grey (128) outside the image.

    Two peculiarities are kept on purpose. Contrast blends with a grey of height × width / 256 (196
    for 224 pixels) where others take the image's mean. Solarize and posterize get weaker as the
    magnitude grows; they change nothing from a magnitude of 10 and 20 on.
    """
    signed = sign * strength
    arguments: tuple[float, ...] = ()
    match operation:
        case "rotate":
            return _tf_affine(image, _rotation(image, math.radians(30 * signed)))
        case "shear_x":
            return _tf_affine(image, (1, 0.3 * signed, 0, 0, 1, 0))
        case "shear_y":
            return _tf_affine(image, (1, 0, 0, 0.3 * signed, 1, 0))
        case "translate_x":
            return _tf_affine(image, (1, 0, 100 * signed, 0, 1, 0))
        case "translate_y":
            return _tf_affine(image, (1, 0, 0, 0, 1, 100 * signed))
        case "contrast":
            grey = int(min(255, image.width * image.height / 256))
            flat = Image.new(image.mode, image.size, _for_mode(image, (grey, grey, grey)))
            return Image.blend(flat, image, 0.1 + 1.8 * strength)
        case "posterize":
            arguments = (min(8, int(4 * strength)),)
        case "solarize":
            arguments = (min(256, int(256 * strength)),)
        case "solarize_add":
            arguments = (int(110 * strength),)
        case "color" | "brightness" | "sharpness":
            arguments = (0.1 + 1.8 * strength,)
    return timm_function(operation)(image, *arguments)


def _draw_sign(random: np.random.Generator) -> Sign:
    return 1 if random.random() < 0.5 else -1


Matrix = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): pixel (x, y) comes from (a x + b y + c, d x + e y + f)."""


def _tf_affine(image: Image.Image, matrix: Matrix) -> Image.Image:
    """Transform as TensorFlow Addons does: integer coordinates, rounded to the nearest pixel."""
    a, b, c, d, e, f = matrix
    # Pillow adds one half to x and y before multiplying, and truncates the result.
    shifted = (a, b, c + 0.5 - 0.5 * (a + b), d, e, f + 0.5 - 0.5 * (d + e))
    return image.transform(
        image.size, Image.Transform.AFFINE, shifted, fillcolor=_for_mode(image, _GREY)
    )


def _rotation(image: Image.Image, angle: float) -> Matrix:
    """Rotation about the centre of the image."""
    x, y = (image.width - 1) / 2, (image.height - 1) / 2
    cos, sin = math.cos(angle), math.sin(angle)
    return cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y


def _cutout(image: Image.Image, center: tuple[int, int], half: int) -> Image.Image:
    """Paint a grey square with sides of twice `half`, as far as it lies inside the image."""
    (y, x), cut = center, image.copy()
    corners = (max(0, x - half), max(0, y - half), x + half, y + half)
    cut.paste(_for_mode(image, _GREY), corners)
    return cut


def _for_mode(image: Image.Image, colour: tuple[int, ...]) -> int | tuple[int, ...]:
    return colour[0] if image.mode == "L" else colour
