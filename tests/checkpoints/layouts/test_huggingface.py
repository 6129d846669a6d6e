"""Models of transformers beyond ViT and Swin, opened here: the same outputs at two image sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from foreign_models import CLASSES, assert_equal_function, drawn
from model_settings import random_images
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.fit.tensors import Fitting, fit_vit
from vision.checkpoints.layouts.huggingface import huggingface_names as huggingface
from vision.checkpoints.open import open_model
from vision.models.build import build_model

SIZE, OTHER = (32, 32), (48, 40)
TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 9,
}
Peer = tuple[Any, Callable[[Any, Tensor], Tensor]]


def pooled(peer: Any, images: Tensor) -> Tensor:
    return peer(images, interpolate_pos_encoding=True).pooler_output


def logits(peer: Any, images: Tensor) -> Tensor:
    return peer(images, interpolate_pos_encoding=True).logits


def clip(**changes: Any) -> Any:
    return transformers.CLIPVisionConfig(**TINY, projection_dim=20, **changes)


def whole_clip(**changes: Any) -> Any:
    return transformers.CLIPConfig(
        vision_config=TINY | {"hidden_act": "gelu"}, text_config=TEXT, projection_dim=20, **changes
    )


def siglip(**changes: Any) -> Any:
    return transformers.SiglipVisionConfig(**TINY, **changes)


def whole_siglip(**changes: Any) -> Any:
    return transformers.SiglipConfig(vision_config=TINY, text_config=TEXT, **changes)


TOWERS: dict[str, Callable[[], Peer]] = {
    "CLIP": lambda: (transformers.CLIPVisionModel(clip()), pooled),
    "CLIP, gelu, other eps": lambda: (
        transformers.CLIPVisionModel(clip(hidden_act="gelu", layer_norm_eps=1e-2)),
        pooled,
    ),
    "CLIP with projection": lambda: (
        transformers.CLIPVisionModelWithProjection(clip()),
        lambda peer, images: peer(images, interpolate_pos_encoding=True).image_embeds,
    ),
    "CLIP with texts": lambda: (
        transformers.CLIPModel(whole_clip()),
        lambda peer, images: (
            peer.get_image_features(images, interpolate_pos_encoding=True).pooler_output
        ),
    ),
    "CLIP classifier": lambda: (
        transformers.CLIPForImageClassification(whole_clip(num_labels=CLASSES)),
        logits,
    ),
    "SigLIP": lambda: (transformers.SiglipVisionModel(siglip()), pooled),
    "SigLIP with texts": lambda: (
        transformers.SiglipModel(whole_siglip()),
        lambda peer, images: (
            peer.get_image_features(images, interpolate_pos_encoding=True).pooler_output
        ),
    ),
    "SigLIP classifier": lambda: (
        transformers.SiglipForImageClassification(whole_siglip(num_labels=CLASSES)),
        logits,
    ),
}


@pytest.mark.parametrize("variant", TOWERS)
def test_tower_of_transformers_computes_the_same(variant: str, tmp_path: Path) -> None:
    peer, reference = TOWERS[variant]()
    drawn(peer).save_pretrained(tmp_path)

    def outputs(images: Tensor) -> Tensor:
        return reference(peer, images)

    report = assert_equal_function(tmp_path, outputs, peer, SIZE, OTHER)
    assert report.layout == "Hugging Face"
    if "texts" in variant:
        assert "text tower" in " ".join(report.ignored.values())
    given: dict[str, Any] = {"heads": 3}
    if "CLIP, gelu" in variant:
        given |= {"activation": "gelu", "norm_eps": 1e-2}
    elif variant in ("CLIP with texts", "CLIP classifier"):
        given |= {"activation": "gelu"}
    report = assert_equal_function(peer.state_dict(), outputs, peer, SIZE, **given)
    if variant == "CLIP":
        assert any("activation=quick_gelu" in line for line in report.assumed)


def test_siglip_2_without_a_fixed_size_is_refused_by_name(tmp_path: Path) -> None:
    small = {name: value for name, value in TINY.items() if name != "image_size"}
    config = transformers.Siglip2VisionConfig(**small, num_patches=16)
    transformers.Siglip2VisionModel(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="NaFlex") as error:
        open_model(tmp_path)
    assert "siglip2-base-patch16-224" in str(error.value)


DINOV3: dict[str, dict[str, Any]] = {
    "registers": {"num_register_tokens": 3},
    "no registers, gated": {"use_gated_mlp": True, "hidden_act": "silu"},
    "bias of keys, other eps": {"key_bias": True, "layer_norm_eps": 1e-2},
    "bias of values alone": {"query_bias": False, "proj_bias": False, "mlp_bias": False},
    "no bias": {"query_bias": False, "value_bias": False},
}


@pytest.mark.parametrize("variant", DINOV3)
def test_dinov3_of_transformers_computes_the_same(variant: str, tmp_path: Path) -> None:
    peer = drawn(
        transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**TINY, **DINOV3[variant]))
    )
    peer.save_pretrained(tmp_path)

    def outputs(images: Tensor) -> Tensor:
        return peer(images).pooler_output

    # transformers multiplies coordinates by 2π in 32 bits even for a model of 64.
    assert_equal_function(tmp_path, outputs, peer, SIZE, OTHER, double=1e-7)
    given: dict[str, Any] = {"heads": 3, "trained_size": 32, "norm_eps": peer.config.layer_norm_eps}
    assert_equal_function(peer.state_dict(), outputs, peer, SIZE, double=1e-7, **given)


def test_dinov3_backbone_computes_the_same(tmp_path: Path) -> None:
    config = transformers.DINOv3ViTConfig(**TINY, num_register_tokens=2, return_class_token=True)
    peer = drawn(transformers.DINOv3ViTBackbone(config))
    peer.save_pretrained(tmp_path)

    def outputs(images: Tensor) -> Tensor:
        return peer(images).cls_tokens[-1]

    assert_equal_function(tmp_path, outputs, peer, SIZE, OTHER, double=1e-7)


BEIT: dict[str, dict[str, Any]] = {
    "bias of each block": {"use_relative_position_bias": True},
    "shared bias": {"use_shared_relative_position_bias": True, "layer_scale_init_value": 0.0},
    "both biases": {
        "use_relative_position_bias": True,
        "use_shared_relative_position_bias": True,
        "hidden_act": "relu",
    },
    "class token, table": {"use_mean_pooling": False, "use_absolute_position_embeddings": True},
    "no positions": {"layer_norm_eps": 1e-2},
}


@pytest.mark.parametrize("kind", ["Beit", "Data2VecVision"])
@pytest.mark.parametrize("variant", BEIT)
def test_beit_of_transformers_computes_the_same(variant: str, kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(**TINY, num_labels=CLASSES, **BEIT[variant])
    peer = drawn(getattr(transformers, f"{kind}ForImageClassification")(config))
    peer.save_pretrained(tmp_path)

    def outputs(images: Tensor) -> Tensor:
        return peer(images).logits

    relative = "bias" in variant
    other = None if relative else OTHER  # transformers stretches the table: see below
    assert_equal_function(tmp_path, outputs, peer, SIZE, other)
    given = {"heads": 3, "norm_eps": config.layer_norm_eps}
    given |= {"activation": "relu"} if variant == "both biases" else {}
    given |= {"trained_size": 32} if variant == "no positions" else {}
    assert_equal_function(peer.state_dict(), outputs, peer, SIZE, **given)
    base = drawn(getattr(transformers, f"{kind}Model")(config, add_pooling_layer=True))
    base.save_pretrained(tmp_path / "base")
    assert_equal_function(tmp_path / "base", lambda x: base(x).pooler_output, base, SIZE)


@pytest.mark.parametrize("kind", ["bias of each block", "shared bias"])
def test_relative_bias_can_be_resized_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """The default, as in timm and BEiT's own code, keeps near offsets in place instead."""
    config = transformers.BeitConfig(**TINY, num_labels=CLASSES, **BEIT[kind])
    peer = drawn(transformers.BeitForImageClassification(config)).double()
    found = open_model(peer.state_dict(), heads=3, norm_eps=1e-12)
    size = (48, 48)
    model: Any = build_model(found.config, size, channels=3, classes=CLASSES).double().eval()
    fitting = Fitting(huggingface.to_ours(peer.state_dict()).tensors)
    fit_vit(model, fitting, (SIZE, None), "bicubic", "bilinear")
    model.load_state_dict(fitting.tensors)
    images = random_images(2, 3, *size).double()
    with torch.no_grad():
        torch.testing.assert_close(model(images), peer(images).logits, atol=1e-9, rtol=1e-9)
    name = "relative.table" if kind == "shared bias" else "blocks.0.relative.table"
    assert fitting.resized[name] == "4 × 4 → 6 × 6 cells, bilinear"
    report = open_model(peer.state_dict(), heads=3, image_size=size).report
    assert report.resized[name] == "4 × 4 → 6 × 6 cells, bilinear"
