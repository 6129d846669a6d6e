"""Preprocessing: from an image of any size to the input of a model, the same in every command.

Pixels are uint8 (height, width, channels); whole batches are normalised on the device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image
from torch import Tensor

from vision.config import ConfigError, Size, pair
from vision.data.configs import DataConfig, Interpolation, PreprocessConfig, ShapesConfig
from vision.data.images.decode import (
    DEFAULT_MAX_PIXELS,
    OpenImage,
    Pixels,
    from_image,
    open_image,
    to_image,
)
from vision.data.sources.known_sets import known_set
from vision.data.sources.source import StoredImage

Known = Sequence[tuple[str, Mapping[str, Any]]]
"""Preprocessing values with their origins, in order of precedence."""
DEFAULT = "default"
"""Origin of values that neither the config nor the weights nor the data set determine."""
NAMES = ("mean", "std", "interpolation", "crop_ratio")
"""Preprocessing values that weights or data sets may determine."""

# Statistics of ImageNet's training images, used by nearly every published model. They are averaged
# for greyscale images.
_DEFAULTS: dict[str, Any] = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "interpolation": "bicubic",
    "crop_ratio": 0.875,
}


@dataclass(frozen=True)
class Preprocess:
    """The values of a PreprocessConfig without `auto`, and their origins."""

    image_size: tuple[int, int]
    """Height and width."""
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Interpolation
    crop_ratio: float
    origin: Mapping[str, str]
    """Origin of mean, std, interpolation and crop_ratio."""

    def __str__(self) -> str:
        """Return the values, grouped by their origin."""
        by_origin: dict[str, list[str]] = {}
        for name, origin in self.origin.items():
            value = getattr(self, name)
            if not isinstance(value, str):
                numbers = value if isinstance(value, tuple) else (value,)
                separator = " × " if name == "image_size" else ", "
                value = separator.join(f"{number:.4g}" for number in numbers)
            by_origin.setdefault(origin, []).append(f"{name.replace('_', ' ')} {value}")
        return "; ".join(f"{', '.join(values)} (from {who})" for who, values in by_origin.items())

    def values(self) -> dict[str, Any]:
        """Mean, std, interpolation and crop ratio, for JSON."""
        found = {name: getattr(self, name) for name in NAMES}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}

    def crop_ratio_for(self, height: int, width: int) -> float:
        """Return the crop ratio for an image of this size.

        If the ratio is a default, images that fit into the model's input are used whole: cutting
        off their border would show a model larger objects than it was trained on.
        """
        small = height <= self.image_size[0] and width <= self.image_size[1]
        return 1.0 if small and self.origin.get("crop_ratio") == DEFAULT else self.crop_ratio


def resolve_preprocess(
    config: PreprocessConfig,
    image_size: Size,
    channels: int,
    known: Known = (),
) -> Preprocess:
    """Replace `auto` by the first of the `known` (origin, values) that has a value.

    Callers list the weights before the data set, since weights need the values that they were
    trained with. ImageNet's values are the default.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    sources = [
        ("the config", {k: v for k, v in config.model_dump().items() if v != "auto"}),
        *known,
        (DEFAULT, _DEFAULTS),
    ]
    for name in _DEFAULTS:
        values[name], origin[name] = next((s[name], o) for o, s in sources if name in s)
    for name in ("mean", "std"):
        numbers = tuple(float(number) for number in values[name])
        if len(numbers) != channels and origin[name] != "the config" and channels == 1:
            numbers = (sum(numbers) / len(numbers),)
            origin[name] += " (average of its channels)"
        elif len(numbers) != channels and len(numbers) == 1 and origin[name] != "the config":
            numbers *= channels
            origin[name] += " (the same for every channel)"
        if len(numbers) != channels:
            raise ConfigError(
                f"preprocess.{name} has {len(numbers)} numbers {list(numbers)} ({origin[name]}), "
                f"but images have {channels} channels."
            )
        values[name] = numbers
    checked = PreprocessConfig(**values)
    return Preprocess(pair(image_size), channels, **checked.model_dump(), origin=origin)


def usual_values(data: DataConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return the values that suit a data set where weights decide nothing, as (origin, values).

    Images that are as small as the model's input are used whole: cutting off their border in
    evaluation would show a model larger objects than it was trained on.
    """
    if isinstance(data, ShapesConfig):
        return [("the data set", {"crop_ratio": 1.0})]
    known = known_set(data)
    if known is None or known.image_size is None:
        return []
    values = {"mean": known.mean, "std": known.std, "crop_ratio": 1.0}
    return [("the data set", {name: value for name, value in values.items() if value is not None})]


def input_pixels(
    image: StoredImage | Image.Image,
    name: str,
    preprocess: Preprocess,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> Pixels:
    """Return what the model sees of an image, or raise an UnreadableImageError that names it."""
    return evaluation_pixels(open_image(image, preprocess.channels, name, max_pixels), preprocess)


def evaluation_pixels(image: OpenImage, preprocess: Preprocess) -> Pixels:
    """Resize to just cover image_size / crop_ratio, then crop the centre.

    Sizes and offsets are those of torchvision's Resize and CenterCrop.
    """
    height, width = preprocess.image_size
    ratio = preprocess.crop_ratio_for(image.height, image.width)
    around = tuple(math.floor(side / ratio) for side in (height, width))
    pixels = resized_to_cover(image, (around[0], around[1]), preprocess.interpolation)
    size = pixels.shape
    top, left = round((size[0] - height) / 2), round((size[1] - width) / 2)
    return pixels[top : top + height, left : left + width]


def resized_to_cover(
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


def input_batch(pixels: Sequence[Pixels], preprocess: Preprocess, device: torch.device) -> Tensor:
    """Return images from `input_pixels` as a model takes them: (b channels height width)."""
    images = torch.from_numpy(np.stack(pixels)).to(device)
    return normalizer(preprocess, device)(rearrange(images, "b h w c -> b c h w"))


def normalizer(preprocess: Preprocess, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that normalises uint8 batches (n, c, h, w) on the device, in float32.

    It computes (pixel / 255 − mean) / std as one multiplication and one addition.
    """
    mean = torch.tensor(preprocess.mean, dtype=torch.float64)
    std = torch.tensor(preprocess.std, dtype=torch.float64)
    scale, shift = (
        rearrange(numbers, "c -> 1 c 1 1").to(device, torch.float32)
        for numbers in (1 / (255 * std), -mean / std)
    )

    def normalize(images: Tensor) -> Tensor:
        numbers = images.to(torch.float32, memory_format=torch.contiguous_format)
        return torch.addcmul(shift, numbers, scale)

    return normalize
