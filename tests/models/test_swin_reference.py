"""Swin on grids that windows do not divide, against the slow reference from the definition."""

from typing import Any

import pytest
import torch
from model_settings import random_images, redraw, small_model
from reference_swin import reference_swin
from torch import Tensor

from vision.models.layers import Classifier, Grid, static_bias
from vision.models.swin import Swin

VERSIONS = ["swin_tiny", "swinv2_tiny"]


def reference(model: Classifier, configured: Grid, images: Tensor) -> tuple[Tensor, Any]:
    """The reference's logits, and the parameters that it computed them from."""
    parameters = {
        name: p.detach().double().requires_grad_() for name, p in model.named_parameters()
    }
    assert isinstance(model, Swin)
    return reference_swin(model.config, configured, parameters, images), parameters


def assert_follows_reference(model: Classifier, configured: Grid, images: Tensor) -> None:
    """Logits within 1e-5 and gradients within 1e-4, training and evaluating."""
    expected, parameters = reference(model, configured, images)
    weighting = random_images(*expected.shape, seed=5)
    (expected * weighting).sum().backward()
    for training in (True, False):
        model.train(training).zero_grad()
        logits = model(images)
        (logits * weighting).sum().backward()
        assert (logits - expected).abs().max().item() < 1e-5
        for name, parameter in model.named_parameters():
            wanted = parameters[name].grad
            apart = (parameter.grad - wanted).norm()
            # Where nothing is attended to but the token itself, gradients are zero up to rounding.
            assert apart.item() < 1e-4 * wanted.norm().item() + 1e-5, name
    with torch.no_grad(), static_bias(model):
        assert (model(images) - expected).abs().max().item() < 1e-5


# Of the tokens, patch 2. Sides that windows of 4 divide, miss by one, by two, by three; odd sides
# of the grids to be merged; grids that padding rounds up to twice the next grid.
GEOMETRIES: dict[str, tuple[Grid, dict[str, Any]]] = {
    "divisible": ((32, 32), {}),
    "padded": ((36, 44), {}),
    "odd grid": ((26, 22), {}),
    "odd grid padded to twice the next": ((30, 30), {}),
    "odd rows only": ((30, 32), {}),
    "odd columns only": ((32, 14), {}),
    "odd pixels": ((33, 27), {}),
    "one token": ((2, 2), {}),
    "one pixel": ((1, 1), {}),
    "one row": ((2, 24), {}),
    "window larger than every grid": ((14, 10), {"window": 16}),
    "window larger than some grids": ((28, 28), {"window": 7}),
    "window larger than the rows": ((10, 40), {"window": 6}),
    "window of one token": ((10, 14), {"window": 1}),
    "window of two": ((14, 22), {"window": 2}),
    "rectangular window": ((26, 34), {"window": [3, 5]}),
    "rectangular window, larger on one axis": ((18, 30), {"window": [12, 4]}),
    "window of each stage": ((36, 44), {"window": [[4, 4], [3, 5], [2, 2]]}),
    "window of each stage, larger than its grid": (
        (18, 14),
        {"window": [[4, 10], [7, 4], [5, 5]]},
    ),
    "32 pixels at patch 4 and window 7": ((32, 32), {"patch_size": 4, "window": 7}),
    "rectangular patches": ((30, 35), {"patch_size": [2, 5]}),
    "no shift": ((30, 26), {"shift": False}),
    "absolute positions": ((30, 26), {"positions": "absolute"}),
    "no positions": ((30, 26), {"positions": "none"}),
    "even depths": ((30, 26), {"depths": [4, 2, 2]}),
    "one block per stage": ((30, 26), {"depths": [1, 1, 1]}),
    "single stage": ((30, 26), {"depths": [2], "heads": [2]}),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_swin_on_any_grid_follows_the_definition(version: str, geometry: str) -> None:
    size, changes = GEOMETRIES[geometry]
    model = small_model(version, size, **changes)
    assert_follows_reference(model, size, random_images(2, 3, *size))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "size", [(32, 32), (48, 48), (16, 16), (30, 30), (10, 46), (5, 3), (62, 30)]
)
def test_swin_at_another_size_follows_the_definition(version: str, size: Grid) -> None:
    model = small_model(version, (32, 48))
    assert_follows_reference(model, (32, 48), random_images(1, 3, *size))


@pytest.mark.parametrize("size", [(48, 48), (22, 30)])
def test_swin_v2_with_a_pretrained_window_follows_the_definition(size: Grid) -> None:
    model = small_model("swinv2_tiny", size, pretrained_window=[6, 5, 2])
    assert_follows_reference(model, size, random_images(1, 3, *size))


def test_swin_v2_with_scales_above_the_clamp_follows_the_definition() -> None:
    # In double precision: rounding grows with scores of this size.
    model = redraw(small_model("swinv2_tiny", (32, 44)), clamped=True).double()
    assert_follows_reference(model, (32, 44), random_images(1, 3, 32, 44).double())


def test_swin_follows_the_definition_at_a_size_of_the_papers() -> None:
    model = small_model(
        "swin_tiny", (60, 100), patch_size=4, window=7, depths=[2, 2, 2, 2], heads=[1, 2, 4, 8]
    )
    assert_follows_reference(model, (60, 100), random_images(1, 3, 60, 100))
