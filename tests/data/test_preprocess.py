"""Where mean, deviation, interpolation and crop come from, and the pixels and numbers they make:
against torchvision and Pillow.
"""

import math

import numpy as np
import pytest
import torch
from augment_settings import noise, opened, preprocess, read
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from vision.cli.composition import compose
from vision.config import ConfigError, parse
from vision.data.configs import AugmentConfig, DataConfig, LoaderConfig, PreprocessConfig
from vision.data.images.decode import open_image
from vision.data.preprocess import (
    evaluation_pixels,
    normalizer,
    resize,
    resolve_preprocess,
    usual_values,
)

AUTO = {"mean": "auto", "std": "auto", "interpolation": "auto", "crop_ratio": "auto"}


def test_auto_takes_the_first_that_knows_and_says_who() -> None:
    config = parse(PreprocessConfig, {**AUTO, "crop_ratio": 0.95})
    weights = ("the weights", {"mean": (0.5, 0.5, 0.5), "crop_ratio": 0.9})
    data = ("data set cifar10", {"mean": (0.49, 0.48, 0.45), "std": (0.25, 0.24, 0.26)})
    result = resolve_preprocess(config, (32, 48), 3, [weights, data])
    assert result.image_size == (32, 48)
    assert (result.mean, result.std) == ((0.5, 0.5, 0.5), (0.25, 0.24, 0.26))
    assert (result.interpolation, result.crop_ratio) == ("bicubic", 0.95)
    assert result.origin == {
        "mean": "the weights",
        "std": "data set cifar10",
        "interpolation": "default",
        "crop_ratio": "the config",
    }


def test_values_for_colours_are_averaged_for_greyscale_images_and_say_so() -> None:
    result = resolve_preprocess(parse(PreprocessConfig, AUTO), 28, 1)
    assert result.mean == pytest.approx((0.449,))
    assert result.std == pytest.approx((0.226,))
    assert result.origin["mean"] == "default (average of its channels)"


def test_configured_values_of_another_number_of_channels_are_refused() -> None:
    config = parse(PreprocessConfig, {**AUTO, "mean": [0.5, 0.5, 0.5]})
    with pytest.raises(ValueError, match=r"preprocess.mean has 3 numbers.*1 channels"):
        resolve_preprocess(config, 28, 1)


def test_normalised_batch_equals_torchvision() -> None:
    settings = preprocess(16)
    pixels = torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    result = normalizer(settings, torch.device("cpu"))(pixels)
    floats = v2.functional.to_dtype(pixels, torch.float32, scale=True)
    expected = v2.functional.normalize(floats, list(settings.mean), list(settings.std))
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    assert np.abs((result.float() - expected).numpy()).max() <= 2e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "rand-m9"}, "policy: unknown augmentation policy 'rand-m9'"),
        ({"crop_area": [0.5, 0.1]}, "crop_area = \\[0.5, 0.1\\]: the first number"),
        ({"flip": 1.5}, "flip: .*less than or equal to 1"),
        ({"flip": "alternat"}, "flip: .*'alternate'"),
        ({"repeats": 0}, "repeats: .*greater than or equal to 1"),
        ({"mixupp": 0.1}, "mixupp: unknown setting. Did you mean 'mixup'"),
    ],
)
def test_augmentation_with_mistake_is_explained(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(AugmentConfig, {**read("augment", "inception"), **changes})


def test_loader_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"max_pixels: .*less than"):
        parse(LoaderConfig, {**read("loader", "default"), "max_pixels": 10**9})


SMALL = ["data=shapes", "data=fashion_mnist", "data=cifar10", "data=cifar100"]


@pytest.mark.parametrize("choice", SMALL)
def test_small_images_are_evaluated_whole_unless_weights_or_the_config_say_otherwise(
    choice: str,
) -> None:
    data = parse(DataConfig, compose("data", [choice])[0]["data"])  # type: ignore[arg-type]
    auto = parse(PreprocessConfig, AUTO)
    channels = 1 if choice == "data=fashion_mnist" else 3
    known = usual_values(data)
    assert resolve_preprocess(auto, 32, channels, known).crop_ratio == 1.0
    weights = ("the weights", {"crop_ratio": 0.9})
    assert resolve_preprocess(auto, 32, channels, [weights, *known]).crop_ratio == 0.9
    given = parse(PreprocessConfig, AUTO | {"crop_ratio": 0.8})
    assert resolve_preprocess(given, 32, channels, known).crop_ratio == 0.8


def test_large_images_are_evaluated_as_on_imagenet() -> None:
    data = parse(DataConfig, compose("data", ["data=imagenet"])[0]["data"])  # type: ignore[arg-type]
    assert usual_values(data) == []


def test_images_no_larger_than_the_model_are_used_whole_where_nobody_sets_a_crop() -> None:
    auto = parse(PreprocessConfig, AUTO)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    larger = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    plain = resolve_preprocess(auto, 32, 3)
    stated = resolve_preprocess(auto, 32, 3, [("the weights", {"crop_ratio": 0.875})])
    small, large = (open_image(array, 3, "") for array in (pixels, larger))
    assert np.array_equal(evaluation_pixels(small, plain), pixels)
    assert not np.array_equal(evaluation_pixels(small, stated), pixels)
    found, expected = (evaluation_pixels(large, settings) for settings in (plain, stated))
    assert np.array_equal(found, expected)


# Resizing and evaluation ------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    target=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    interpolation=st.sampled_from(["bilinear", "bicubic", "lanczos"]),
    channels=st.sampled_from([1, 3]),
)
def test_resize_any_size_equals_pillow_within_two(
    size: tuple[int, int], target: tuple[int, int], interpolation: str, channels: int
) -> None:
    pixels = noise(*size, channels)
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    expected = np.asarray(image.resize(target[::-1], Image.Resampling[interpolation.upper()]))
    result = resize(pixels, target, interpolation)  # type: ignore[arg-type]
    assert result.dtype == np.uint8
    assert result.shape == (*target, channels)
    gap = np.abs(result.astype(int) - expected.reshape(result.shape))
    assert gap.max() <= 2
    assert gap.mean() <= 0.1 or gap.size < 100


@pytest.mark.parametrize("size", [(50, 70), (70, 50), (64, 64), (20, 33), (31, 400)])
@pytest.mark.parametrize("crop_ratio", [0.875, 0.9, 1.0])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_of_square_size_equals_torchvision_within_two(
    size: tuple[int, int], crop_ratio: float, interpolation: str
) -> None:
    settings = preprocess(48, crop_ratio=crop_ratio, interpolation=interpolation)
    reference = v2.Compose(
        [
            v2.Resize(math.floor(48 / crop_ratio), v2.InterpolationMode(interpolation)),
            v2.CenterCrop(48),
        ]
    )
    expected = np.asarray(reference(Image.fromarray(noise(*size)))).astype(int)
    gap = np.abs(evaluation_pixels(opened(*size), settings) - expected)
    assert gap.max() <= 2
    assert gap.mean() <= 0.1


@pytest.mark.parametrize("size", [(50, 70), (70, 50), (9, 200), (200, 9)])
def test_evaluation_of_rectangular_size_covers_it_and_keeps_shapes(size: tuple[int, int]) -> None:
    settings = preprocess((24, 60), crop_ratio=1.0, interpolation="bilinear")
    scale = max(24 / size[0], 60 / size[1])
    covering = (max(24, int(size[0] * scale)), max(60, int(size[1] * scale)))
    image = Image.fromarray(noise(*size)).resize(covering[::-1], Image.Resampling.BILINEAR)
    top, left = round((covering[0] - 24) / 2), round((covering[1] - 60) / 2)
    expected = np.asarray(image).astype(int)[top : top + 24, left : left + 60]
    assert np.abs(evaluation_pixels(opened(*size), settings) - expected).max() <= 1


def test_values_are_printed_with_their_origin() -> None:
    config = parse(PreprocessConfig, {**AUTO, "crop_ratio": 0.95})
    weights = ("the weights", {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)})
    printed = str(resolve_preprocess(config, 32, 3, [weights]))
    assert "mean 0.5, 0.5, 0.5, std 0.25, 0.25, 0.25 (from the weights)" in printed
    assert "crop ratio 0.95 (from the config)" in printed
