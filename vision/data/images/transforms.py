"""From images of any size to the model's input size: random for training, fixed for evaluation.

Pixels are uint8 (height, width, channels); normalisation and mixing follow, on whole batches.
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from vision.data.configs import AugmentConfig, Interpolation
from vision.data.images.augment import change_colours, erase, from_image, to_image
from vision.data.images.decode import OpenImage, Pixels
from vision.data.preprocess import Preprocess

Box = tuple[int, int, int, int]
"""top, left, height, width."""

Transform = Callable[[OpenImage, np.random.Generator], Pixels]


def evaluation_pixels(image: OpenImage, preprocess: Preprocess) -> Pixels:
    """Resize to just cover image_size / crop_ratio, then crop the centre.

    Sizes and offsets are those of torchvision's Resize and CenterCrop.
    """
    height, width = preprocess.image_size
    ratio = preprocess.crop_ratio_for(image.height, image.width)
    around = tuple(math.floor(side / ratio) for side in (height, width))
    pixels = _resized_to_cover(image, (around[0], around[1]), preprocess.interpolation)
    size = pixels.shape
    top, left = round((size[0] - height) / 2), round((size[1] - width) / 2)
    return pixels[top : top + height, left : left + width]


def training_pixels(
    image: OpenImage,
    preprocess: Preprocess,
    augment: AugmentConfig,
    random: np.random.Generator,
) -> Pixels:
    """Return a random view of an image, determined by the state of `random`."""
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
    if random.random() < augment.flip:
        pixels = flip(pixels, axis=1)
    if random.random() < augment.vertical_flip:
        pixels = flip(pixels, axis=0)
    for_policy = None if augment.interpolation == "random" else interpolation
    pixels = change_colours(pixels, augment, preprocess.mean, for_policy, random)
    if random.random() < augment.erase:
        pixels = erase(pixels, augment, preprocess.mean, preprocess.std, random)
    return pixels


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
    pixels = _resized_to_cover(image, preprocess.image_size, interpolation)
    if augment.padding:
        sides = (augment.padding, augment.padding)
        mode: Literal["reflect", "constant"] = (
            "reflect" if augment.padding_mode == "reflect" else "constant"
        )
        pixels = np.pad(pixels, (sides, sides, (0, 0)), mode)
    top = int(random.integers(pixels.shape[0] - height + 1))
    left = int(random.integers(pixels.shape[1] - width + 1))
    return pixels[top : top + height, left : left + width]


def _resized_to_cover(
    image: OpenImage, target: tuple[int, int], interpolation: Interpolation
) -> Pixels:
    """Resize to just cover a size. Of an image longer than 32 times its width, use the centre.

    Otherwise an image of 30,000 × 1 pixels would take gigabytes at a height of 224 pixels.
    """
    limit = 32 * min(image.height, image.width)
    height, width = min(image.height, limit), min(image.width, limit)
    top, left = (image.height - height) // 2, (image.width - width) // 2
    size = covering_size((height, width), target)
    return resize(image.region(top, left, height, width), size, interpolation)


def covering_size(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest (height, width) of the shape of `size` that covers `target`."""
    height, width = size
    if target[0] * width >= target[1] * height:
        return target[0], max(target[1], target[0] * width // height)
    return max(target[0], target[1] * height // width), target[1]


def resize(pixels: Pixels, size: tuple[int, int], interpolation: Interpolation) -> Pixels:
    """Resample with antialiasing; values differ from Pillow's by at most 2, and rarely.

    torch resamples uint8 several times as fast as Pillow, but has no Lanczos filter.
    """
    if pixels.shape[:2] == size:
        return pixels
    if interpolation == "lanczos":
        return from_image(to_image(pixels).resize((size[1], size[0]), Image.Resampling.LANCZOS))
    if not pixels.flags.writeable:  # torch does not support read-only tensors, and warns
        pixels = pixels.copy()
    # In this order torch gets a channels-last batch, and keeps that layout.
    batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    if interpolation == "nearest":
        batch = F.interpolate(batch, size, mode="nearest-exact")
    else:
        batch = F.interpolate(batch, size, mode=interpolation, antialias=True)
    return batch[0].permute(1, 2, 0).numpy()


def flip(pixels: Pixels, axis: int) -> Pixels:
    """Flip along an axis. (NumPy takes fifteen times as long to copy in reverse order.)"""
    if not pixels.flags.writeable:
        pixels = pixels.copy()
    flipped: Pixels = torch.from_numpy(pixels).flip(axis).numpy()
    return flipped
