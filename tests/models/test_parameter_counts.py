"""Exact numbers of parameters, without memory for any of them."""

from typing import Any

import pytest
import timm
import torch
from model_settings import model_config

from vision.models.build import build_model

# Counted on timm 1.0.30, at 1000 classes and at 10.
COUNTS: list[tuple[str, dict[str, Any], int, int, int]] = [
    ("vit_tiny", {}, 224, 5_717_416, 5_526_346),
    ("vit_small", {}, 224, 22_050_664, 21_669_514),
    ("vit_base", {}, 224, 86_567_656, 85_806_346),
    ("vit_base", {"patch_size": 32}, 224, 88_224_232, 87_462_922),
    ("vit_large", {}, 224, 304_326_632, 303_311_882),
    ("vit_huge", {}, 224, 632_045_800, 630_777_610),
    ("swin_tiny", {}, 224, 28_288_354, 27_527_044),
    ("swin_small", {}, 224, 49_606_258, 48_844_948),
    ("swin_base", {}, 224, 87_768_224, 86_753_474),
    ("swin_large", {}, 224, 196_532_476, 195_010_846),
    ("swinv2_tiny", {}, 256, 28_347_154, 27_585_844),
    ("swinv2_tiny", {"window": 16}, 256, 28_347_154, 27_585_844),
    ("swinv2_small", {}, 256, 49_728_418, 48_967_108),
    ("swinv2_base", {}, 256, 87_918_816, 86_904_066),
    ("swinv2_large", {}, 192, 196_739_932, 195_218_302),
]


@pytest.mark.parametrize(("name", "changes", "size", "at_1000", "at_10"), COUNTS)
def test_model_of_a_papers_size_has_exactly_its_parameters(
    name: str, changes: dict[str, Any], size: int, at_1000: int, at_10: int
) -> None:
    config = model_config(name, **changes)
    for classes, expected in ((1000, at_1000), (10, at_10)):
        model = build_model(config, (size, size), classes=classes, device="meta")
        assert all(parameter.is_meta for parameter in model.parameters())
        assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("name", ["resnet50", "mvitv2_tiny"])
def test_timm_model_on_meta_has_as_many_parameters_as_in_memory(name: str) -> None:
    ours = build_model(model_config("timm", name=name), (224, 224), device="meta")
    with torch.device("meta"):
        peer = timm.create_model(name)
    assert all(parameter.is_meta for parameter in ours.parameters())
    shapes = {f"model.{n}": p.shape for n, p in peer.named_parameters()}
    assert {n: p.shape for n, p in ours.named_parameters()} == shapes
