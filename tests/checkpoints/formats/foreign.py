"""Models of other libraries with weights that are not trivial, and what opening them gives."""

from pathlib import Path
from typing import Any

import torch
from model_settings import pictures, redraw
from torch import Tensor, nn

from vision.checkpoints.load import open_model
from vision.checkpoints.report import LoadReport

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
    model, inferred, report = open_model(path, **given)
    assert inferred.image_size == size
    images = pictures(2, inferred.channels, *size)
    with torch.no_grad():
        expected = peer(images)
        expected = getattr(expected, "logits", expected)
        found = model(images)
    assert expected.std() > 0.1, "logits that hardly vary show nothing"
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < tolerance * max(1.0, float(expected.abs().max()))
    return report
