"""Swin and Swin V2 against timm's and torchvision's, with the same weights, on grids that windows
divide: elsewhere the peers attend to padding (see test_swin_padding.py, test_swin_reference.py).
"""

from typing import Any

import pytest
import timm
import torch
import torchvision
from model_settings import SMALL_SWIN, random_images, small_model
from peers import (
    CLASSES,
    assert_different,
    assert_equal,
    counterpart,
    from_timm,
    from_torchvision_swin,
)
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn
from torchvision.models import swin_transformer as torchvision_swin

from vision.models.layers import Grid, static_bias
from vision.models.swin import Swin, SwinBlock, WindowAttention
from vision.models.swin_v2 import SwinV2Block, WindowAttentionV2
from vision.models.windows import BlockWindows, StageWindows

VERSIONS = ["swin_tiny", "swinv2_tiny"]
slow = pytest.mark.slow
PEER_SIZE = {"swin_tiny": 224, "swinv2_tiny": 256}


@pytest.mark.parametrize("version", ["swin_tiny", pytest.param("swinv2_tiny", marks=slow)])
def test_swin_of_the_papers_size_equals_timm(version: str) -> None:
    size = PEER_SIZE[version]
    name = {"swin_tiny": "swin_tiny_patch4_window7_224", "swinv2_tiny": "swinv2_tiny_window8_256"}
    peer = timm.create_model(name[version], num_classes=CLASSES, drop_path_rate=0)
    ours = counterpart(peer, (size, size), version)
    assert_equal(ours, peer, from_timm, random_images(1, 3, size, size), modes=(True,))


@pytest.mark.parametrize("version", [pytest.param("swin_tiny", marks=slow), "swinv2_tiny"])
def test_swin_of_the_papers_size_equals_torchvision(version: str) -> None:
    size = PEER_SIZE[version]
    build = {"swin_tiny": torchvision.models.swin_t, "swinv2_tiny": torchvision.models.swin_v2_t}
    peer = build[version](num_classes=CLASSES)
    for module in peer.modules():
        if isinstance(module, torchvision.ops.StochasticDepth):
            module.p = 0
    ours = counterpart(peer, (size, size), version, from_torchvision_swin)
    assert_equal(ours, peer, from_torchvision_swin, random_images(1, 3, size, size), modes=(False,))


def timm_swin(version: str, size: Grid, **options: Any) -> Any:
    """A small Swin of timm's."""
    small: dict[str, Any] = {
        "patch_size": 2,
        "embed_dim": 16,
        "depths": (2, 3, 2),
        "num_heads": (2, 2, 4),
        "window_size": 4,
        "num_classes": CLASSES,
        "drop_path_rate": 0,
    }
    family = SwinTransformer if version == "swin_tiny" else SwinTransformerV2
    return family(img_size=size, **(small | options))


def torchvision_small(version: str, window: Grid) -> Any:
    """A small Swin of torchvision's, for images of any size."""
    second = version == "swinv2_tiny"
    block = torchvision_swin.SwinTransformerBlockV2 if second else None
    merging = torchvision_swin.PatchMergingV2 if second else torchvision_swin.PatchMerging
    return torchvision_swin.SwinTransformer(
        patch_size=[2, 2],
        embed_dim=16,
        depths=[2, 3, 2],
        num_heads=[2, 2, 4],
        window_size=list(window),
        stochastic_depth_prob=0,
        num_classes=CLASSES,
        block=block,
        downsample_layer=merging,
    )


CHOICES: dict[str, tuple[Grid, dict[str, Any], dict[str, Any]]] = {
    "square": ((64, 64), {}, {}),
    "rectangle": ((32, 96), {}, {}),
    "last stage of one window": ((32, 32), {}, {}),
    "window larger than the last grids": ((32, 32), {"window_size": 8}, {"window": 8}),
    "window larger than every grid": ((16, 24), {"window_size": 16}, {"window": 16}),
    "odd window": ((24, 48), {"window_size": 3}, {"window": 3}),
    "window of one token": ((16, 16), {"window_size": 1}, {"window": 1}),
    "rectangular window": ((32, 64), {"window_size": (2, 4)}, {"window": [2, 4]}),
    "window of each stage": (
        (64, 64),
        {"window_size": (4, 8, 2)},
        {"window": [[4, 4], [8, 8], [2, 2]]},
    ),
    "rectangular window of each stage": (
        (32, 64),
        {"window_size": ((2, 4), (4, 8), (2, 4))},
        {"window": [[2, 4], [4, 8], [2, 4]]},
    ),
    "even depths": ((32, 32), {"depths": (2, 2, 4)}, {"depths": [2, 2, 4]}),
    "one stage": (
        (24, 32),
        {"depths": (3,), "num_heads": (2,)},
        {"depths": [3], "heads": [2]},
    ),
    "other mlp": ((32, 32), {"mlp_ratio": 2.5}, {"mlp_ratio": 2.5}),
}


# timm's Swin V2 gives NaN at windows of one token, and has one window for all stages.
NOT_V2 = ("window of one token", "window of each stage", "rectangular window of each stage")
PAIRS = [(v, c) for c in CHOICES for v in VERSIONS if v == "swin_tiny" or c not in NOT_V2]


@pytest.mark.parametrize(("version", "choice"), PAIRS)
def test_swin_with_a_choice_that_timm_has_equals_timm(version: str, choice: str) -> None:
    size, theirs, changes = CHOICES[choice]
    peer = timm_swin(version, size, **theirs)
    ours = counterpart(peer, size, version, **(SMALL_SWIN | changes))
    assert_equal(ours, peer, from_timm, random_images(2, 3, *size))


def test_swin_v2_with_a_pretrained_window_equals_timm() -> None:
    peer = timm_swin("swinv2_tiny", (64, 64), pretrained_window_sizes=(6, 6, 3))
    ours = counterpart(peer, (64, 64), "swinv2_tiny", pretrained_window=[6, 6, 3], **SMALL_SWIN)
    assert_equal(ours, peer, from_timm, random_images(2, 3, 64, 64))


@pytest.mark.parametrize(("window", "trained"), [(8, None), (7, None), (16, 12), (12, 6), (3, 8)])
def test_offsets_of_swin_v2_equal_those_of_timm_and_torchvision_to_the_last_bit(
    window: int, trained: int | None
) -> None:
    sizes = [trained] if trained else None
    changes: dict[str, Any] = {"depths": [1], "heads": [2], "window": window, "patch_size": 2}
    ours = small_model("swinv2_tiny", (64, 64), pretrained_window=sizes, **changes)
    _, found = ours.layers[0].blocks[0].attn.relative((window, window))
    peer = timm_swin(
        "swinv2_tiny",
        (64, 64),
        depths=(1,),
        num_heads=(2,),
        window_size=window,
        pretrained_window_sizes=(trained or 0,),
    )
    expected = peer.layers[0].blocks[0].attn.relative_coords_table
    assert torch.equal(found, expected.flatten(0, 2))
    if trained is None:
        peer = torchvision_small("swinv2_tiny", (window, window))
        assert torch.equal(found, peer.features[1][0].attn.relative_coords_table.flatten(0, 2))


def test_swin_v2_with_scales_above_the_clamp_equals_timm() -> None:
    # One block: with scores as large as these, rounding alone takes timm in single precision 3e-2
    # away from timm in double precision over a few blocks.
    peer = timm_swin("swinv2_tiny", (32, 64), depths=(1,), num_heads=(2,))
    changes = SMALL_SWIN | {"depths": [1], "heads": [2]}
    ours = counterpart(peer, (32, 64), "swinv2_tiny", clamped=True, **changes)
    assert_equal(ours, peer, from_timm, random_images(2, 3, 32, 64))


@pytest.mark.parametrize(("version", "size"), [("swin_tiny", (32, 64)), ("swinv2_tiny", (8, 8))])
def test_swin_in_double_precision_equals_timm(version: str, size: Grid) -> None:
    # V2 in stages of one window: timm masks with -100, which scales above the clamp overcome. With
    # shifted windows the slow reference is the measure (test_swin_reference.py).
    peer = timm_swin(version, size, depths=(2, 3), num_heads=(2, 2))
    changes = SMALL_SWIN | {"depths": [2, 3], "heads": [2, 2]}
    ours = counterpart(peer, size, version, clamped=True, **changes)
    images = random_images(2, 3, *size).double()
    assert_equal(ours.double(), peer.double(), from_timm, images, logits=1e-9, gradients=1e-9)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("size", "window"),
    [((32, 32), (4, 4)), ((32, 96), (4, 4)), ((24, 24), (3, 3)), ((32, 64), (2, 4))],
)
def test_swin_equals_torchvision(version: str, size: Grid, window: Grid) -> None:
    peer = torchvision_small(version, window)
    changes = SMALL_SWIN | {"window": list(window)}
    ours = counterpart(peer, size, version, from_torchvision_swin, **changes)
    assert_equal(ours, peer, from_torchvision_swin, random_images(2, 3, *size))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("size", [(64, 64), (32, 96), (16, 16)])
def test_swin_at_another_size_equals_torchvision(version: str, size: Grid) -> None:
    # Torchvision's windows keep their size too. At 16 pixels the last grid is smaller than a
    # window, which torchvision fills with padding that is attended to: nothing to compare there.
    depth = 2 if size == (16, 16) else 3
    changes = SMALL_SWIN | {
        "depths": SMALL_SWIN["depths"][:depth],
        "heads": SMALL_SWIN["heads"][:depth],
    }
    peer = torchvision_small(version, (4, 4))
    if depth == 2:
        peer.features = peer.features[:4]
        peer.norm, peer.head = nn.LayerNorm(32, eps=1e-5), nn.Linear(32, CLASSES)
    ours = counterpart(peer, (32, 32), version, from_torchvision_swin, **changes)
    assert_equal(ours, peer, from_torchvision_swin, random_images(2, 3, *size))


# What the comparisons above would see ----------------------------------------------------------


def _no_residual(block: SwinBlock, x: Tensor, windows: BlockWindows) -> Tensor:
    x = block.attn(block.norm1(x), windows.mask)
    return x + block.mlp(block.norm2(x))


def _no_residual_v2(block: SwinV2Block, x: Tensor, windows: BlockWindows) -> Tensor:
    x = block.norm1(block.attn(x, windows.mask))
    return x + block.norm2(block.mlp(x))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("part", ["mask", "bias", "residual", "shift"])
def test_swin_parity_with_a_part_taken_out_fails(
    version: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = timm_swin(version, (32, 64))
    changes = {"shift": False} if part == "shift" else {}
    ours = counterpart(peer, (32, 64), version, **(SMALL_SWIN | changes))
    match part:
        case "mask":
            unmasked = BlockWindows(None, None)
            monkeypatch.setattr(StageWindows, "of_block", lambda windows, number: unmasked)
        case "bias":
            for family in (WindowAttention, WindowAttentionV2):
                monkeypatch.setattr(family, "bias", lambda self, mask: mask)
        case "residual":
            monkeypatch.setattr(SwinBlock, "forward", _no_residual)
            monkeypatch.setattr(SwinV2Block, "forward", _no_residual_v2)
    images = random_images(2, 3, 32, 64)
    if part != "bias":
        assert_different(ours, peer, from_timm, images)
    with torch.no_grad():  # without the bias some parameters have no gradient to compare
        assert (ours(images) - peer(images)).abs().max() > 1e-2


@pytest.mark.parametrize("version", VERSIONS)
def test_swin_parity_with_a_parameter_set_to_zero_fails(version: str) -> None:
    peer = timm_swin(version, (32, 64))
    ours = counterpart(peer, (32, 64), version, **SMALL_SWIN)
    start = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    images = random_images(2, 3, 32, 64)
    with torch.no_grad():
        expected = peer(images)
        for name, parameter in ours.named_parameters():
            parameter.zero_()
            assert (ours(images) - expected).abs().max() > 1e-4, name
            parameter.copy_(start[name])


@pytest.mark.parametrize("version", VERSIONS)
def test_swin_with_static_biases_equals_timm(version: str) -> None:
    peer = timm_swin(version, (32, 64)).eval()
    ours = counterpart(peer, (32, 64), version, **SMALL_SWIN).eval()
    assert isinstance(ours, Swin)
    images = random_images(2, 3, 32, 64)
    with torch.no_grad(), static_bias(ours):
        assert (ours(images) - peer(images)).abs().max() < 1e-5
