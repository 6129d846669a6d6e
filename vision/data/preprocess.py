"""Preprocessing: the same for training, evaluation and prediction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from vision.config import ConfigError, Size, pair
from vision.data.configs import DataConfig, Interpolation, PreprocessConfig, ShapesConfig
from vision.data.sources.known_sets import known_set

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
    known = known_set(data)
    if isinstance(data, ShapesConfig):
        return [("the data set", {"crop_ratio": 1.0})]
    if known is None or known.image_size is None:
        return []
    values = {"mean": known.mean, "std": known.std, "crop_ratio": 1.0}
    return [("the data set", {name: value for name, value in values.items() if value is not None})]


def normalizer(
    preprocess: Preprocess, device: torch.device, dtype: torch.dtype = torch.float32
) -> Callable[[Tensor], Tensor]:
    """Return a function that normalises uint8 batches (n, c, h, w) on the device.

    It computes (pixel / 255 − mean) / std as one multiplication and one addition, in float32 or
    better.
    """
    exact = torch.promote_types(dtype, torch.float32)
    mean = torch.tensor(preprocess.mean, dtype=torch.float64)
    std = torch.tensor(preprocess.std, dtype=torch.float64)
    scale, shift = (
        rearrange(numbers, "c -> 1 c 1 1").to(device, exact)
        for numbers in (1 / (255 * std), -mean / std)
    )

    def normalize(images: Tensor) -> Tensor:
        numbers = images.to(exact, memory_format=torch.contiguous_format)
        return torch.addcmul(shift, numbers, scale).to(dtype)

    return normalize
