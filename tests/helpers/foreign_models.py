"""Models of other libraries with weights that are not trivial, and what opening them gives."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from model_settings import random_images, redraw
from torch import Tensor, nn

from vision.checkpoints.layouts.recognise import PositionMethod
from vision.checkpoints.load_report import LoadReport
from vision.checkpoints.open import load_weights, open_model
from vision.models.build import build_model

CLASSES = 11


def drawn(model: nn.Module, seed: int = 1) -> Any:
    """The model in evaluation mode, every parameter away from what it started with."""
    return redraw(model, seed).eval()


def assert_opens(
    path: Path | dict[str, Tensor],
    peer: nn.Module,
    size: tuple[int, int],
    *,
    tolerance: float = 1e-5,
    **given: Any,
) -> LoadReport:
    """What is stored there, opened here, gives the peer's logits."""
    opened = open_model(path, **given)
    assert opened.image_size == size
    images = random_images(2, opened.channels, *size)
    with torch.no_grad():
        expected = peer(images)
        expected = getattr(expected, "logits", expected)
        found = opened.model(images)
    assert expected.std() > 0.1, "logits that hardly vary show nothing"
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < tolerance * max(1.0, float(expected.abs().max()))
    return opened.report


def assert_equal_function(
    path: Path | dict[str, Tensor],
    reference: Callable[[Tensor], Tensor],
    peer: nn.Module,
    size: tuple[int, int],
    other: tuple[int, int] | None = None,
    *,
    tensors: Callable[[], Mapping[str, Tensor]] | None = None,
    double: float = 1e-9,
    positions: PositionMethod = "bicubic",
    **given: Any,
) -> LoadReport:
    """What is stored there, opened here, computes what `reference` does with `peer`: in 32 bits to
    1e-4 of the outputs' deviation, in 64 bits to `double` of it, for images of both sizes.

    `tensors` gives the names of the file where they are not the peer's own.
    """
    reports = []
    for image_size in filter(None, (size, other)):
        found = open_model(path, image_size=image_size, resize_positions=positions, **given)
        reports.append(found.report)
        assert found.trained_size == size
        images = random_images(2, found.channels, *image_size)
        _assert_close(found.model, reference, images, 1e-4)
        # A table that is resized is rounded to the type of the parameter, so both are in 64 bits.
        build = {"channels": found.channels, "classes": found.classes}
        exact = build_model(found.config, image_size, **build).double().eval()
        peer.double()
        stored = (tensors or peer.state_dict)()
        load_weights(exact, dict(stored), positions=positions, trained_size=found.trained_size)
        _assert_close(exact, reference, images.double(), double)
        peer.float()
    return reports[0]


def _assert_close(
    model: nn.Module, reference: Callable[[Tensor], Tensor], images: Tensor, tolerance: float
) -> None:
    with torch.no_grad():
        expected, found = reference(images), model(images)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert expected.std() > 0.05, "outputs that hardly vary show nothing"
    deviation = float((found - expected).abs().max() / expected.std())
    assert deviation <= tolerance, (deviation, tuple(images.shape), images.dtype)
