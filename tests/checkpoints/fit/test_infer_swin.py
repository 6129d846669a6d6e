"""Windows, image size and padding of a Swin, by what its file stores; what contradicts that."""

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from model_settings import random_images, redraw
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn
from torchvision.models import swin_transformer as torchvision_swin

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.open import open_model
from vision.config import ConfigError
from vision.models.configs import SwinConfig, SwinV2Config

SMALL: dict[str, Any] = {
    "patch_size": 2,
    "embed_dim": 16,
    "depths": (2, 3, 2),
    "num_heads": (2, 2, 4),
    "window_size": 4,
    "num_classes": 11,
}


def swin(size: Any, second: bool = False, **options: Any) -> Any:
    family = SwinTransformerV2 if second else SwinTransformer
    return redraw(family(img_size=size, **(SMALL | options))).eval()


def official(peer: Any) -> dict[str, Tensor]:
    """The names of the official code and of timm until 0.6, with the buffers that those store."""

    def stage(match: re.Match[str]) -> str:
        return f"layers.{int(match[1]) - 1}.downsample"

    tensors = {
        re.sub(r"layers\.(\d+)\.downsample", stage, name).replace("head.fc.", "head."): tensor
        for name, tensor in peer.state_dict().items()
    }
    for s, layer in enumerate(peer.layers):
        for b, block in enumerate(layer.blocks):
            place = f"layers.{s}.blocks.{b}"
            tensors[f"{place}.attn.relative_position_index"] = block.attn.relative_position_index
            if block.attn_mask is not None:
                tensors[f"{place}.attn_mask"] = block.attn_mask
            if hasattr(block.attn, "relative_coords_table"):
                table = block.attn.relative_coords_table
                tensors[f"{place}.attn.relative_coords_table"] = table
    return tensors


def assert_opens(source: Any, peer: nn.Module, size: tuple[int, int], **given: Any) -> Any:
    """The same logits in double precision; returns the config."""
    opened = open_model(source, **given)
    assert opened.image_size == size and not opened.report.resized
    images = random_images(1, 3, *size).double()
    with torch.no_grad():
        expected = peer.double()(images)
        apart = (opened.model.double()(images) - expected).abs().max() / expected.std()
    peer.float()
    assert apart < 1e-9
    return opened.config


# Windows of each stage ----------------------------------------------------------------------------


def test_windows_that_differ_from_stage_to_stage_are_inferred_and_give_timms_logits() -> None:
    peer = redraw(timm.create_model("swin_s3_tiny_224", num_classes=11)).eval()
    config = assert_opens(peer.state_dict(), peer, (224, 224))
    assert config.window == ((7, 7), (7, 7), (14, 14), (7, 7))


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("swin_s3_base_224", ((7, 7), (7, 7), (14, 14), (7, 7))),
        ("swin_s3_small_224", 14),  # 14, 14, 14 and, clipped to its grid, 7
        ("swin_tiny_patch4_window7_224", 7),
        ("swin_base_patch4_window12_384", 12),
    ],
)
def test_windows_that_agree_up_to_clipping_are_one_number(name: str, window: Any) -> None:
    with torch.device("meta"):
        tensors = timm.create_model(name).state_dict()
    found = open_model(tensors)
    assert isinstance(found.config, SwinConfig) and found.config.window == window
    assert found.image_size == ((384, 384) if "384" in name else (224, 224))


@pytest.mark.parametrize(
    ("size", "window"), [((64, 64), (4, 8, 2)), ((32, 32), 8), ((24, 24), 6), ((64, 64), (2, 4, 8))]
)
def test_windows_of_any_stages_give_timms_logits(size: tuple[int, int], window: Any) -> None:
    peer = swin(size, window_size=window)
    assert_opens(peer.state_dict(), peer, size, trained_size=size)


# The image size by the stored mask ----------------------------------------------------------------


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("size", [(64, 64), (32, 64), (96, 32), (16, 48)])
def test_stored_masks_tell_the_image_size(size: tuple[int, int], second: bool) -> None:
    peer = swin(size, second, depths=(2, 2), num_heads=(2, 2))
    config = assert_opens(official(peer), peer, size)
    assert config.window == 4


def named(tensors: dict[str, Tensor], architecture: str, path: Path) -> Path:
    """A file of timm's training, which names the architecture."""
    torch.save({"arch": architecture, "state_dict": tensors}, path)
    return path


def test_image_size_in_a_name_that_contradicts_the_masks_is_refused(tmp_path: Path) -> None:
    peer = swin((64, 64))
    path = named(official(peer), "swin_tiny_patch2_window4_32", tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"32 × 32") as error:
        open_model(path)
    assert "8 × 8 windows" in str(error.value) and "trained_size=[64,64]" in str(error.value)
    assert_opens(path, peer, (64, 64), trained_size=64)


@pytest.mark.parametrize("size", [(32, 32), (32, 128), (128, 32), (60, 72)])
def test_given_image_size_that_contradicts_the_masks_is_refused(size: tuple[int, int]) -> None:
    tensors = official(swin((64, 64)))
    with pytest.raises(CheckpointError, match=r"trained_size=\[64,64\]") as error:
        open_model(tensors, trained_size=size)
    assert f"{size[0]} × {size[1]}" in str(error.value)


def test_image_size_too_small_for_the_tables_is_refused() -> None:
    # timm clips windows to their grids: at 16 pixels the last one would be 2.
    with pytest.raises(CheckpointError, match=r"trained_size=\[32,32\]") as error:
        open_model(swin((32, 32)).state_dict(), trained_size=16)
    assert "49 rows" in str(error.value) and "2 × 2" in str(error.value)


# Windows that contradict tables -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "given", "fits"),
    [
        (4, 8, "window=4"),
        (4, [4, 2], "window=4"),
        (8, 4, "window=8"),
        ((4, 8, 2), 8, "window=[[4, 4], [8, 8], [2, 2]]"),
        (4, [[4, 4], [4, 4], [2, 2]], "window=4"),
    ],
)
def test_given_window_that_contradicts_the_tables_is_refused(
    window: Any, given: Any, fits: str
) -> None:
    peer = swin((64, 64), window_size=window)
    with pytest.raises(CheckpointError, match="rows") as error:
        open_model(peer.state_dict(), window=given, trained_size=64)
    assert f"window={given}" in str(error.value) and fits in str(error.value)


def test_given_windows_that_agree_with_the_tables_are_taken() -> None:
    tensors = swin((32, 32), window_size=8).state_dict()
    assert open_model(tensors, window=8).config.window == 8  # type: ignore[union-attr]
    found = open_model(tensors, window=[[8, 8], [8, 8], [4, 4]], trained_size=32).config
    assert found.window == ((8, 8), (8, 8), (4, 4))  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="per stage"):
        open_model(tensors, window=[8, 8, 4])
    with pytest.raises(CheckpointError, match="3 stages"):
        open_model(tensors, window=[[8, 8], [4, 4]])


def test_window_in_a_name_that_contradicts_the_tables_is_refused(tmp_path: Path) -> None:
    tensors = swin((64, 64)).state_dict()
    path = named(tensors, "swin_tiny_patch2_window8_64", tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="window 8") as error:
        open_model(path)
    assert "49 rows" in str(error.value) and "window=4" in str(error.value)
    assert open_model(path, window=4).config.window == 4  # type: ignore[union-attr]


def test_rectangular_windows_are_taken_once_they_are_given() -> None:
    peer = swin((32, 64), window_size=(2, 4))
    with pytest.raises(ConfigError, match="window=8"):
        open_model(peer.state_dict())
    with pytest.raises(CheckpointError, match="21 rows"):
        open_model(peer.state_dict(), window=[4, 4], trained_size=[32, 64])
    assert_opens(peer.state_dict(), peer, (32, 64), window=[2, 4], trained_size=(32, 64))


@pytest.mark.parametrize("given", [{"window": 8}, {"pretrained_window": [4, 4, 4]}])
def test_windows_that_contradict_the_offsets_of_swin_v2_are_refused(given: dict[str, Any]) -> None:
    peer = swin((64, 64), True, pretrained_window_sizes=(6, 6, 3))
    tensors = official(peer)
    ((name, value),) = given.items()
    with pytest.raises(CheckpointError, match="relative_coords_table") as error:
        open_model(tensors, **given)
    fits = {"window": "window=4", "pretrained_window": "pretrained_window=[6, 6, 3]"}[name]
    assert f"{name}={value}" in str(error.value) and fits in str(error.value)
    found = assert_opens(tensors, peer, (64, 64))
    assert isinstance(found, SwinV2Config) and found.pretrained_window == (6, 6, 3)


def test_mask_alone_tells_the_window_of_swin_v2_that_a_given_one_must_be() -> None:
    tensors = {n: t for n, t in official(swin((64, 64), True)).items() if "coords" not in n}
    with pytest.raises(CheckpointError, match="16 tokens") as error:
        open_model(tensors, window=8)
    assert "window=4" in str(error.value)
    assert open_model(tensors).config.window == 4  # type: ignore[union-attr]


# Padding ------------------------------------------------------------------------------------------


def torchvision_peer(second: bool = False) -> Any:
    parts: dict[str, Any] = {}
    if second:
        parts["block"] = torchvision_swin.SwinTransformerBlockV2
        parts["downsample_layer"] = torchvision_swin.PatchMergingV2
    return redraw(
        torchvision_swin.SwinTransformer(
            [2, 2], 16, [2, 3, 2], [2, 2, 4], [4, 4], num_classes=11, **parts
        )
    ).eval()


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("size", [(36, 44), (16, 16), (8, 20)])
def test_file_of_torchvision_gives_its_logits_at_sizes_that_need_padding(
    size: tuple[int, int], second: bool
) -> None:
    # Grids of 8, 4 and 2 at 16 pixels: torchvision keeps windows of 4 and pads.
    peer = torchvision_peer(second)
    tensors = peer.state_dict()
    config = assert_opens(tensors, peer, size, trained_size=size, padding="attend")
    assert config.padding == "attend"
    masked = open_model(tensors, trained_size=size)
    assert masked.config.padding == "mask"  # type: ignore[union-attr]
    assert any("model.padding=attend" in line for line in masked.notes())


def test_padding_that_timm_does_otherwise_is_told() -> None:
    tensors = swin((64, 64)).state_dict()
    found = open_model(tensors, trained_size=40)  # grids of 20, 10 and 5
    assert found.config.padding == "mask"  # type: ignore[union-attr]
    assert any("padding" in line and "40 × 40" in line for line in found.report.assumed)
    assert not any("padding" in line for line in open_model(tensors).report.assumed)
