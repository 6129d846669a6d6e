"""Test-time augmentation against torchvision's crops, and the mean of probabilities."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from vision.config import ConfigError
from vision.data.images.decode import open_image
from vision.data.preprocess import Preprocess, evaluation_pixels
from vision.evaluation.evaluate import average, preprocess_for_views, views

NUMBER_OF_VIEWS = {"none": 1, "flip": 2, "five_crop": 5, "ten_crop": 10}


def preprocess(size: tuple[int, int] = (28, 28), ratio: float = 0.875) -> Preprocess:
    return Preprocess(size, 3, (0.5,) * 3, (0.5,) * 3, "bilinear", ratio, {})


@pytest.mark.parametrize("augmentation", NUMBER_OF_VIEWS)
def test_number_of_views_is_the_stated_one_and_the_usual_view_comes_first(
    augmentation: str,
) -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    opened = open_image(image, 3, "image")
    loaded = evaluation_pixels(opened, preprocess_for_views(preprocess(), augmentation))  # type: ignore[arg-type]
    images = torch.from_numpy(loaded.copy()).permute(2, 0, 1)[None]
    found = views(images, (28, 28), augmentation)  # type: ignore[arg-type]
    assert len(found) == NUMBER_OF_VIEWS[augmentation]
    assert all(view.shape == (1, 3, 28, 28) for view in found)
    usual = evaluation_pixels(opened, preprocess())
    assert np.array_equal(found[0][0].permute(1, 2, 0).numpy(), usual)


def test_crops_are_torchvisions() -> None:
    images = torch.randn(2, 3, 33, 40)
    corners = v2.FiveCrop((28, 30))(images)
    expected = {view.numpy().tobytes() for view in corners}
    assert {v.numpy().tobytes() for v in views(images, (28, 30), "five_crop")} == expected
    ten = {view.numpy().tobytes() for view in v2.TenCrop((28, 30))(images)}
    assert {v.numpy().tobytes() for v in views(images, (28, 30), "ten_crop")} == ten
    assert len(ten) == 10


def test_flip_adds_the_mirror_image() -> None:
    images = torch.randn(2, 3, 8, 8)
    plain, mirrored = views(images, (8, 8), "flip")
    assert torch.equal(plain, images)
    assert torch.equal(mirrored, v2.functional.horizontal_flip(images))


def test_average_has_the_mean_of_the_probabilities() -> None:
    logits = [torch.randn(5, 7) for _ in range(3)]
    expected = torch.stack([view.softmax(1) for view in logits]).mean(0)
    assert torch.allclose(average(logits, "softmax").softmax(1), expected, atol=1e-6)
    assert torch.equal(average(logits[:1], "softmax"), logits[0])


def test_crops_without_anything_around_the_middle_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"five_crop: .*preprocess\.crop_ratio=0\.875"):
        preprocess_for_views(preprocess(ratio=1.0), "five_crop")
    assert preprocess_for_views(preprocess(ratio=1.0), "flip") == preprocess(ratio=1.0)
