"""Images of a size that a model was not configured for."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_settings import random_images, small_model
from torch import Tensor

from vision.models.layers import Classifier, Grid
from vision.models.swin import Swin

CONFIGURED: Grid = (32, 48)
SIZES: list[Grid] = [(48, 72), (16, 24), (64, 32), (31, 45), (9, 80), (8, 8), (1, 1)]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit learned": ("vit_base", {}),
    "vit sincos2d": ("vit_base", {"positions": "sincos2d"}),
    "vit fourier": ("vit_base", {"positions": "fourier"}),
    "vit rotary": ("vit_base", {"positions": "rotary", "registers": 2}),
    "vit none": ("vit_base", {"positions": "none"}),
    "swin": ("swin_tiny", {}),
    "swin absolute": ("swin_tiny", {"positions": "absolute"}),
    "swin_v2": ("swinv2_tiny", {}),
    "swin_v2 absolute": ("swinv2_tiny", {"positions": "absolute"}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_model_at_another_size_works_and_gives_back_the_configured_size(family: str) -> None:
    name, changes = FAMILIES[family]
    model = small_model(name, CONFIGURED, **changes)
    images = random_images(2, 3, *CONFIGURED)
    with torch.no_grad():
        before = model(images)
        for size in SIZES:
            logits = model(random_images(2, 3, *size))
            assert logits.shape == (2, 7)
            assert logits.isfinite().all()
        assert torch.equal(model(images), before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("positions", ["sincos2d", "rotary", "none"])
def test_vit_without_a_table_at_another_size_equals_one_built_for_it(
    positions: str, size: Grid
) -> None:
    assert_equal_to_one_built_for(size, "vit_base", positions=positions)


@pytest.mark.parametrize("size", [(48, 72), (64, 32), (62, 90), (33, 49)])
@pytest.mark.parametrize("version", ["swin_tiny", "swinv2_tiny"])
@pytest.mark.parametrize("positions", ["relative", "none"])
def test_swin_with_the_same_windows_at_another_size_equals_one_built_for_it(
    version: str, positions: str, size: Grid
) -> None:
    assert_equal_to_one_built_for(size, version, positions=positions)


def assert_equal_to_one_built_for(size: Grid, name: str, **changes: Any) -> None:
    model = small_model(name, CONFIGURED, **changes)
    built = small_model(name, size, **changes)
    built.load_state_dict(model.state_dict(), strict=True)
    images = random_images(2, 3, *size)
    for training in (True, False):
        expected = built.train(training)(images)
        assert (model.train(training)(images) - expected).abs().max().item() < 1e-6


SMALLER: Grid = (12, 20)
"""Grids of 6 x 10, 3 x 5 and 2 x 3 where windows are 4, 4 and 4 (configured grid: 4 x 6)."""


def test_swin_at_a_size_below_its_windows_equals_one_built_with_the_middle_of_its_tables() -> None:
    model = small_model("swin_tiny", CONFIGURED)
    built = small_model("swin_tiny", SMALLER)
    state = model.state_dict()
    for name, parameter in built.named_parameters():
        if "relative_position_bias_table" in name:
            stage = int(name.split(".")[1])
            state[name] = _middle(state[name], windows(model)[stage], windows(built)[stage])
            assert state[name].shape == parameter.shape
    built.load_state_dict(state, strict=True)
    assert windows(built)[-1] == (2, 3) != windows(model)[-1]
    images = random_images(2, 3, *SMALLER)
    assert (model(images) - built(images)).abs().max().item() < 1e-5


def test_swin_v2_at_a_size_below_its_windows_equals_one_built_with_those_as_pretrained() -> None:
    model = small_model("swinv2_tiny", CONFIGURED)
    built = small_model("swinv2_tiny", SMALLER, pretrained_window=[4, 4, 4])
    built.load_state_dict(model.state_dict(), strict=True)
    assert windows(built)[-1] == (2, 3) != windows(model)[-1]
    images = random_images(2, 3, *SMALLER)
    assert (model(images) - built(images)).abs().max().item() < 1e-5


def windows(model: Classifier) -> list[Grid]:
    assert isinstance(model, Swin)
    return model.windows


def _middle(table: Tensor, large: Grid, small: Grid) -> Tensor:
    """The offsets that a smaller window has, out of a larger one's."""
    square = table.view(2 * large[0] - 1, 2 * large[1] - 1, -1)
    rows = slice(large[0] - small[0], large[0] + small[0] - 1)
    columns = slice(large[1] - small[1], large[1] + small[1] - 1)
    return square[rows, columns].flatten(0, 1)


@pytest.mark.parametrize("version", ["swin_tiny", "swinv2_tiny"])
@pytest.mark.parametrize("size", [(48, 72), (62, 50)])
def test_swin_with_a_table_at_another_size_equals_one_built_with_the_resized_table(
    version: str, size: Grid
) -> None:
    model = small_model(version, CONFIGURED, positions="absolute")
    built = small_model(version, size, positions="absolute")
    state = model.state_dict()
    table = state["absolute_pos_embed"].view(1, 16, 24, 16).permute(0, 3, 1, 2)
    table = F.interpolate(table, size=(size[0] // 2, size[1] // 2), mode="bicubic", antialias=True)
    state["absolute_pos_embed"] = table.permute(0, 2, 3, 1).flatten(1, 2)
    built.load_state_dict(state, strict=True)
    images = random_images(2, 3, *size)
    assert (model(images) - built(images)).abs().max().item() < 1e-5
