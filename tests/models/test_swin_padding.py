"""Swin with `padding=attend`, on grids that windows do not divide, against torchvision's and
transformers' with the same weights: there padding takes part in attention as zero tokens.
"""

from typing import Any

import pytest
import torch
import torchvision
import transformers
from model_settings import SMALL_SWIN, model_config, random_images, redraw, small_model
from peers import CLASSES, assert_equal, counterpart, from_torchvision_swin
from test_parity_swin import torchvision_small
from torch import Tensor, nn

from vision.checkpoints.layouts.huggingface import huggingface_names as huggingface
from vision.models.build import build_model
from vision.models.layers import Grid, static_bias

VERSIONS = ["swin_tiny", "swinv2_tiny"]
ATTEND: dict[str, Any] = SMALL_SWIN | {"padding": "attend"}


def share(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the deviation of the logits."""
    return ((found - expected).abs().max() / expected.std()).item()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("size", [(36, 44), (30, 30), (26, 34), (32, 56)])
def test_attended_padding_equals_torchvision_in_logits_and_gradients(
    version: str, size: Grid
) -> None:
    peer = torchvision_small(version, (4, 4))
    ours = counterpart(peer, size, version, from_torchvision_swin, **ATTEND)
    assert_equal(ours, peer, from_torchvision_swin, random_images(2, 3, *size))


# Sizes that were not configured; below 32 pixels grids are smaller than the windows, which
# torchvision keeps.
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("size", [(32, 32), (36, 44), (16, 16), (10, 40), (2, 2)])
def test_attended_padding_equals_torchvision_at_any_size_in_both_precisions(
    version: str, size: Grid
) -> None:
    peer = torchvision_small(version, (4, 4)).eval()
    ours = counterpart(peer, (32, 32), version, from_torchvision_swin, **ATTEND).eval()
    images = random_images(2, 3, *size)
    with torch.no_grad():
        assert share(ours(images), peer(images)) < 1e-4
        assert share(ours.double()(images.double()), peer.double()(images.double())) < 1e-9


@pytest.mark.parametrize(
    ("version", "build", "size"),
    [
        ("swin_tiny", torchvision.models.swin_t, 256),
        pytest.param("swinv2_tiny", torchvision.models.swin_v2_t, 224, marks=pytest.mark.slow),
    ],
)
def test_attended_padding_equals_torchvision_at_the_papers_size(
    version: str, build: Any, size: int
) -> None:
    # Windows of 7 on grids of 64, 32, 16 and 8; windows of 8 on grids of 56, 28, 14 and 7.
    peer = build(num_classes=CLASSES).eval()
    windows = [[7, 7] if version == "swin_tiny" else [8, 8]] * 4
    changes = {"padding": "attend", "window": windows}
    ours = counterpart(peer, (size, size), version, from_torchvision_swin, **changes).eval()
    images = random_images(1, 3, size, size)
    with torch.no_grad():
        assert share(ours(images), peer(images)) < 1e-4
        assert share(ours.double()(images.double()), peer.double()(images.double())) < 1e-9


HUGGING_FACE = {
    "swin_tiny": (transformers.SwinForImageClassification, transformers.SwinConfig),
    "swinv2_tiny": (transformers.Swinv2ForImageClassification, transformers.Swinv2Config),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("size", [40, 56])
def test_attended_padding_equals_transformers(version: str, size: int) -> None:
    kind, config = HUGGING_FACE[version]
    values = {"embed_dim": 16, "depths": [2, 3, 2], "num_heads": [2, 2, 4], "window_size": 4}
    peer = kind(config(image_size=size, patch_size=2, num_labels=CLASSES, **values))
    redraw(peer).double().eval()
    ours = build_model(model_config(version, **ATTEND), (size, size), classes=CLASSES)
    ours.load_state_dict(huggingface.to_ours(peer.state_dict()).tensors)
    images = random_images(2, 3, size, size).double()
    with torch.no_grad():
        assert share(ours.double().eval()(images), peer(images).logits) < 1e-9


def pair_of_models(version: str, size: Grid) -> list[nn.Module]:
    """One with masked, one with attended padding; the same weights."""
    return [small_model(version, size, padding=padding).eval() for padding in ("mask", "attend")]


@pytest.mark.parametrize("version", VERSIONS)
def test_padding_makes_a_difference_only_where_there_is_some(version: str) -> None:
    masked, attended = pair_of_models(version, (32, 32))
    with torch.no_grad():
        images = random_images(2, 3, 32, 32)
        assert torch.equal(masked(images), attended(images))
        images = random_images(2, 3, 36, 44)
        assert share(attended(images), masked(images)) > 0.01


@pytest.mark.parametrize("version", VERSIONS)
def test_static_biases_of_attended_padding_change_nothing(version: str) -> None:
    attended = pair_of_models(version, (36, 44))[1]
    images = random_images(2, 3, 36, 44)
    with torch.no_grad():
        expected = attended(images)
        with static_bias(attended):
            assert torch.allclose(attended(images), expected, atol=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_attended_padding_brings_nothing_across_the_edge(version: str) -> None:
    model = small_model(
        version, (40, 40), patch_size=4, depths=[2], heads=[2], width=8, padding="attend"
    )
    images = random_images(1, 3, 40, 40).requires_grad_()
    tokens = model.forward_features(images).view(10, 10, 8) @ random_images(8, seed=3)
    (by_last_row,) = torch.autograd.grad(tokens[9].sum(), images)
    assert by_last_row[:, :, : 4 * 4].eq(0).all()  # its two windows are rows 6 to 9 and 4 to 11
    assert by_last_row[:, :, 4 * 4 :].ne(0).all()
