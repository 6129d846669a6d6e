"""Baselines of timm and the sizes of images that they take."""

from typing import Any

import pytest
import timm
import torch
from timm.models import register_model

from vision.config import ConfigError, parse
from vision.models.build import build_model
from vision.models.configs import TimmConfig
from vision.models.timm import check_size


def baseline(name: str) -> TimmConfig:
    values = {"kind": "timm", "name": name, "drop_path": None, "checkpoint_activations": False}
    return parse(TimmConfig, {**dict.fromkeys(TimmConfig.model_fields), **values})


@pytest.mark.parametrize(
    ("name", "size", "smaller"),
    [
        ("mvitv2_tiny", 224, 64),
        ("halonet26t", 256, None),
        pytest.param("botnet26t_256", 256, 64, marks=pytest.mark.slow),
        pytest.param("coatnet_0_rw_224", 224, 64, marks=pytest.mark.slow),
        pytest.param("coatnet_pico_rw_224", 224, 64, marks=pytest.mark.slow),
    ],
)
def test_baseline_that_does_not_take_the_size_names_those_that_it_takes(
    name: str, size: int, smaller: int | None
) -> None:
    with pytest.raises(ConfigError, match=f"48 × 48.*data.image_size={size}") as refused:
        build_model(baseline(name), (48, 48), classes=5)
    assert ("takes 64 × 64: data.image_size=64" in str(refused.value)) == (smaller == 64)
    assert ": )" not in str(refused.value)  # an error without a message
    check_size(baseline(name), (size, size), 3, 5)
    if smaller is not None:
        model = build_model(baseline(name), (smaller, smaller), classes=5)
        model(torch.zeros(2, 3, smaller, smaller)).sum().backward()


def test_baseline_that_takes_any_size_runs() -> None:
    model = build_model(baseline("resnet10t"), (48, 48), classes=5)
    assert model(torch.zeros(1, 3, 48, 48)).shape == (1, 5)


def own_resnet(pretrained: bool = False, **options: Any) -> torch.nn.Module:
    """A model that a user registers with timm, without a default configuration."""
    return timm.create_model("resnet10t", pretrained=pretrained, **options)


def test_registered_model_without_a_default_configuration_runs() -> None:
    register_model(own_resnet)
    model = build_model(baseline("own_resnet"), (48, 48), classes=5)
    assert model(torch.zeros(1, 3, 48, 48)).shape == (1, 5)
