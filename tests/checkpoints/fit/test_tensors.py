"""Resized weights against timm's functions, scipy and the properties that a method promises."""

import math

import pytest
import torch
import torch.nn.functional as F
from model_settings import random_images
from scipy.ndimage import zoom
from timm.layers import (
    resample_abs_pos_embed,
    resample_patch_embed,
    resize_rel_pos_bias_table,
    resize_rel_pos_bias_table_simple,
)
from timm.models._manipulate import adapt_input_conv

from vision.checkpoints.fit.tensors import (
    change_channels,
    resize_patches,
    resize_positions,
)
from vision.models.positions.relative import resize_relative

GRIDS = [((14, 14), (24, 24)), ((14, 14), (7, 7)), ((6, 9), (12, 4)), ((4, 4), (4, 7))]


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_positions_resized_by_default_equal_timm(
    old: tuple[int, int], new: tuple[int, int], rows: int
) -> None:
    table = random_images(1, rows + math.prod(old), 12)
    expected = resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=rows)
    found = resize_positions(table, rows, old, new, "bicubic_antialias")
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[:, :rows], table[:, :rows])


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_positions_by_google_equal_its_zoom(old: tuple[int, int], new: tuple[int, int]) -> None:
    table = random_images(1, math.prod(old), 5)
    ratio = (new[0] / old[0], new[1] / old[1], 1)
    expected = torch.from_numpy(zoom(table.view(*old, 5).numpy(), ratio, order=1)).view(1, -1, 5)
    found = resize_positions(table, 0, old, new, "bilinear_corners")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_positions_by_other_projects_follow_their_calls(
    old: tuple[int, int], new: tuple[int, int]
) -> None:
    table = random_images(1, math.prod(old), 5)
    image = table.view(1, *old, 5).permute(0, 3, 1, 2)
    scale = ((new[0] + 0.1) / old[0], (new[1] + 0.1) / old[1])
    calls = {
        "bicubic": F.interpolate(image, new, mode="bicubic", align_corners=False),
        "bicubic_corners": F.interpolate(image, new, mode="bicubic", align_corners=True),
        "dino": F.interpolate(image, scale_factor=scale, mode="bicubic"),
    }
    results = []
    for method, expected in calls.items():
        found = resize_positions(table, 0, old, new, method)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected.permute(0, 2, 3, 1).reshape(1, -1, 5))
        results.append(found)
    assert (results[0] - results[1]).abs().max() > 1e-2
    assert (results[0] - results[2]).abs().max() > 1e-3


@pytest.mark.parametrize(("old", "new"), [(7, 12), (7, 8), (12, 7), (8, 24), (2, 5), (1, 3)])
def test_relative_positions_resized_geometrically_equal_timm(old: int, new: int) -> None:
    table = random_images((2 * old - 1) ** 2, 3)
    shape = ((2 * new - 1) ** 2, 3)
    expected = resize_rel_pos_bias_table(table, (new, new), shape)
    found = resize_relative(table, (old, old), (new, new), "geometric")
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_relative_positions_resized_geometrically_to_a_rectangle_equal_timm() -> None:
    table = random_images(13 * 13, 3)
    expected = resize_rel_pos_bias_table(table, (9, 5), (17 * 9, 3))
    found = resize_relative(table, (7, 7), (9, 5), "geometric")
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_relative_positions_resized_bicubically_equal_the_official_call() -> None:
    table = random_images(13 * 13, 3)
    expected = resize_rel_pos_bias_table_simple(table, (12, 12), (23 * 23, 3))
    found = resize_relative(table, (7, 7), (12, 12), "bicubic")
    torch.testing.assert_close(found, expected)


def test_relative_positions_of_neighbours_stay_in_place_when_resized_geometrically() -> None:
    table = random_images(13 * 13, 1)
    larger = resize_relative(table, (7, 7), (12, 12), "geometric")
    near = table.view(13, 13)[5:8, 5:8]
    torch.testing.assert_close(larger.view(23, 23)[10:13, 10:13], near, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("new", [(8, 8), (32, 32), (14, 14), (12, 20)])
def test_patches_resized_equal_timm(new: tuple[int, int]) -> None:
    weight = random_images(6, 3, 16, 16)
    expected = resample_patch_embed(weight, list(new))
    torch.testing.assert_close(resize_patches(weight, new), expected, atol=2e-4, rtol=1e-3)


def test_larger_patches_give_the_same_token_for_the_enlarged_patch() -> None:
    weight, patch = random_images(6, 3, 8, 8), random_images(1, 3, 8, 8, seed=2)
    larger = F.interpolate(patch, (16, 16), mode="bicubic", antialias=True)
    token = F.conv2d(larger, resize_patches(weight, (16, 16)))
    torch.testing.assert_close(token, F.conv2d(patch, weight), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
def test_channels_changed_equal_timm(channels: int) -> None:
    weight = random_images(6, 3, 4, 4)
    torch.testing.assert_close(
        change_channels(weight, channels), adapt_input_conv(channels, weight)
    )


def test_grey_weights_for_colours_give_the_same_token_for_a_grey_image() -> None:
    weight, grey = random_images(6, 1, 4, 4), random_images(1, 1, 4, 4, seed=2)
    token = F.conv2d(grey.expand(1, 3, 4, 4), change_channels(weight, 3))
    torch.testing.assert_close(token, F.conv2d(grey, weight), atol=1e-5, rtol=1e-5)
