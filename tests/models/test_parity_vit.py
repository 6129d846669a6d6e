"""ViT against timm's and torchvision's, with the same weights."""

from functools import partial
from typing import Any

import pytest
import timm
import torch
from model_settings import SMALL_VIT, random_images
from peers import (
    CLASSES,
    assert_different,
    assert_equal,
    counterpart,
    from_timm,
    from_torchvision_vit,
)
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models import vision_transformer as torchvision_vit

from vision.models.layers import Grid
from vision.models.vit import Block


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_tiny", (224, 224)),
        pytest.param("vit_small", (96, 128), marks=pytest.mark.slow),
        pytest.param("vit_base", (64, 96), marks=pytest.mark.slow),
        pytest.param("vit_small", (224, 224), marks=pytest.mark.slow),
        pytest.param("vit_base", (224, 224), marks=pytest.mark.slow),
    ],
)
def test_vit_of_a_papers_size_equals_timm(name: str, size: Grid) -> None:
    with torch.device("meta"):
        peer = timm.create_model(f"{name}_patch16_224", img_size=size, num_classes=CLASSES)
    peer.to_empty(device="cpu")
    ours = counterpart(peer, size, name)
    assert_equal(ours, peer, from_timm, random_images(1, 3, *size))


def timm_vit(size: Grid, **options: Any) -> VisionTransformer:
    """A small ViT of timm's."""
    small: dict[str, Any] = {
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 3,
        "num_heads": 3,
        "num_classes": CLASSES,
    }
    return VisionTransformer(img_size=size, **(small | options))


CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "class token": ({}, {}),
    "class token without position": ({"no_embed_class": True}, {"class_token_position": False}),
    "mean, norm after": (
        {"global_pool": "avg"},
        {"pool": "mean", "pool_norm": "after"},
    ),
    "mean, norm before": (
        {"global_pool": "avg", "fc_norm": False},
        {"pool": "mean", "pool_norm": "before"},
    ),
    "class token, norm after": ({"fc_norm": True}, {"pool_norm": "after"}),
    "mean without class token, norm after": (
        {"global_pool": "avg", "class_token": False},
        {"pool": "mean", "pool_norm": "after", "class_token": False},
    ),
    "mean without class token, norm before": (
        {"global_pool": "avg", "class_token": False, "fc_norm": False},
        {"pool": "mean", "pool_norm": "before", "class_token": False},
    ),
    "registers": (
        {"reg_tokens": 4, "no_embed_class": True},
        {"registers": 4, "class_token_position": False},
    ),
    "registers, mean": (
        {"reg_tokens": 2, "no_embed_class": True, "global_pool": "avg", "fc_norm": False},
        {"registers": 2, "class_token_position": False, "pool": "mean"},
    ),
    "registers without class token": (
        {"reg_tokens": 3, "no_embed_class": True, "global_pool": "avg", "class_token": False},
        {"registers": 3, "class_token": False, "pool": "mean", "pool_norm": "after"},
    ),
    "no positions": ({"pos_embed": "none"}, {"positions": "none"}),
    "query and key norms": ({"qk_norm": True}, {"qk_norm": True}),
    "layer scale": ({"init_values": 0.1}, {"layer_scale": 0.1}),
    "everything at once": (
        {"init_values": 0.1, "qk_norm": True, "reg_tokens": 4, "no_embed_class": True},
        {"layer_scale": 0.1, "qk_norm": True, "registers": 4, "class_token_position": False},
    ),
    "other mlp": ({"mlp_ratio": 2.5}, {"mlp_ratio": 2.5}),
    "rectangular patches": ({"patch_size": (4, 16)}, {"patch_size": [4, 16]}),
    "pixels": ({"patch_size": 1, "img_size": (6, 9)}, {"patch_size": 1}),
    "other eps": ({"norm_layer": partial(nn.LayerNorm, eps=0.1)}, {"norm_eps": 0.1}),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_vit_with_a_choice_that_timm_has_equals_timm(choice: str) -> None:
    theirs, changes = CHOICES[choice]
    theirs = dict(theirs)
    size = theirs.pop("img_size", (32, 48))
    peer = timm_vit(size, **theirs)
    ours = counterpart(peer, size, "vit_base", **(SMALL_VIT | changes))
    assert_equal(ours, peer, from_timm, random_images(2, 3, *size))


@pytest.mark.parametrize("channels", [1, 5])
def test_vit_of_other_channels_equals_timm(channels: int) -> None:
    peer = timm_vit((32, 32), in_chans=channels)
    ours = counterpart(peer, (32, 32), "vit_base", channels=channels, **SMALL_VIT)
    assert_equal(ours, peer, from_timm, random_images(2, channels, 32, 32))


def test_vit_with_registers_and_a_class_position_equals_timm_with_that_position_in_the_token() -> (
    None
):
    # timm gives registers a position as soon as the class token has one; ours never have one. The
    # class token's position may as well be part of the token.
    peer = timm_vit((32, 48), reg_tokens=4, no_embed_class=True)

    def translate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = from_timm(tensors)
        row = torch.full_like(found["cls_token"], 0.5)
        found["positions.table"] = torch.cat([row, found["positions.table"]], dim=1)
        return found | {"cls_token": found["cls_token"] - row}

    ours = counterpart(peer, (32, 48), "vit_base", translate, **SMALL_VIT, registers=4)  # type: ignore[arg-type]
    images = random_images(2, 3, 32, 48)
    with torch.no_grad():
        assert (ours(images) - peer(images)).abs().max() < 1e-5


@pytest.mark.parametrize("size", [(64, 64), (16, 24), (24, 80), (30, 45)])
@pytest.mark.parametrize("class_row", [True, False])
def test_vit_at_another_size_resizes_its_table_as_timm_does(size: Grid, class_row: bool) -> None:
    peer = timm_vit(
        (32, 48), dynamic_img_size=True, dynamic_img_pad=True, no_embed_class=not class_row
    )
    ours = counterpart(peer, (32, 48), "vit_base", class_token_position=class_row, **SMALL_VIT)
    assert_equal(ours, peer, from_timm, random_images(2, 3, *size))


ROTARY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "class token": ({}, {}),
    "registers": ({"num_reg_tokens": 3}, {"registers": 3}),
    "query and key norms": ({"qk_norm": True}, {"qk_norm": True}),
    "no layer scale": ({"init_values": None}, {"layer_scale": None}),
    "mean": (
        {"global_pool": "avg", "use_fc_norm": True, "class_token": False},
        {"pool": "mean", "pool_norm": "after", "class_token": False},
    ),
}


@pytest.mark.parametrize("choice", ROTARY)
def test_vit_with_rotary_positions_equals_timms_axial_rope(choice: str) -> None:
    theirs, changes = ROTARY[choice]
    # The arguments of timm's vit_*_patch16_rope_224, in a small size.
    rope: dict[str, Any] = {
        "attn_type": "rope",
        "init_values": 1e-5,
        "global_pool": "token",
        "use_abs_pos_emb": False,
        "use_rot_pos_emb": True,
        "rope_grid_indexing": "xy",
        "rope_temperature": 100.0,
    }
    size: dict[str, Any] = {
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 3,
        "num_heads": 3,
        "num_classes": CLASSES,
    }
    peer = Eva(img_size=(32, 48), dynamic_img_size=True, **(rope | size | theirs))
    changes = SMALL_VIT | {"positions": "rotary", "layer_scale": 1e-5} | changes
    ours = counterpart(peer, (32, 48), "vit_base", **changes)
    assert_equal(ours, peer, from_timm, random_images(2, 3, 32, 48))
    assert_equal(ours, peer, from_timm, random_images(2, 3, 56, 24))


def test_vit_small_with_rotary_positions_equals_timms_rope_model() -> None:
    peer = timm.create_model("vit_small_patch16_rope_224", img_size=96, num_classes=CLASSES)
    ours = counterpart(peer, (96, 96), "vit_small", positions="rotary", layer_scale=1e-5)
    assert_equal(ours, peer, from_timm, random_images(1, 3, 96, 96))


def torchvision_small(size: int) -> Any:
    """A small ViT of torchvision's. It has square images and the class token only."""
    return torchvision_vit.VisionTransformer(
        image_size=size,
        patch_size=8,
        num_layers=3,
        num_heads=3,
        hidden_dim=48,
        mlp_dim=192,
        num_classes=CLASSES,
    )


@pytest.mark.parametrize("size", [8, 40])
def test_vit_equals_torchvision(size: int) -> None:
    peer = torchvision_small(size)
    ours = counterpart(peer, (size, size), "vit_base", from_torchvision_vit, **SMALL_VIT)
    assert_equal(ours, peer, from_torchvision_vit, random_images(2, 3, size, size))


# What the comparisons above would see ----------------------------------------------------------


def _no_residual(block: Block, x: Tensor, grid: Grid, *places: Any) -> Tensor:
    x = block.ls1(block.attn(block.norm1(x), *places))
    return x + block.ls2(block.mlp(block.norm2(x)))


def test_vit_parity_without_a_residual_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = timm_vit((32, 48))
    ours = counterpart(peer, (32, 48), "vit_base", **SMALL_VIT)
    monkeypatch.setattr(Block, "forward", _no_residual)
    assert_different(ours, peer, from_timm, random_images(2, 3, 32, 48))


@pytest.mark.parametrize(
    "part",
    ["cls_token", "positions.table", "blocks.1.norm2.bias", "blocks.2.attn.qkv.bias", "norm.bias"],
)
def test_vit_parity_with_a_parameter_set_to_zero_fails(part: str) -> None:
    peer = timm_vit((32, 48))
    ours = counterpart(peer, (32, 48), "vit_base", **SMALL_VIT)
    with torch.no_grad():
        ours.get_parameter(part).zero_()
    assert_different(ours, peer, from_timm, random_images(2, 3, 32, 48))
