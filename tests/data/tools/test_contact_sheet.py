"""The contact sheet shows every image and writes out every target."""

import numpy as np
import pytest
import torch
from augment_settings import preprocess

from vision.data.preprocess import normalizer
from vision.data.tools.contact_sheet import contact_sheet, describe_target

CLASSES = ("cat", "dog", "a bird with a name that is far too long for any sheet")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 200])
def test_sheet_shows_the_pixels_of_every_image(channels: int, size: int) -> None:
    source = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (5, channels, size, size), dtype=torch.uint8, generator=source)
    settings = preprocess(size, channels)
    sheet = contact_sheet(images, torch.tensor([0, 1, 2, 0, 1]), CLASSES, settings, columns=3)
    numbers = normalizer(settings, torch.device("cpu"))(images)
    same = contact_sheet(numbers, torch.tensor([0, 1, 2, 0, 1]), CLASSES, settings, columns=3)
    assert np.array_equal(np.asarray(sheet), np.asarray(same))
    pixels = np.asarray(sheet)
    factor = 20 if size == 8 else 1
    for place, image in enumerate(images):
        row, column = divmod(place, 3)
        top = 8 + row * (size * factor + 42)
        left = 8 + column * (size * factor + 8)
        tile = pixels[top : top + size * factor : factor, left : left + size * factor : factor]
        assert np.array_equal(tile, image.permute(1, 2, 0).expand(-1, -1, 3).numpy())
        caption = pixels[
            top + size * factor : top + size * factor + 34, left : left + size * factor
        ]
        assert (caption < 128).any()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (torch.tensor(1), "dog"),
        (torch.tensor([0.0, 1.0, 0.0]), "dog"),
        (torch.tensor([0.7, 0.3, 0.0]), "cat 0.70 / dog 0.30"),
        (torch.tensor([0.3, 0.7, 0.0]) * 0.9 + 0.1 / 3, "dog 0.66 / cat 0.30"),
        (torch.tensor([0.0, 1.0, 0.0]) * 0.9 + 0.1 / 3, "dog 0.93"),
    ],
)
def test_target_is_written_with_its_shares(target: torch.Tensor, text: str) -> None:
    assert describe_target(target, CLASSES) == text


def test_sheet_without_images_is_refused() -> None:
    with pytest.raises(ValueError, match="0 images"):
        contact_sheet(torch.zeros(0, 3, 8, 8), torch.zeros(0), CLASSES, preprocess(8))
