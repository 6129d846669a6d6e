"""Each flavour of RandAugment against its source, and the other policies against torchvision."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment as timm_source
from torchvision.transforms import v2

from vision.data.images import policies
from vision.data.images.policies import (
    BIG_VISION_OPERATIONS,
    TIMM_OPERATIONS,
    apply_policy,
    big_vision_operation,
    big_vision_rand_augment,
    three_augment,
    timm_operation,
    timm_rand_augment,
)
from vision.data.images.policy_text import RandAugment, parse_policy

FILL = (124, 116, 104)
MEAN = (0.485, 0.456, 0.406)


@pytest.fixture(scope="module")
def image() -> Image.Image:
    random = np.random.default_rng(3)
    small = Image.fromarray(random.integers(0, 256, (9, 11, 3), dtype=np.uint8))
    return small.resize((48, 40), Image.Resampling.BICUBIC)


# timm -------------------------------------------------------------------------------------------

INCREASING = ("posterize", "solarize", "color", "contrast", "brightness", "sharpness")


def timm_name(operation: str, increasing: bool) -> str:
    name = operation.title().replace("_", "")
    return name + "Increasing" if increasing and operation in INCREASING else name


@pytest.mark.parametrize("increasing", [False, True])
def test_timm_flavour_has_the_operations_of_timm(increasing: bool) -> None:
    source = timm_source.rand_augment_transform(f"rand-m9-inc{int(increasing)}")
    ours = [timm_name(operation, increasing) for operation in TIMM_OPERATIONS]
    assert ours == [operation.name for operation in source.ops]


@pytest.mark.parametrize("operation", TIMM_OPERATIONS)
@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("magnitude", [0, 2.5, 7, 9.3, 10])
@pytest.mark.parametrize("sign", [1, -1])
def test_timm_operation_equals_timm(
    image: Image.Image,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    increasing: bool,
    magnitude: float,
    sign: int,
) -> None:
    monkeypatch.setattr(timm_source.random, "random", lambda: 0.1 if sign == 1 else 0.9)
    settings = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
    name = timm_name(operation, increasing)
    expected = timm_source.AugmentOp(name, prob=1.0, magnitude=magnitude, hparams=settings)(image)
    result = timm_operation(
        image,
        operation,
        magnitude / 10,
        sign,
        increasing,
        Image.Resampling.BICUBIC,
        FILL,  # type: ignore[arg-type]
    )
    assert np.array_equal(np.asarray(result), np.asarray(expected))


@pytest.mark.parametrize(
    "text",
    ["rand-m9-mstd0.5-inc1", "rand-m7-n3-p0.7", "rand", "rand-m15-mmax20-mstd101", "rand-mstd1"],
)
def test_timm_string_means_the_same_as_in_timm(text: str) -> None:
    ours = parse_policy(f"timm:{text}")
    theirs = timm_source.rand_augment_transform(text)
    assert isinstance(ours, RandAugment)
    assert ours.layers == theirs.num_layers
    for operation in theirs.ops:
        assert ours.magnitude == operation.magnitude
        assert ours.probability == operation.prob
        assert ours.magnitude_std == operation.magnitude_std
        assert ours.magnitude_max == (operation.magnitude_max or 10)


def test_timm_flavour_draws_operations_magnitudes_and_signs_like_timm(
    image: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, float, int]] = []

    def record(
        image: Image.Image, name: str, strength: float, sign: int, *_: object
    ) -> Image.Image:
        calls.append((name, strength, sign))
        return image

    monkeypatch.setattr(policies, "timm_operation", record)
    settings = parse_policy("timm:rand-m9-mstd0.5-inc1")
    assert isinstance(settings, RandAugment)
    random = np.random.default_rng(0)
    for _ in range(6000):
        timm_rand_augment(image, settings, MEAN, None, random)
    assert len(calls) == pytest.approx(6000, rel=0.04)  # two draws, half of them applied
    names, strengths, signs = zip(*calls, strict=True)
    counts = [names.count(name) for name in TIMM_OPERATIONS]
    assert min(counts) > 0.8 * len(calls) / 15
    assert max(counts) < 1.2 * len(calls) / 15
    assert np.mean(signs) == pytest.approx(0, abs=0.05)
    # Normal around 9 with a deviation of 0.5, cut off at 10: P(m ≥ 10) = 1 − Φ(2).
    assert np.median(strengths) == pytest.approx(0.9, abs=0.005)
    assert np.mean(np.array(strengths) == 1.0) == pytest.approx(0.0228, abs=0.008)


# torchvision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "source"),
    [
        ("torchvision:rand-m9-n2", v2.RandAugment(num_ops=2, magnitude=9)),
        ("torchvision:rand-m15-n3", v2.RandAugment(num_ops=3, magnitude=15)),
        ("auto_augment", v2.AutoAugment()),
        ("trivial_augment", v2.TrivialAugmentWide()),
        ("augmix", v2.AugMix()),
    ],
)
def test_torchvision_policy_equals_torchvision(
    image: Image.Image, policy: str, source: v2.Transform
) -> None:
    for seed in range(30):
        result = apply_policy(image, policy, MEAN, "bicubic", np.random.default_rng(seed))
        torch.manual_seed(int(np.random.default_rng(seed).integers(1 << 62)))
        assert np.array_equal(np.asarray(result), np.asarray(source(image)))


# big_vision -------------------------------------------------------------------------------------
# Expected values follow the definitions in big_vision/pp/autoaugment.py.


def nearest(pixels: np.ndarray, matrix: tuple[float, ...]) -> np.ndarray:
    """Output (x, y) from input (a x + b y + c, d x + e y + f), rounded; 128 outside."""
    a, b, c, d, e, f = matrix
    height, width = pixels.shape[:2]
    y, x = np.mgrid[:height, :width]
    source_x = np.rint(a * x + b * y + c).astype(int)
    source_y = np.rint(d * x + e * y + f).astype(int)
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    result = np.full_like(pixels, 128)
    result[inside] = pixels[source_y[inside], source_x[inside]]
    return result


def blended(flat: np.ndarray | int, pixels: np.ndarray, factor: float) -> np.ndarray:
    return np.clip(flat + factor * (pixels.astype(float) - flat), 0, 255).astype(int)


@pytest.mark.parametrize("magnitude", [3, 7, 10, 15])
@pytest.mark.parametrize("sign", [1, -1])
def test_big_vision_geometric_operations_equal_their_definition(
    image: Image.Image, magnitude: int, sign: int
) -> None:
    pixels, level = np.asarray(image), sign * magnitude / 10
    angle = math.radians(30 * level)
    cos, sin, x, y = math.cos(angle), math.sin(angle), (48 - 1) / 2, (40 - 1) / 2
    matrices = {
        "shear_x": (1, 0.3 * level, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.3 * level, 1, 0),
        "translate_x": (1, 0, 100 * level, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, 100 * level),
        "rotate": (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y),
    }
    for operation, matrix in matrices.items():
        result = np.asarray(big_vision_operation(image, operation, magnitude / 10, sign))  # type: ignore[arg-type]
        a, b, c, d, e, f = matrix
        # Halves may be rounded either way.
        allowed = [nearest(pixels, (a, b, c + gap, d, e, f + gap)) for gap in (-1e-3, 1e-3)]
        equal = [(result == values).all(axis=2) for values in allowed]
        assert (equal[0] | equal[1]).mean() > 0.995, operation


@pytest.mark.parametrize("magnitude", [3, 7, 10, 15, 30])
def test_big_vision_value_operations_equal_their_definition(
    image: Image.Image, magnitude: int
) -> None:
    pixels = np.asarray(image).astype(int)
    factor = magnitude / 10 * 1.8 + 0.1
    bits = min(8, int(magnitude / 10 * 4))
    grey = np.asarray(image.convert("L")).astype(int)[:, :, None]
    brighter = np.clip(pixels + int(magnitude / 10 * 110), 0, 255)
    expected = {
        "posterize": pixels >> (8 - bits) << (8 - bits),
        "solarize": np.where(pixels < int(magnitude / 10 * 256), pixels, 255 - pixels),
        "solarize_add": np.where(pixels < 128, brighter, pixels),
        "contrast": blended(int(48 * 40 / 256), pixels, factor),
        "brightness": blended(0, pixels, factor),
        "color": blended(grey, pixels, factor),
        "invert": 255 - pixels,
    }
    for operation, values in expected.items():
        result = np.asarray(big_vision_operation(image, operation, magnitude / 10, 1)).astype(int)
        assert np.abs(result - values).max() <= 1, operation


def test_big_vision_histogram_operations_and_sharpness_equal_their_definition(
    image: Image.Image,
) -> None:
    pixels = np.asarray(image).astype(float)
    low, high = pixels.min(axis=(0, 1)), pixels.max(axis=(0, 1))
    stretched = np.clip((pixels - low) * 255 / (high - low), 0, 255)
    result = np.asarray(big_vision_operation(image, "auto_contrast", 1, 1)).astype(float)
    assert np.abs(result - stretched).max() <= 1.01
    for channel in range(3):
        values = np.asarray(image)[:, :, channel]
        histogram = np.bincount(values.ravel(), minlength=256)
        step = (histogram.sum() - histogram[histogram > 0][-1]) // 255
        table = np.clip(
            (np.concatenate([[0], np.cumsum(histogram)[:-1]]) + step // 2) // step, 0, 255
        )
        equalized = np.asarray(big_vision_operation(image, "equalize", 1, 1))[:, :, channel]
        assert np.array_equal(equalized, table[values])
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    smooth = pixels.copy()
    smooth[1:-1, 1:-1] = sum(
        kernel[i, j] * pixels[i : i + 38, j : j + 46] for i in range(3) for j in range(3)
    )
    sharpened = np.asarray(big_vision_operation(image, "sharpness", 0.5, 1)).astype(float)
    assert np.abs(sharpened - np.clip(smooth + 1.0 * (pixels - smooth), 0, 255)).max() <= 1.01


def test_big_vision_flavour_always_applies_sixteen_operations_equally_often(
    image: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def record(image: Image.Image, name: str, *_: object) -> Image.Image:
        calls.append(name)
        return image

    def record_cutout(image: Image.Image, center: tuple[int, int], half: int) -> Image.Image:
        assert half == 40
        assert 0 <= center[0] < image.height
        assert 0 <= center[1] < image.width
        return record(image, "cutout")

    monkeypatch.setattr(policies, "big_vision_operation", record)
    monkeypatch.setattr(policies, "_cutout", record_cutout)
    random = np.random.default_rng(0)
    for _ in range(4000):
        big_vision_rand_augment(image, RandAugment("big_vision"), random)
    assert len(calls) == 8000
    assert {calls.count(name) > 400 for name in BIG_VISION_OPERATIONS} == {True}
    assert len(BIG_VISION_OPERATIONS) == 16


def test_big_vision_cutout_is_a_grey_square_cut_at_the_edges() -> None:
    white = Image.new("RGB", (100, 90), "white")
    cut = np.asarray(policies._cutout(white, (30, 95), 20))
    expected = np.full((90, 100, 3), 255)
    expected[10:50, 75:] = 128
    assert np.array_equal(cut, expected)


# Others -----------------------------------------------------------------------------------------


def test_three_augment_chooses_one_of_three_equally_often(image: Image.Image) -> None:
    grey = np.asarray(image.convert("L").convert("RGB"))
    pixels = np.asarray(image)
    solarized = np.where(pixels < 128, pixels, 255 - pixels)
    counts = {"grey": 0, "solarized": 0, "blurred": 0}
    for seed in range(600):
        result = np.asarray(three_augment(image, np.random.default_rng(seed)))
        if np.array_equal(result, grey):
            counts["grey"] += 1
        elif np.array_equal(result, solarized):
            counts["solarized"] += 1
        else:
            counts["blurred"] += 1
            assert result.astype(float).std() <= pixels.std()
            assert result.mean() == pytest.approx(pixels.mean(), abs=2)
    assert all(150 < count < 250 for count in counts.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rand-m9", "augmentation policy 'rand-m9'"),
        ("trivial_augmnt", "Did you mean 'trivial_augment'"),
        ("timm:m9", "followed by rand"),
        ("timm:rand-x9", "'x9'"),
        ("timm:rand-m9-m8", "once"),
        ("timm:rand-p1.5", "probability"),
        ("timm:rand-m9.5", "whole number"),
        ("torchvision:rand-m9-mstd0.5", "'mstd0.5'"),
        ("torchvision:rand-m31", "end at 30"),
    ],
)
def test_policy_with_mistake_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_policy(text)
