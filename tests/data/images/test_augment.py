"""Views for training against torchvision and Pillow; statistics against the textbook."""

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from augment_settings import CONFIGS, augment, noise, opened, preprocess
from PIL import Image
from torchvision.transforms import v2

from vision.data import preprocess as preprocess_module
from vision.data.images import augment as augment_module
from vision.data.images.augment import (
    color_jitter,
    erase,
    random_resized_crop_box,
    training_pixels,
)
from vision.data.images.decode import open_image
from vision.data.preprocess import resize, resized_to_cover
from vision.randomness import generator


@pytest.mark.parametrize("name", ["none", "light", "inception"])
@pytest.mark.parametrize("size", [(1, 30_000), (30_000, 1), (1, 1), (3, 2000)])
def test_image_of_extreme_shape_gives_its_middle_without_growing(
    monkeypatch: pytest.MonkeyPatch, name: str, size: tuple[int, int]
) -> None:
    sizes: list[tuple[int, int]] = []

    def record(pixels: np.ndarray, target: tuple[int, int], interpolation: str) -> np.ndarray:
        sizes.append(target)
        return resize(pixels, target, interpolation)  # type: ignore[arg-type]

    for module in (preprocess_module, augment_module):
        monkeypatch.setattr(module, "resize", record)
    band = np.zeros((*size, 3), np.uint8)
    long = max(size)
    middle = slice(long // 4, -(-3 * long // 4))
    band[middle if size[0] == long else slice(None), middle if size[1] == long else slice(None)] = (
        200
    )
    config = augment(name, padding=0, interpolation="bilinear")
    random = generator(0, "augment")
    result = training_pixels(open_image(band, 3, "a"), preprocess(64), config, random)
    assert result.shape == (64, 64, 3)
    assert max(height * width for height, width in sizes) <= 74 * 74 * 32
    if name == "none":
        assert (result == 200).all()


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
def test_fast_way_from_jpeg_to_model_size_equals_plain_pillow_within_three(
    subsampling: str,
) -> None:
    smooth = Image.fromarray(noise(20, 28)).resize((280, 200), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    smooth.save(buffer, "JPEG", quality=90, subsampling=subsampling)
    plain = Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")
    settings, config = preprocess(96), augment("inception", flip=0.0)
    for index in range(40):
        opened = open_image(buffer.getvalue(), 3, "a.jpg")
        result = training_pixels(opened, settings, config, generator(0, "augment", index=index))
        top, left, height, width = random_resized_crop_box(
            200, 280, config, generator(0, "augment", index=index)
        )
        cropped = plain.crop((left, top, left + width, top + height))
        expected = np.asarray(cropped.resize((96, 96), Image.Resampling.BICUBIC)).astype(int)
        assert np.abs(result - expected).max() <= 3
        assert np.abs(result - expected).mean() <= 0.1


# Random resized crop ----------------------------------------------------------------------------


def test_random_resized_crop_follows_the_textbook() -> None:
    config = augment("inception")
    random = np.random.default_rng(0)
    boxes = np.array([random_resized_crop_box(400, 400, config, random) for _ in range(20_000)])
    top, left, height, width = boxes.T
    area, log_aspect = height * width / 400**2, np.log(width / height)
    # Given the area, an aspect is accepted if both sides fit: the exact law by weights.
    areas, aspects = np.meshgrid(
        np.linspace(0.08, 1, 800), np.linspace(-1, 1, 801) * math.log(4 / 3)
    )
    fits = (areas * np.exp(aspects) <= 1) & (areas / np.exp(aspects) <= 1)
    for measured, values in ((area, areas), (log_aspect, aspects)):
        for share in (0.1, 0.25, 0.5, 0.75, 0.9):
            expected = np.quantile(values[fits], share)
            assert np.quantile(measured, share) == pytest.approx(expected, abs=0.012)
    # Uniform position: as a share of the room there is.
    room = (height < 350) & (width < 350)
    assert np.mean(top[room] / (400 - height[room])) == pytest.approx(0.5, abs=0.01)
    assert np.var(left[room] / (400 - width[room])) == pytest.approx(1 / 12, abs=0.004)


def test_random_resized_crop_has_the_distribution_of_torchvision() -> None:
    config = augment("inception")
    random = np.random.default_rng(1)
    ours = np.array([random_resized_crop_box(375, 500, config, random) for _ in range(6000)])
    torch.manual_seed(1)
    reference = v2.RandomResizedCrop(224)
    image = torch.empty(3, 375, 500)
    drawn = [reference.make_params([image]) for _ in range(6000)]
    theirs = np.array([[d["top"], d["left"], d["height"], d["width"]] for d in drawn])
    for column in range(4):
        shares = np.linspace(0.05, 0.95, 19)  # the extremes of a sample are noise
        gap = np.quantile(ours[:, column], shares) - np.quantile(theirs[:, column], shares)
        assert np.abs(gap).max() < 10


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (1, 1), (1, 50), (2, 2)])
def test_random_resized_crop_of_extreme_shape_stays_inside(height: int, width: int) -> None:
    config = augment("inception")
    random = np.random.default_rng(0)
    for _ in range(200):
        top, left, h, w = random_resized_crop_box(height, width, config, random)
        assert 0 <= top <= top + h <= height
        assert 0 <= left <= left + w <= width
        assert h > 0
        assert w > 0


# Other changes ----------------------------------------------------------------------------------


def test_padded_crop_gives_every_place_equally_often() -> None:
    config = augment("light", flip=0.0)
    original = noise(8, 8, 1)
    padded = np.pad(original, ((4, 4), (4, 4), (0, 0)))
    places = {
        padded[top : top + 8, left : left + 8].tobytes(): (top, left)
        for top in range(9)
        for left in range(9)
    }
    counts = np.zeros((9, 9))
    settings, small = preprocess(8, 1), open_image(original, 1, "a")
    for index in range(8100):
        view = training_pixels(small, settings, config, generator(0, "augment", index=index))
        counts[places[np.ascontiguousarray(view).tobytes()]] += 1
    assert counts.min() > 50  # of 100 expected
    assert counts.max() < 160


@pytest.mark.parametrize("mode", ["black", "reflect"])
@pytest.mark.parametrize("size", [(8, 8), (6, 9), (13, 8), (1, 1)])
def test_padded_crop_equals_padding_the_whole_image(size: tuple[int, int], mode: str) -> None:
    config = augment("light", flip=0.0, padding=5, padding_mode=mode)
    small = opened(*size)
    whole = resized_to_cover(small, (8, 8), "bicubic")
    padded = np.pad(whole, ((5, 5), (5, 5), (0, 0)), "reflect" if mode == "reflect" else "constant")
    for index in range(40):
        view = training_pixels(small, preprocess(8), config, generator(0, "augment", index=index))
        random = generator(0, "augment", index=index)
        top, left = (int(random.integers(side - 8 + 1)) for side in padded.shape[:2])
        assert np.array_equal(view, padded[top : top + 8, left : left + 8])


def test_alternating_flip_mirrors_in_its_turn_and_draws_the_same_numbers() -> None:
    settings, image = preprocess(8), opened(12, 10)
    plain, alternate = augment("light", flip=0.0), augment("light", flip="alternate")
    for index in range(10):
        draws = [generator(0, "augment", index=index) for _ in range(3)]
        expected = training_pixels(image, settings, plain, draws[0])
        assert np.array_equal(training_pixels(image, settings, alternate, draws[1]), expected)
        mirrored = training_pixels(image, settings, alternate, draws[2], turn=True)
        assert np.array_equal(mirrored, expected[:, ::-1])
        assert draws[0].random() == draws[1].random() == draws[2].random()


def test_flip_probability_is_kept_and_mirrors() -> None:
    config = augment("none", flip=0.25, vertical_flip=0.5)
    original = noise(8, 8)
    kinds = {
        original.tobytes(): "as it is",
        original[:, ::-1].tobytes(): "mirrored",
        original[::-1].tobytes(): "upside down",
        original[::-1, ::-1].tobytes(): "both",
    }
    counts = dict.fromkeys(kinds.values(), 0)
    settings, small = preprocess(8, crop_ratio=1.0), open_image(original, 3, "a")
    for index in range(4000):
        view = training_pixels(small, settings, config, generator(0, "augment", index=index))
        counts[kinds[np.ascontiguousarray(view).tobytes()]] += 1
    expected = {"as it is": 1500, "mirrored": 500, "upside down": 1500, "both": 500}
    assert all(abs(counts[kind] - number) < 120 for kind, number in expected.items()), counts


def test_erasing_area_and_aspect_follow_the_textbook() -> None:
    config = augment("none", erase=1.0, erase_fill="mean")
    settings = preprocess(100)
    gray = np.zeros((100, 100, 3), np.uint8)
    random = np.random.default_rng(0)
    areas, aspects = [], []
    for _ in range(3000):
        erased = erase(gray, config, settings.mean, settings.std, random).any(axis=2)
        areas.append(erased.mean())
        aspects.append(math.log(erased.any(axis=1).sum() / erased.any(axis=0).sum()))
    draws = np.random.default_rng(5)
    area, aspect = (
        draws.uniform(0.02, 1 / 3, 50_000),
        draws.uniform(-1, 1, 50_000) * math.log(1 / 0.3),
    )
    fits = (area * np.exp(aspect) < 1) & (area / np.exp(aspect) < 1)
    assert np.mean(areas) == pytest.approx(area[fits].mean(), abs=0.006)
    assert np.std(areas) == pytest.approx(area[fits].std(), abs=0.006)
    assert np.mean(aspects) == pytest.approx(0, abs=0.05)
    assert np.std(aspects) == pytest.approx(aspect[fits].std(), abs=0.03)


def test_erasing_noise_is_standard_normal_to_the_model() -> None:
    config = augment("none", erase=1.0, erase_area=[0.5, 0.5], erase_aspect=[1.0, 1.0])
    settings = preprocess(200, mean=[0.5, 0.5, 0.5], std=[0.15, 0.15, 0.15])
    marker = np.full((200, 200, 3), 255, np.uint8)
    erased = erase(marker, config, settings.mean, settings.std, np.random.default_rng(0))
    inside = erased[erased.min(axis=2) < 255]
    numbers = (inside / 255 - 0.5) / 0.15
    assert numbers.mean() == pytest.approx(0, abs=0.02)
    assert numbers.std() == pytest.approx(1, abs=0.02)
    assert np.mean(numbers < 1) == pytest.approx(0.8413, abs=0.01)
    assert np.abs(np.corrcoef(inside.T) - np.eye(3)).max() < 0.03


def test_erasing_leaves_the_original_untouched() -> None:
    original = noise(32, 32)
    before = original.copy()
    settings = preprocess(32)
    erase(
        original, augment("none", erase=1.0), settings.mean, settings.std, np.random.default_rng(0)
    )
    assert np.array_equal(original, before)


@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        (0, v2.functional.adjust_brightness),
        (1, v2.functional.adjust_contrast),
        (2, v2.functional.adjust_saturation),
        (3, v2.functional.adjust_hue),
    ],
)
def test_color_jitter_of_one_kind_is_within_range_of_torchvision(
    kind: int, reference: Callable[[Image.Image, float], Image.Image]
) -> None:
    image = Image.fromarray(noise(16, 16)).resize((32, 32), Image.Resampling.BICUBIC)
    strength = tuple(0.3 if part == kind else 0.0 for part in range(4))
    low, high = (-0.3, 0.3) if kind == 3 else (0.7, 1.3)
    grid = np.linspace(low, high, 1201)
    candidates = np.stack([np.asarray(reference(image, factor)) for factor in grid]).astype(int)
    found = []
    for seed in range(20):
        jittered = color_jitter(image, strength, np.random.default_rng(seed))  # type: ignore[arg-type]
        result = np.asarray(jittered)
        gaps = np.abs(candidates - result).max(axis=(1, 2, 3))
        assert gaps.min() <= 1
        found.append(grid[gaps.argmin()])
    assert min(found) < low + 0.15
    assert max(found) > high - 0.15


def test_policy_and_colours_take_one_conversion_to_pillow_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("to_image", "from_image"):
        original = getattr(augment_module, name)

        def count(value: object, name: str = name, original: Any = original) -> object:
            calls.append(name)
            return original(value)

        monkeypatch.setattr(augment_module, name, count)
    changes = {"policy": "three_augment", "color_jitter": (0.4, 0.4, 0.4, 0.1), "erase": 1.0}
    config = augment("none", **changes, color_jitter_probability=1.0)
    training_pixels(opened(40, 50), preprocess(32), config, np.random.default_rng(0))
    assert calls == ["to_image", "from_image"]
    calls.clear()
    training_pixels(opened(40, 50), preprocess(32), augment("none"), np.random.default_rng(0))
    assert not calls


# Randomness -------------------------------------------------------------------------------------

ALL = sorted(path.stem for path in (CONFIGS / "augment").glob("*.yaml"))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("channels", [1, 3])
def test_augmentation_is_a_function_of_seed_epoch_and_sample(name: str, channels: int) -> None:
    config, settings = augment(name), preprocess(32, channels)

    def view(seed: int, epoch: int, index: int) -> np.ndarray:
        random = generator(seed, "augment", epoch=epoch, index=index)
        return np.array(training_pixels(opened(40, 50, channels), settings, config, random))

    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first = view(0, 1, 2)
    assert first.shape == (32, 32, channels)
    assert first.dtype == np.uint8
    assert np.array_equal(view(0, 1, 2), first)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    others = [view(*key) for key in [(1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 3, 1), (0, 2, 1)]]
    same = [np.array_equal(other, first) for other in others]
    assert all(same) if name == "none" else not all(same)
    torch.manual_seed(1)
    assert np.array_equal(view(0, 1, 2), first)


def test_generators_of_different_places_are_independent() -> None:
    keys = [(s, e, i, o) for s in range(4) for e in range(4) for i in range(20) for o in range(4)]
    drawn = [
        generator(s, "augment", epoch=e, index=i, occurrence=o).random(4) for s, e, i, o in keys
    ]
    values = np.array(drawn)
    assert len(np.unique(values[:, 0])) == len(keys)
    neighbours = np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]
    assert abs(neighbours) < 0.09
    assert values.mean() == pytest.approx(0.5, abs=0.02)
    assert generator(0, "order").random() != generator(0, "augment").random()
