"""Files that timm, torchvision and transformers wrote, opened here: the same logits."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from foreign_models import CLASSES, assert_opens, drawn
from safetensors.torch import save_file
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from torchvision.models import swin_transformer as torchvision_swin
from torchvision.models import vision_transformer as torchvision_vit

SMALL: dict[str, Any] = {"embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": CLASSES}
TIMM_VITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "other size": {"embed_dim": 64, "num_heads": 4, "depth": 2, "patch_size": 4, "mlp_ratio": 2.5},
    "mean": {"global_pool": "avg"},
    "mean without class token": {"global_pool": "avg", "class_token": False},
    "no class position": {"no_embed_class": True},
    "registers without positions": {"reg_tokens": 4, "no_embed_class": True},
    "registers with positions": {"reg_tokens": 4},
    "layer scale and norms of queries": {"init_values": 0.1, "qk_norm": True},
    "one channel": {"in_chans": 1},
}


@pytest.mark.parametrize("variant", TIMM_VITS)
def test_vit_of_timm_opens_with_the_same_logits(variant: str, tmp_path: Path) -> None:
    options = SMALL | {"img_size": 32, "patch_size": 8} | TIMM_VITS[variant]
    peer = drawn(VisionTransformer(**options))
    torch.save(peer.state_dict(), tmp_path / "weights.pth")
    # Norms of queries tell the heads; else they must be given, for no published ViT is so small.
    given = {} if options.get("qk_norm") else {"heads": options["num_heads"]}
    if variant == "no class position":  # its table also fits 3 × 5 patches and a class token
        given["trained_size"] = 32
    assert_opens(tmp_path / "weights.pth", peer, (32, 32), **given)


def test_distilled_vit_of_timm_opens_with_the_same_logits(tmp_path: Path) -> None:
    peer = drawn(VisionTransformerDistilled(img_size=32, patch_size=8, **SMALL))
    torch.save({"model": peer.state_dict()}, tmp_path / "weights.pth")
    report = assert_opens(tmp_path / "weights.pth", peer, (32, 32), heads=3)
    assert report.path_taken == ("model",)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit3_small_patch16_224"])
def test_published_vit_of_timm_opens_without_being_told_anything(name: str, tmp_path: Path) -> None:
    peer = drawn(timm.create_model(name, num_classes=CLASSES))
    save_file(peer.state_dict(), tmp_path / "weights.safetensors")
    report = assert_opens(tmp_path / "weights.safetensors", peer, (224, 224), tolerance=2e-5)
    assert any("heads=" in line for line in report.assumed)


SWIN: dict[str, Any] = {"embed_dim": 16, "num_classes": CLASSES, "patch_size": 2}
SWINS: dict[str, dict[str, Any]] = {
    "three stages": {"depths": (2, 3, 2), "num_heads": (2, 2, 4), "window_size": 4},
    "two stages": {"depths": (2, 2), "num_heads": (1, 4), "window_size": 8, "embed_dim": 24},
}


@pytest.mark.parametrize("variant", SWINS)
def test_swin_of_timm_opens_with_the_same_logits(variant: str, tmp_path: Path) -> None:
    peer = drawn(SwinTransformer(img_size=32, **(SWIN | SWINS[variant])))
    torch.save(peer.state_dict(), tmp_path / "weights.pth")
    report = assert_opens(tmp_path / "weights.pth", peer, (32, 32))
    assert report.layout == "timm Swin"


@pytest.mark.parametrize("variant", SWINS)
def test_swin_v2_of_timm_opens_once_its_window_is_given(variant: str, tmp_path: Path) -> None:
    peer = drawn(SwinTransformerV2(img_size=32, **(SWIN | SWINS[variant])))
    torch.save(peer.state_dict(), tmp_path / "weights.pth")
    window = SWINS[variant]["window_size"]
    assert_opens(tmp_path / "weights.pth", peer, (32, 32), window=window)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "given"),
    [
        ("swin_tiny_patch4_window7_224", 224, {}),
        ("swinv2_tiny_window8_256", 256, {"window": 8}),
    ],
)
def test_published_swin_of_timm_opens_with_the_same_logits(
    name: str, size: int, given: dict[str, Any], tmp_path: Path
) -> None:
    peer = drawn(timm.create_model(name, num_classes=CLASSES))
    save_file(peer.state_dict(), tmp_path / "weights.safetensors")
    assert_opens(tmp_path / "weights.safetensors", peer, (size, size), tolerance=5e-5, **given)


@pytest.mark.parametrize(("width", "depth", "patch"), [(48, 3, 8), (64, 2, 16)])
def test_vit_of_torchvision_opens_with_the_same_logits(
    width: int, depth: int, patch: int, tmp_path: Path
) -> None:
    peer = drawn(
        torchvision_vit.VisionTransformer(
            image_size=64,
            patch_size=patch,
            num_layers=depth,
            num_heads=4,
            hidden_dim=width,
            mlp_dim=3 * width,
            num_classes=CLASSES,
        )
    )
    torch.save(peer.state_dict(), tmp_path / "weights.pth")
    report = assert_opens(tmp_path / "weights.pth", peer, (64, 64), heads=4)
    assert report.layout == "torchvision ViT"


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(("width", "depths"), [(16, [2, 2, 2]), (24, [2, 3])])
def test_swin_of_torchvision_opens_with_the_same_logits(
    second: bool, width: int, depths: list[int], tmp_path: Path
) -> None:
    parts = (
        {
            "block": torchvision_swin.SwinTransformerBlockV2,
            "downsample_layer": torchvision_swin.PatchMergingV2,
        }
        if second
        else {}
    )
    peer = drawn(
        torchvision_swin.SwinTransformer(
            patch_size=[2, 2],
            embed_dim=width,
            depths=depths,
            num_heads=[2, 4, 8][: len(depths)],
            window_size=[4, 4],
            num_classes=CLASSES,
            **parts,
        )
    )
    torch.save(peer.state_dict(), tmp_path / "weights.pth")
    size = 2 * 4 * 2 ** (len(depths) - 1)
    report = assert_opens(tmp_path / "weights.pth", peer, (size, size))
    assert report.layout == "torchvision Swin"
    assert "computed here" in " ".join(report.ignored.values())


TINY: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": CLASSES,
}
STAGES: dict[str, Any] = {
    "embed_dim": 16,
    "depths": [2, 2, 2],
    "num_heads": [2, 2, 4],
    "image_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "num_labels": CLASSES,
}
HUGGING_FACE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ViT": (
        transformers.ViTForImageClassification,
        transformers.ViTConfig,
        TINY | {"intermediate_size": 100},
    ),
    "larger ViT": (
        transformers.ViTForImageClassification,
        transformers.ViTConfig,
        TINY | {"hidden_size": 64, "num_attention_heads": 2, "patch_size": 16},
    ),
    "DeiT": (
        transformers.DeiTForImageClassification,
        transformers.DeiTConfig,
        TINY | {"intermediate_size": 100},
    ),
    "DeiT with teacher": (
        transformers.DeiTForImageClassificationWithTeacher,
        transformers.DeiTConfig,
        TINY | {"intermediate_size": 100},
    ),
    "DINOv2": (transformers.Dinov2ForImageClassification, transformers.Dinov2Config, TINY),
    "DINOv2 with registers and gate": (
        transformers.Dinov2WithRegistersForImageClassification,
        transformers.Dinov2WithRegistersConfig,
        TINY | {"use_swiglu_ffn": True},
    ),
    "Swin": (transformers.SwinForImageClassification, transformers.SwinConfig, STAGES),
    "smaller Swin": (
        transformers.SwinForImageClassification,
        transformers.SwinConfig,
        STAGES | {"depths": [2, 1], "num_heads": [2, 4], "image_size": 16},
    ),
    "Swin V2": (transformers.Swinv2ForImageClassification, transformers.Swinv2Config, STAGES),
    "Swin V2 with pretrained windows": (
        transformers.Swinv2ForImageClassification,
        transformers.Swinv2Config,
        STAGES | {"pretrained_window_sizes": [3, 3, 2]},
    ),
}


@pytest.mark.parametrize("variant", HUGGING_FACE)
def test_model_of_hugging_face_opens_from_its_folder(variant: str, tmp_path: Path) -> None:
    kind, config, values = HUGGING_FACE[variant]
    peer = drawn(kind(config(**values)))
    peer.save_pretrained(tmp_path)
    size = values["image_size"]
    report = assert_opens(tmp_path, peer, (size, size), tolerance=2e-5)
    assert report.layout == "Hugging Face"


@pytest.mark.parametrize("variant", HUGGING_FACE)
def test_model_of_hugging_face_opens_from_its_memory(variant: str) -> None:
    kind, config, values = HUGGING_FACE[variant]
    peer = drawn(kind(config(**values)))
    given: dict[str, Any] = {"norm_eps": peer.config.layer_norm_eps}
    if "num_attention_heads" in values:
        given["heads"] = values["num_attention_heads"]
    if "V2" in variant and "DINO" not in variant:
        given["window"] = 4
        given["pretrained_window"] = values.get("pretrained_window_sizes")
    size = values["image_size"]
    assert_opens(peer.state_dict(), peer, (size, size), tolerance=2e-5, **given)
