"""Augmentation of a cropped training image: policies, colours, erasing."""

import math
from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from types import ModuleType
from typing import cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vision.data.configs import AugmentConfig, Interpolation
from vision.data.images.decode import Pixels
from vision.data.images.policy import RandAugment, parse_policy
from vision.data.images.randaugment import (
    big_vision_rand_augment,
    timm_function,
    timm_rand_augment,
)
from vision.randomness import torch_seeded

_parse_policy = cache(parse_policy)


def change_colours(
    pixels: Pixels,
    augment: AugmentConfig,
    mean: tuple[float, ...],
    interpolation: Interpolation | None,
    random: np.random.Generator,
) -> Pixels:
    """Apply the policy and the colour jitter: converted to Pillow and back at most once."""
    image = None
    if augment.policy != "none":
        image = apply_policy(to_image(pixels), augment.policy, mean, interpolation, random)
    if any(augment.color_jitter) and random.random() < augment.color_jitter_probability:
        image = color_jitter(image or to_image(pixels), augment.color_jitter, random)
    return pixels if image is None else from_image(image)


def apply_policy(
    image: Image.Image,
    policy: str,
    mean: tuple[float, ...],
    interpolation: Interpolation | None,
    random: np.random.Generator,
) -> Image.Image:
    """Apply a policy of `AugmentConfig`. Without `interpolation` each operation draws its own."""
    match _parse_policy(policy):
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
    match _parse_policy(policy):
        case RandAugment(flavour="timm" | "big_vision"):
            timm_function("invert")
        case "none" | "three_augment":
            pass
        case _:
            _torchvision_policy(policy)


@cache
def _torchvision_policy(policy: str) -> Callable[[Image.Image], Image.Image]:
    """Return a transform of torchvision, as its reference training uses it."""
    v2 = _torchvision_transforms()
    match _parse_policy(policy):
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


def color_jitter(
    image: Image.Image,
    strength: tuple[float, float, float, float],
    random: np.random.Generator,
) -> Image.Image:
    """Change brightness, contrast, saturation and hue by random amounts, in random order.

    The first three are multiplied by a factor from 1 − strength (at least 0) to 1 + strength. Hue
    is shifted by up to ± strength of the colour circle.
    """
    for kind in random.permutation(4):
        amount = strength[kind]
        if not amount:
            continue
        factor = random.uniform(max(0.0, 1 - amount), 1 + amount)
        match int(kind):
            case 0:
                image = ImageEnhance.Brightness(image).enhance(factor)
            case 1:
                image = ImageEnhance.Contrast(image).enhance(factor)
            case 2:
                image = ImageEnhance.Color(image).enhance(factor)
            case 3:
                shift = random.uniform(-amount, amount)
                image = _torchvision_transforms().functional.adjust_hue(image, shift)
    return image


def erase(
    pixels: Pixels,
    augment: AugmentConfig,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    random: np.random.Generator,
) -> Pixels:
    """Fill a random rectangle with noise or the mean colour (Zhong et al., AAAI 2020).

    Noise has the mean and deviation of the data, so that the model sees standard normal values, up
    to rounding and the range of a pixel. Nothing is erased if ten rectangles do not fit.
    """
    height, width, channels = pixels.shape
    low, high = (math.log(aspect) for aspect in augment.erase_aspect)
    for _ in range(10):
        area = height * width * random.uniform(*augment.erase_area)
        aspect = math.exp(random.uniform(low, high))
        box_height, box_width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_height < height and 0 < box_width < width:
            break
    else:
        return pixels
    top = int(random.integers(height - box_height + 1))
    left = int(random.integers(width - box_width + 1))
    erased = pixels.copy()
    box = erased[top : top + box_height, left : left + box_width]
    if augment.erase_fill == "mean":
        box[:] = np.rint(255 * np.array(mean))
        return erased
    for channel in range(channels):
        quantiles = random.integers(256, size=box.shape[:2], dtype=np.uint8)
        box[:, :, channel] = _normal_values(mean[channel], std[channel])[quantiles]
    return erased


@cache
def _normal_values(mean: float, std: float) -> NDArray[np.uint8]:
    """Return 256 equally likely pixel values of a normal distribution, indexed by a random byte."""
    quantiles = [NormalDist(mean, std).inv_cdf((i + 0.5) / 256) for i in range(256)]
    values: NDArray[np.uint8] = np.clip(np.rint(255 * np.array(quantiles)), 0, 255).astype(np.uint8)
    return values


def _torchvision_transforms() -> ModuleType:
    """Import torchvision only if used: it takes as long as torch, in every spawned worker."""
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    module: ModuleType = v2
    return module


def to_image(pixels: Pixels) -> Image.Image:
    """Convert pixels to a Pillow image."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def from_image(image: Image.Image) -> Pixels:
    """Convert a Pillow image to pixels."""
    pixels = np.array(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels
