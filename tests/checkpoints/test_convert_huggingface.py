"""ViTs given to transformers as CLIP, SigLIP, DINOv3 or BEiT, and what it cannot express."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_settings import random_images
from test_convert import NAMES, SIZE, logits, own_run

from vision.checkpoints.convert import convert
from vision.checkpoints.files.reading import read_raw
from vision.checkpoints.native.checkpoint import write_checkpoint
from vision.checkpoints.native.header import read_record
from vision.checkpoints.open import open_model
from vision.config import ConfigError

DINOV3: dict[str, Any] = {
    "positions": "rotary",
    "rotary": "dinov3_hf",
    "qkv_bias": "qv",
    "layer_scale": 0.1,
    "class_token_position": False,
}
CLIP: dict[str, Any] = {"stem": "patch_no_bias", "embedding_norm": True, "activation": "quick_gelu"}
SIGLIP: dict[str, Any] = {
    "class_token": False,
    "class_token_position": False,
    "pool": "attention",
    "activation": "gelu_tanh",
}
BEIT: dict[str, Any] = {"positions": "none", "qkv_bias": "qv", "relative_bias": "shared"}
FEATURES: dict[str, tuple[dict[str, Any], Any]] = {
    "DINOv3": ({**DINOV3, "registers": 2}, transformers.DINOv3ViTModel),
    "DINOv3, gated": (
        {**DINOV3, "mlp": "gated", "activation": "silu", "qkv_bias": "qkv"},
        transformers.DINOv3ViTModel,
    ),
    "CLIP": (CLIP, transformers.CLIPVisionModel),
    "CLIP with projection": (
        {**CLIP, "projection": 20, "norm_eps": 1e-3},
        transformers.CLIPVisionModelWithProjection,
    ),
    "SigLIP": (SIGLIP, transformers.SiglipVisionModel),
    "BEiT": (BEIT, transformers.BeitModel),
    "BEiT, mean": (
        {
            **BEIT,
            "relative_bias": "block",
            "pool": "mean",
            "pool_norm": "after",
            "layer_scale": 0.1,
        },
        transformers.BeitModel,
    ),
}


@pytest.mark.parametrize("variant", FEATURES)
def test_features_converted_to_hugging_face_are_the_same_there(
    variant: str, tmp_path: Path
) -> None:
    changes, kind = FEATURES[variant]
    model = own_run(tmp_path / "own.safetensors", "vit_base", **changes)
    # Without its head, as these types have none.
    tensors = {n: t for n, t in model.state_dict().items() if not n.startswith("head.")}
    record = read_record(tmp_path / "own.safetensors") | {"classes": []}
    record = {k: v for k, v in record.items() if k not in ("format", "version")}
    own = {f"model.{name}": tensor for name, tensor in tensors.items()}
    write_checkpoint(tmp_path / "bare.safetensors", own, record)
    convert(tmp_path / "bare.safetensors", "huggingface", tmp_path / "out")
    peer, found = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    model.head = torch.nn.Identity()
    with torch.no_grad():
        outputs = peer.eval()(random_images(2, 3, *SIZE))
    features = outputs.image_embeds if "projection" in variant else outputs.pooler_output
    torch.testing.assert_close(features, logits(model), atol=2e-5, rtol=2e-5)
    convert(tmp_path / "out", "vision", tmp_path / "back.safetensors")
    back = read_raw(tmp_path / "back.safetensors").tensors
    assert back.keys() == own.keys()
    assert all(torch.equal(tensor, back[name]) for name, tensor in own.items())


CLASSIFIERS: dict[str, tuple[dict[str, Any], Any]] = {
    "BEiT": (BEIT, transformers.BeitForImageClassification),
    "CLIP": (
        {**CLIP, "pool": "mean", "pool_norm": "none"},
        transformers.CLIPForImageClassification,
    ),
    "SigLIP": ({**SIGLIP, "pool": "mean"}, transformers.SiglipForImageClassification),
}


@pytest.mark.parametrize("variant", CLASSIFIERS)
def test_classifier_converted_to_hugging_face_has_the_same_logits(
    variant: str, tmp_path: Path
) -> None:
    changes, kind = CLASSIFIERS[variant]
    model = own_run(tmp_path / "own.safetensors", "vit_base", **changes)
    convert(tmp_path / "own.safetensors", "huggingface", tmp_path / "out")
    peer, found = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    torch.testing.assert_close(logits(peer), logits(model), atol=2e-5, rtol=2e-5)
    again = open_model(tmp_path / "out")
    assert torch.equal(logits(again.model), logits(model))
    assert again.class_names == tuple(NAMES)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "quick_gelu", "silu"])
def test_activation_and_biases_reach_hugging_face(activation: str, tmp_path: Path) -> None:
    changes = {"activation": activation, "qkv_bias": "none"}
    model = own_run(tmp_path / "own.safetensors", "vit_base", **changes)
    convert(tmp_path / "own.safetensors", "huggingface", tmp_path / "out")
    peer = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(peer), logits(model), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stem": "patch_normed"}, "stem=patch_normed"),
        ({"mlp_norm": True}, "mlp_norm=True"),
        ({"representation": 5}, "representation=5"),
        ({"head_width": 8}, "head_width=8"),
        ({"positions": "rotary", "rotary": "eva"}, "rotary=eva"),
        ({"embedding_norm": True}, "stem=patch_no_bias"),
        (DINOV3, "no head"),
        ({"relative_bias": "block"}, "qkv_bias=qv"),
    ],
)
def test_setting_that_no_type_has_is_refused_by_name(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    own_run(tmp_path / "own.safetensors", "vit_base", **changes)
    with pytest.raises(ConfigError, match=reason):
        convert(tmp_path / "own.safetensors", "huggingface", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rounded_periods_of_dinov3_are_noted(tmp_path: Path) -> None:
    """Meta publishes periods of 16 bits; transformers computes them in 32."""
    changes = {**DINOV3, "registers": 1, "rotary": "dinov3"}
    model = own_run(tmp_path / "own.safetensors", "vit_base", **changes)
    record = read_record(tmp_path / "own.safetensors") | {"classes": []}
    record = {k: v for k, v in record.items() if k not in ("format", "version")}
    tensors = {f"model.{n}": t for n, t in model.state_dict().items() if not n.startswith("head.")}
    tensors["model.rotary.periods"] = tensors["model.rotary.periods"].bfloat16().float()
    write_checkpoint(tmp_path / "bare.safetensors", tensors, record)
    result = convert(tmp_path / "bare.safetensors", "huggingface", tmp_path / "out")
    assert any("periods" in note and "0.00" in note for note in result.notes)
