"""The random view of an image for training: crop, flips, policy, colours, erasing."""

import math
from functools import cache, lru_cache
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from vision.data.configs import AugmentConfig, Interpolation
from vision.data.images.decode import OpenImage, Pixels, from_image, to_image
from vision.data.images.policies import apply_policy, torchvision_transforms
from vision.data.preprocess import Preprocess, evaluation_pixels, resize, resized_to_cover
from vision.randomness import generator

_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
"""In the order of `AugmentConfig.color_jitter`, which ends with the hue."""

Box = tuple[int, int, int, int]
"""top, left, height, width."""


def training_pixels(
    image: OpenImage,
    preprocess: Preprocess,
    augment: AugmentConfig,
    random: np.random.Generator,
    turn: bool = False,
) -> Pixels:
    """Return a random view of an image, determined by the state of `random`.

    `turn`: whether to flip it if flips alternate (`alternating_flip`).
    """
    interpolation = preprocess.interpolation
    if augment.interpolation == "random":
        interpolation = "bicubic" if random.random() < 0.5 else "bilinear"
    elif augment.interpolation != "evaluation":
        interpolation = augment.interpolation
    match augment.crop:
        case "random_resized":
            box = random_resized_crop_box(image.height, image.width, augment, random)
            pixels = resize(image.region(*box), preprocess.image_size, interpolation)
        case "random":
            pixels = _padded_random_crop(image, preprocess, augment, interpolation, random)
        case "center":
            pixels = evaluation_pixels(image, preprocess)
    chance = random.random()  # drawn in any case: the numbers after it are the same
    if turn if augment.flip == "alternate" else chance < augment.flip:
        pixels = flip(pixels, axis=1)
    if random.random() < augment.vertical_flip:
        pixels = flip(pixels, axis=0)
    for_policy = None if augment.interpolation == "random" else interpolation
    pixels = change_colours(pixels, augment, preprocess.mean, for_policy, random)
    if random.random() < augment.erase:
        pixels = erase(pixels, augment, preprocess.mean, preprocess.std, random)
    return pixels


def alternating_flip(seed: int, epoch: int, index: int, use: int) -> bool:
    """Whether to flip an image when flips alternate (Jordan, arXiv 2404.00498, section 3.6).

    The seed decides for each image whether it is flipped in even or in odd epochs; `use` numbers
    the copies of an image in one epoch, which alternate too.
    """
    first = generator(seed, "flip", index=index).random() < 0.5
    return (first + epoch + use) % 2 == 1


def random_resized_crop_box(
    height: int, width: int, augment: AugmentConfig, random: np.random.Generator
) -> Box:
    """Draw a rectangle of random area and aspect ratio (Szegedy et al., CVPR 2015, section 6).

    The area is uniform, the aspect ratio log-uniform; both are drawn again until the rectangle
    fits. After ten attempts it is the largest centred rectangle of an allowed aspect ratio.
    """
    # Only random(): uniform() and integers() take ten times as long for a single number.
    low, high = (math.log(aspect) for aspect in augment.crop_aspect)
    smallest, largest = augment.crop_area
    for _ in range(10):
        area = height * width * (smallest + (largest - smallest) * random.random())
        aspect = math.exp(low + (high - low) * random.random())
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(random.random() * (height - crop_height + 1))
            left = int(random.random() * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    aspect = min(max(width / height, augment.crop_aspect[0]), augment.crop_aspect[1])
    crop_width, crop_height = min(width, round(height * aspect)), min(height, round(width / aspect))
    crop_width, crop_height = max(1, crop_width), max(1, crop_height)
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def _padded_random_crop(
    image: OpenImage,
    preprocess: Preprocess,
    augment: AugmentConfig,
    interpolation: Interpolation,
    random: np.random.Generator,
) -> Pixels:
    """Resize to just cover image_size, pad, and crop at a random position."""
    height, width = preprocess.image_size
    pixels = resized_to_cover(image, preprocess.image_size, interpolation)
    padding = augment.padding
    top = int(random.integers(pixels.shape[0] + 2 * padding - height + 1))
    left = int(random.integers(pixels.shape[1] + 2 * padding - width + 1))
    if not padding:
        return pixels[top : top + height, left : left + width]
    if augment.padding_mode == "reflect":
        rows, columns = (_reflected(side, padding) for side in pixels.shape[:2])
        return pixels.take(rows[top : top + height], 0).take(columns[left : left + width], 1)
    top, left = top - padding, left - padding
    inside = pixels[
        max(top, 0) : max(top + height, 0),
        max(left, 0) : max(left + width, 0),
    ]
    below, right = max(-top, 0), max(-left, 0)
    view = np.zeros((height, width, pixels.shape[2]), np.uint8)
    view[below : below + inside.shape[0], right : right + inside.shape[1]] = inside
    return view


@lru_cache(maxsize=256)
def _reflected(length: int, padding: int) -> NDArray[np.int64]:
    """Return the indices of the pixels along an axis with reflected borders.

    To take only those of the crop is five times as fast as `np.pad` of every image.
    """
    return np.pad(np.arange(length), padding, "reflect")


def flip(pixels: Pixels, axis: int) -> Pixels:
    """Flip along an axis. (NumPy takes fifteen times as long to copy in reverse order.)"""
    if not pixels.flags.writeable:
        pixels = pixels.copy()
    flipped: Pixels = torch.from_numpy(pixels).flip(axis).numpy()
    return flipped


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
        if kind < len(_ENHANCERS):
            image = _ENHANCERS[kind](image).enhance(factor)
        else:
            shift = random.uniform(-amount, amount)
            image = torchvision_transforms().functional.adjust_hue(image, shift)
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
