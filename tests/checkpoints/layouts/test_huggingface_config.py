"""config.json of transformers: every field of the installed version is known, every value that
changes a model is followed or refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from foreign_models import CLASSES, assert_equal_function, drawn
from safetensors.torch import load_file, save_file
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts.huggingface.huggingface_config import READ, SHAPES, TOWERS, UNUSED
from vision.checkpoints.open import open_model

CONFIGS = {
    "vit": transformers.ViTConfig,
    "vit_mae": transformers.ViTMAEConfig,
    "deit": transformers.DeiTConfig,
    "dinov2": transformers.Dinov2Config,
    "dinov2_with_registers": transformers.Dinov2WithRegistersConfig,
    "dinov3_vit": transformers.DINOv3ViTConfig,
    "clip_vision_model": transformers.CLIPVisionConfig,
    "siglip_vision_model": transformers.SiglipVisionConfig,
    "beit": transformers.BeitConfig,
    "data2vec-vision": transformers.Data2VecVisionConfig,
    "swin": transformers.SwinConfig,
    "swinv2": transformers.Swinv2Config,
}
ABSENT = {"path_norm", "patch_norm"}
"""Fields that only files of older versions have."""
TINY: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": CLASSES,
}


def test_every_type_that_is_read_is_one_of_transformers() -> None:
    assert CONFIGS.keys() == READ.keys()
    assert all(config.model_type == kind for kind, config in CONFIGS.items())
    assert set(TOWERS.values()) <= READ.keys()


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_field_of_the_installed_transformers_is_known(kind: str) -> None:
    values = CONFIGS[kind]().to_dict()
    unknown = [
        name
        for name in values
        if name not in READ[kind] and name not in SHAPES | UNUSED and not name.startswith("_")
    ]
    assert not unknown, f"read, check or list these fields in huggingface_config.py: {unknown}"
    for name, field in READ[kind].items():
        if name not in ABSENT:
            default = values[name]
            assert field.default == (tuple(default) if isinstance(default, list) else default)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_every_field_around_a_tower_is_known(kind: str) -> None:
    config = {"clip": transformers.CLIPConfig, "siglip": transformers.SiglipConfig}[kind]()
    assert not config.to_dict().keys() - SHAPES - UNUSED - {"_name_or_path"}


def stored(folder: Path, **changes: Any) -> Any:
    """A ViT of transformers in a folder, with fields of its config.json changed afterwards."""
    peer = drawn(transformers.ViTForImageClassification(transformers.ViTConfig(**TINY)))
    peer.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return peer


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "mish"),
        ("hidden_act", ["gelu"]),
        ("qkv_bias", "maybe"),
        ("attention_temperature", 2.0),
        ("quantization_config", {"bits": 8}),
        ("pruned_heads", {"0": [1]}),
        ("model_type", "yolos"),
    ],
)
def test_field_that_is_not_understood_is_refused_by_name(
    field: str, value: Any, tmp_path: Path
) -> None:
    stored(tmp_path, **{field: value})
    with pytest.raises(CheckpointError, match=field) as error:
        open_model(tmp_path)
    shown = value if field == "model_type" else repr(value)
    assert f"{field}={shown}" in str(error.value) and "transformers" in str(error.value)


def test_unknown_fields_that_are_empty_or_private_are_no_obstacle(tmp_path: Path) -> None:
    stored(tmp_path, some_switch=False, some_list=[], some_value=None, _note="kept", dropout=0.3)
    open_model(tmp_path)


def test_bias_that_the_config_denies_and_the_file_has_is_an_error(tmp_path: Path) -> None:
    stored(tmp_path, qkv_bias=False)
    with pytest.raises(CheckpointError, match=r"attn\.qkv\.bias"):
        open_model(tmp_path)


@pytest.mark.parametrize("change", [{"qkv_bias": False}, {"hidden_act": "relu"}])
@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Dinov2"])
def test_vit_without_biases_or_with_another_activation_computes_the_same(
    kind: str, change: dict[str, Any], tmp_path: Path
) -> None:
    config = getattr(transformers, f"{kind}Config")(**TINY, **change)
    name = (
        "DeiTForImageClassificationWithTeacher"
        if kind == "DeiT"
        else f"{kind}ForImageClassification"
    )
    peer = drawn(getattr(transformers, name)(config))
    peer.save_pretrained(tmp_path)

    def outputs(images: Tensor) -> Tensor:
        return peer(images).logits

    assert_equal_function(tmp_path, outputs, peer, (32, 32))


def test_fields_of_a_tower_that_are_left_out_have_the_defaults_of_transformers(
    tmp_path: Path,
) -> None:
    peer = drawn(
        transformers.SiglipVisionModel(
            transformers.SiglipVisionConfig(
                hidden_size=96,
                num_hidden_layers=1,
                intermediate_size=96,
                image_size=32,
                patch_size=8,
            )
        )
    )
    peer.save_pretrained(tmp_path)
    tower = {"hidden_size": 96, "image_size": 32, "patch_size": 8}
    config = {"model_type": "siglip", "vision_config": tower}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def outputs(images: Tensor) -> Tensor:
        return peer(images).pooler_output

    report = assert_equal_function(tmp_path, outputs, peer, (32, 32))
    assert not any("activation" in line for line in report.assumed)
    # Files of the first versions have a second copy of the fields, which is the one that counts.
    twice = config | {"vision_config_dict": tower | {"hidden_act": "relu"}}
    (tmp_path / "config.json").write_text(json.dumps(twice))
    assert open_model(tmp_path).config.activation == "relu"  # type: ignore[union-attr]


def test_image_size_that_is_not_a_multiple_of_the_patch_is_cut_as_transformers_does(
    tmp_path: Path,
) -> None:
    config = transformers.SiglipVisionConfig(**{**TINY, "image_size": 35})
    peer = drawn(transformers.SiglipVisionModel(config))
    peer.save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    assert opened.image_size == (32, 32)
    assert any("35 × 35" in line and "32 × 32" in line for line in opened.report.warnings)
    images = torch.randn(2, 3, 35, 35, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = peer(images).pooler_output, opened.model(images[..., :32, :32])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_jitter_of_dinov3_in_training_is_read(tmp_path: Path) -> None:
    config = transformers.DINOv3ViTConfig(**TINY, pos_embed_shift=0.5, pos_embed_rescale=None)
    transformers.DINOv3ViTModel(config).save_pretrained(tmp_path)
    found = open_model(tmp_path).config
    assert found.rotary_jitter == (0.5, 1.0, 1.0)  # type: ignore[union-attr]


def test_theta_of_dinov3_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    config = transformers.DINOv3ViTConfig(**TINY, rope_theta=50.0)
    transformers.DINOv3ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"rope_theta=50\.0"):
        open_model(tmp_path)


def test_pretraining_of_beit_opens_as_features_of_the_patches(tmp_path: Path) -> None:
    config = transformers.BeitConfig(
        **TINY, use_shared_relative_position_bias=True, use_mask_token=True, vocab_size=7
    )
    peer = drawn(transformers.BeitForMaskedImageModeling(config))
    peer.save_pretrained(tmp_path)

    def outputs(images: Tensor) -> Tensor:
        tokens = peer.layernorm(peer.beit(images).last_hidden_state)
        return tokens[:, 1:].mean(dim=1)

    report = assert_equal_function(tmp_path, outputs, peer, (32, 32))
    assert report.ignored["lm_head.weight"] == "the head of pretraining"
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "alone.safetensors")
    report = open_model(tmp_path / "alone.safetensors").report
    assert any("pool=mean" in line for line in report.assumed)
