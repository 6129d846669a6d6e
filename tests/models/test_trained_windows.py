"""A trained Swin on images of another size: it keeps its windows, unless another is asked for."""

from typing import Any

import pytest
import torch
from model_settings import SMALL_SWIN, model_config, random_images, small_model

from vision.config import ConfigError
from vision.models.build import build_model
from vision.models.configs import AnySwinConfig, SwinConfig, SwinV2Config
from vision.models.layers import Grid
from vision.models.swin import Swin
from vision.models.windows import change_window, pin_windows, stage_windows

VERSIONS = ["swin_tiny", "swinv2_tiny"]
TRAINED: Grid = (32, 32)
"""Grids of 16, 8 and 4."""
CLIPPED: dict[str, dict[str, Any]] = {
    "last window clipped": {"window": 8},
    "every window clipped": {"window": 20},
    "rectangular window clipped": {"window": [3, 6]},
    "no window clipped": {"window": 4},
    "window of each stage": {"window": [[4, 4], [8, 8], [3, 3]]},
    "padding attended to": {"window": 6, "padding": "attend"},
}


def config_of(version: str, **changes: Any) -> AnySwinConfig:
    config = model_config(version, **(SMALL_SWIN | changes))
    assert isinstance(config, SwinConfig | SwinV2Config)
    return config


def built(config: AnySwinConfig, size: Grid, weights: Swin) -> Swin:
    """A model for images of a size, with the weights of another."""
    model = build_model(config, size, classes=7)
    model.load_state_dict(weights.state_dict(), strict=True)
    assert isinstance(model, Swin)
    return model.eval()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CLIPPED)
@pytest.mark.parametrize(
    "size", [(48, 80), (10, 34), pytest.param((16, 16), marks=pytest.mark.slow)]
)
def test_pinned_windows_give_the_logits_of_the_trained_model(
    version: str, case: str, size: Grid
) -> None:
    trained = small_model(version, TRAINED, **CLIPPED[case]).eval()
    pinned = pin_windows(trained.config, TRAINED, size)
    assert stage_windows(pinned, size) == trained.windows
    with torch.no_grad():
        for shown in (TRAINED, size):
            images = random_images(2, 3, *shown)
            expected = trained(images)  # it keeps its windows and is only shown other images
            assert torch.equal(built(pinned, TRAINED, trained)(images), expected)
            assert torch.equal(built(pinned, size, trained)(images), expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_config_is_unchanged_where_windows_are_the_same(version: str) -> None:
    config = config_of(version)
    assert pin_windows(config, TRAINED, (64, 96)) is config
    listed = config_of(version, window=[[4, 4], [8, 8], [3, 3]])
    assert pin_windows(listed, TRAINED, (16, 16)) is listed


def test_pinned_windows_are_those_of_training() -> None:
    config = config_of("swinv2_tiny", window=8, pretrained_window=[6, 6, 3])
    pinned = pin_windows(config, TRAINED, (64, 64))
    assert pinned.window == ((8, 8), (8, 8), (4, 4))
    assert pinned.pretrained_window == (6, 6, 3)  # type: ignore[union-attr]
    # What is stored of a run comes back as it was.
    values = pinned.model_dump(mode="json")
    assert model_config("swinv2_tiny", **values) == pinned


def test_another_window_of_swin_v2_is_measured_in_the_windows_of_training() -> None:
    config = config_of("swinv2_tiny", window=8)
    changed = change_window(config, 6, TRAINED)
    assert (changed.window, changed.pretrained_window) == (6, (8, 8, 4))  # type: ignore[union-attr]
    # Pretraining's windows stay what they were.
    config = config_of("swinv2_tiny", window=8, pretrained_window=[5, 5, 2])
    changed = change_window(config, [[6, 6], [6, 6], [2, 2]], TRAINED)  # type: ignore[arg-type]
    assert changed.window == ((6, 6), (6, 6), (2, 2))
    assert changed.pretrained_window == (5, 5, 2)  # type: ignore[union-attr]


def test_the_window_of_training_given_again_changes_no_logit() -> None:
    trained = small_model("swinv2_tiny", TRAINED, window=8).eval()
    changed = change_window(trained.config, 8, TRAINED)
    images = random_images(2, 3, *TRAINED)
    with torch.no_grad():
        assert torch.equal(built(changed, TRAINED, trained)(images), trained(images))


def test_first_swin_with_another_window_needs_no_window_of_training() -> None:
    config = config_of("swin_tiny", window=8)
    assert change_window(config, (3, 5), TRAINED) == config_of("swin_tiny", window=[3, 5])


@pytest.mark.parametrize(
    ("window", "message"), [((0, 4), "positive"), (((4, 4), (2, 2)), "one for each stage")]
)
def test_another_window_that_cannot_be_is_refused(window: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change_window(config_of("swin_tiny"), window, TRAINED)


def test_another_window_after_rectangular_ones_of_swin_v2_is_refused() -> None:
    config = config_of("swinv2_tiny", window=8)
    with pytest.raises(ConfigError, match="not square") as error:
        change_window(config, 4, (16, 48))  # trained on grids of 8 × 24, 4 × 12 and 2 × 6
    assert "(2, 6)" in str(error.value)
