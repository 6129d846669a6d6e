"""Weights into a given model: what is fitted, what is refused, what the report says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_settings import random_images, redraw, small_model
from timm.models.swin_transformer import SwinTransformer, checkpoint_filter_fn
from timm.models.vision_transformer import VisionTransformer

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.open import load_weights, open_model
from vision.config import ConfigError

SMALL: dict[str, Any] = {"embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}


def timm_vit(path: Path, **options: Any) -> Any:
    """A ViT of timm's, stored under `path`."""
    model = VisionTransformer(**({"img_size": 32, "patch_size": 8} | SMALL | options))
    peer = redraw(model).eval()
    torch.save(peer.state_dict(), path)
    return peer


def assert_same(model: Any, peer: Any, size: tuple[int, int]) -> None:
    with torch.no_grad():
        images = random_images(2, 3, *size)
        torch.testing.assert_close(model.eval()(images), peer(images), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("size", [(64, 64), (24, 40)])
def test_weights_for_another_image_size_equal_what_timm_makes_of_them(
    size: tuple[int, int], tmp_path: Path
) -> None:
    peer = timm_vit(tmp_path / "weights.pth", dynamic_img_size=True)
    model = small_model("vit_base", size)
    report = load_weights(model, tmp_path / "weights.pth")
    assert_same(model, peer, size)
    assert "4 × 4 →" in report.resized["positions.table"]


def test_class_position_is_folded_into_the_token_of_a_model_without_one(tmp_path: Path) -> None:
    peer = timm_vit(tmp_path / "weights.pth")
    model = small_model("vit_base", (32, 32), class_token_position=False)
    report = load_weights(model, tmp_path / "weights.pth")
    assert_same(model, peer, (32, 32))
    assert report.resized["positions.table"] == "rows for tokens: cls_token → none"


def test_model_with_a_class_position_takes_weights_without_one(tmp_path: Path) -> None:
    peer = timm_vit(tmp_path / "weights.pth", no_embed_class=True)
    model = small_model("vit_base", (32, 32))
    load_weights(model, tmp_path / "weights.pth")
    assert_same(model, peer, (32, 32))


def test_rectangular_table_is_read_once_its_size_is_given(tmp_path: Path) -> None:
    peer = timm_vit(tmp_path / "weights.pth", img_size=(16, 48))
    with pytest.raises(ConfigError, match="trained_size"):
        open_model(tmp_path / "weights.pth", heads=3)
    opened = open_model(tmp_path / "weights.pth", heads=3, trained_size=(16, 48))
    assert opened.image_size == (16, 48)
    assert_same(opened.model, peer, (16, 48))
    same = small_model("vit_base", (16, 48))
    load_weights(same, tmp_path / "weights.pth")  # the model's own grid fits exactly
    assert_same(same, peer, (16, 48))


def test_other_classes_get_the_models_own_new_head(tmp_path: Path) -> None:
    timm_vit(tmp_path / "weights.pth")
    model = small_model("vit_base", (32, 32), classes=5)
    before = model.head.weight.clone()
    report = load_weights(model, tmp_path / "weights.pth")
    assert torch.equal(model.head.weight, before)
    assert set(report.new) == {"head.weight", "head.bias"}
    assert "7 × 48, not 5 × 48" in report.new["head.weight"]
    with pytest.raises(CheckpointError, match="7 × 48, not 5 × 48"):
        load_weights(model, tmp_path / "weights.pth", new_head="never")
    model = small_model("vit_base", (32, 32))
    before = model.head.weight.clone()
    load_weights(model, tmp_path / "weights.pth", new_head="always")
    assert torch.equal(model.head.weight, before)


@pytest.mark.parametrize("channels", [1, 4])
def test_other_channels_and_patches_are_fitted_and_reported(channels: int, tmp_path: Path) -> None:
    timm_vit(tmp_path / "weights.pth")
    model = small_model("vit_base", (32, 32), channels=channels, patch_size=4)
    report = load_weights(model, tmp_path / "weights.pth")
    note = report.resized["patch_embed.proj.weight"]
    assert "8 × 8 → 4 × 4" in note and f"3 → {channels} channels" in note
    assert report.resized["positions.table"].startswith("4 × 4 → 8 × 8 cells")


def test_swin_with_another_window_equals_timm(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "patch_size": 2,
        "embed_dim": 16,
        "depths": (2, 3, 2),
        "num_heads": (2, 2, 4),
        "num_classes": 7,
    }
    source = redraw(SwinTransformer(img_size=32, window_size=4, **options))
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    peer = SwinTransformer(img_size=96, window_size=6, **options).eval()
    peer.load_state_dict(checkpoint_filter_fn(source.state_dict(), peer))
    model = small_model("swin_tiny", (96, 96), window=6)
    report = load_weights(model, tmp_path / "weights.pth")
    assert_same(model, peer, (96, 96))
    assert "geometric" in report.resized["layers.0.blocks.0.attn.relative_position_bias_table"]


def test_swin_v2_on_smaller_images_keeps_the_windows_of_its_training(tmp_path: Path) -> None:
    model = small_model("swinv2_tiny", (32, 32), window=8)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    smaller = open_model(tmp_path / "weights.pth", window=8, image_size=16, trained_size=32)
    assert smaller.model.windows == model.windows  # type: ignore[union-attr]
    images = random_images(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(smaller.model(images), model.eval()(images))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"blocks.0.norm1.weihgt": torch.ones(48)}, "did it mean 'blocks.0.norm1.weight'"),
    "missing": ({"blocks.1.mlp.fc2.bias": None}, "'blocks.1.mlp.fc2.bias'"),
    "too much": ({"surplus": torch.ones(3)}, "'surplus'"),
    "other shape": ({"norm.weight": torch.ones(40)}, r"\(40,\), the model's is \(48,\)"),
    "not a number": ({"norm.bias": torch.full((48,), torch.nan)}, "NaN or infinity.*norm.bias"),
    "infinite": ({"norm.bias": torch.full((48,), torch.inf)}, "NaN or infinity.*norm.bias"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_weights_that_do_not_fit_are_refused_and_the_model_is_untouched(
    mistake: str, tmp_path: Path
) -> None:
    changes, message = MISTAKES[mistake]
    tensors = timm_vit(tmp_path / "good.pth").state_dict() | changes
    if mistake == "misspelt":
        del tensors["blocks.0.norm1.weight"]
    torch.save({n: t for n, t in tensors.items() if t is not None}, tmp_path / "weights.pth")
    model = small_model("vit_base", (32, 32))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as error:
        load_weights(model, tmp_path / "weights.pth")
    assert str(tmp_path / "weights.pth") in str(error.value)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    "changes", [{"depth": 4}, {"width": 64, "heads": 4}, {"layer_scale": 0.1}, {"qk_norm": True}]
)
def test_weights_of_another_model_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    timm_vit(tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="do not fit the model"):
        load_weights(small_model("vit_base", (32, 32), **changes), tmp_path / "weights.pth")


def test_parameters_stay_the_same_objects_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    timm_vit(tmp_path / "weights.pth")
    stored = (tmp_path / "weights.pth").read_bytes()
    model = small_model("vit_base", (32, 32))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    load_weights(model, tmp_path / "weights.pth")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    before = model.norm.weight.detach().clone()
    model(random_images(2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.norm.weight, before)
    assert (tmp_path / "weights.pth").read_bytes() == stored


def test_tensors_in_memory_are_copied() -> None:
    source = small_model("vit_base", (32, 32))
    tensors = source.state_dict()
    model = small_model("vit_base", (32, 32))
    load_weights(model, tensors)
    with torch.no_grad():
        model.norm.weight.zero_()
    assert source.norm.weight.abs().sum() > 0


def test_half_precision_weights_become_the_models_type(tmp_path: Path) -> None:
    peer = timm_vit(tmp_path / "weights.pth").half()
    torch.save(peer.state_dict(), tmp_path / "weights.pth")
    model = open_model(tmp_path / "weights.pth", heads=3).model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.norm.weight, peer.norm.weight.float())


def test_settings_of_the_weights_that_the_model_does_not_share_are_warned_of(
    tmp_path: Path,
) -> None:
    timm_vit(tmp_path / "weights.pth", global_pool="avg")
    report = load_weights(small_model("vit_base", (32, 32)), tmp_path / "weights.pth")
    assert any("pool=mean" in line for line in report.warnings)
    timm_vit(tmp_path / "weights.pth")
    model = small_model("vit_base", (32, 32), class_token=False, pool="mean")
    report = load_weights(model, tmp_path / "weights.pth")
    assert "cls_token" in report.ignored
    assert any("cls_token" in line for line in report.warnings)
