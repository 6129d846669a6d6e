"""Weights given back to other libraries: they read them, compute the same, and lose no bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from model_settings import random_images, small_model
from torch import Tensor
from torchvision.models import swin_transformer as torchvision_swin
from torchvision.models import vision_transformer as torchvision_vit

from vision.checkpoints.convert import convert
from vision.checkpoints.files.reading import read_raw
from vision.checkpoints.native.checkpoint import write_checkpoint
from vision.checkpoints.native.header import read_record
from vision.checkpoints.open import open_model
from vision.config import ConfigError
from vision.models.configs import ViTConfig

SIZE = (32, 32)
ODD = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear"}
NAMES = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]


def own_run(path: Path, name: str, size: tuple[int, int] = SIZE, **changes: Any) -> Any:
    """A model of this project, stored as a run stores it."""
    model = small_model(name, size, **changes).eval()
    record = {
        "step": 3,
        "config": {"model": model.config.model_dump(mode="json")},
        "classes": NAMES,
        "channels": 3,
        "preprocess": {"image_size": list(size), "crop_ratio": 0.8, **ODD},
    }
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    write_checkpoint(path, tensors, record)
    return model


def logits(model: Any, size: tuple[int, int] = SIZE) -> Tensor:
    with torch.no_grad():
        found = model.eval()(random_images(2, 3, *size))
    return getattr(found, "logits", found)


GATED: dict[str, Any] = {"mlp": "gated", "activation": "silu", "mlp_ratio": 2.5}
DINOV3: dict[str, Any] = {
    "positions": "rotary",
    "rotary": "dinov3",
    "registers": 3,
    "layer_scale": 0.1,
    "qkv_bias": "qv",
    "norm_eps": 1e-5,
}
CLIP: dict[str, Any] = {"stem": "patch_no_bias", "embedding_norm": True, "norm_eps": 1e-5}
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit_base", {}),
    "mean": ("vit_base", {"pool": "mean", "pool_norm": "after", "class_token": False}),
    "mean, norm before": ("vit_base", {"pool": "mean"}),
    "registers": ("vit_base", {"registers": 3, "layer_scale": 0.1}),
    "registers without class position": (
        "vit_base",
        {"registers": 3, "class_token_position": False, "qk_norm": True},
    ),
    "registers without class token": (
        "vit_base",
        {"registers": 3, "class_token": False, "pool": "mean"},
    ),
    "distilled": ("vit_base", {"distillation_token": True}),
    "gated": (
        "vit_base",
        {"mlp": "gated", "activation": "silu", "mlp_ratio": 2.5, "layer_scale": 0.1},
    ),
    "sines": ("vit_base", {"positions": "sincos2d", "pool": "mean", "class_token": False}),
    "waves": ("vit_base", {"positions": "fourier"}),
    "no positions": ("vit_base", {"positions": "none"}),
    "gated without layer scale": ("vit_base", GATED | {"mlp_norm": True}),
    "rotary": ("vit_base", {"positions": "rotary", "layer_scale": 0.1}),
    "mixed rotary and a table": ("vit_base", {"positions": "learned_rotary", "rotary": "mixed"}),
    "EVA-02": (
        "vit_base",
        GATED
        | {
            "positions": "learned_rotary",
            "rotary": "eva",
            "rotary_grid": 6,
            "qkv_bias": "qv",
            "mlp_norm": True,
            "attention_norm": True,
            "pool": "mean",
            "pool_norm": "after",
        },
    ),
    "EVA-02-CLIP-E": ("vit_base", {"block_norm": "after", "qkv_bias": "qv"}),
    "DINOv3": ("vit_base", DINOV3),
    "DINOv3, gated and no biases": ("vit_base", DINOV3 | GATED | {"qkv_bias": "none"}),
    "Perception Encoder": (
        "vit_base",
        CLIP
        | {
            "positions": "learned_rotary",
            "rotary": "pe",
            "rotary_grid": 4,
            "pool": "attention",
            "pool_heads": 2,
            "pool_mlp_ratio": 3.0,
        },
    ),
    "no norm at the end": ("vit_base", {"pool": "mean", "pool_norm": "none"}),
    "CLIP": ("vit_base", CLIP | {"activation": "quick_gelu"}),
    "SigLIP": (
        "vit_base",
        {"pool": "attention", "class_token": False, "activation": "gelu_tanh"},
    ),
    "BEiT": (
        "vit_base",
        {
            "positions": "none",
            "relative_bias": "block",
            "qkv_bias": "qv",
            "layer_scale": 0.1,
            "pool": "mean",
            "pool_norm": "after",
        },
    ),
    "BEiT, shared bias": ("vit_base", {"relative_bias": "shared", "qkv_bias": "qv"}),
    "Swin": ("swin_tiny", {}),
    "Swin, windows of each stage": ("swin_tiny", {"window": [[4, 4], [8, 8], [2, 2]]}),
    "Swin, clipped windows listed": ("swin_tiny", {"window": [[8, 8], [8, 8], [4, 4]]}),
    "Swin V2": ("swinv2_tiny", {}),
    "Swin V2, pretrained windows": ("swinv2_tiny", {"pretrained_window": [3, 3, 2]}),
    "Swin V2, clipped windows listed": ("swinv2_tiny", {"window": [[8, 8], [8, 8], [4, 4]]}),
}


@pytest.mark.parametrize("variant", TIMM)
def test_converted_to_timm_is_opened_by_timm_with_the_same_logits(
    variant: str, tmp_path: Path
) -> None:
    name, changes = TIMM[variant]
    model = own_run(tmp_path / "own.safetensors", name, **changes)
    convert(tmp_path / "own.safetensors", "timm", tmp_path / "out")
    peer = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    torch.testing.assert_close(logits(peer), logits(model), atol=2e-5, rtol=2e-5)
    assert tuple(peer.pretrained_cfg["mean"]) == tuple(ODD["mean"])
    assert peer.pretrained_cfg["crop_pct"] == 0.8
    assert list(peer.pretrained_cfg["label_names"]) == NAMES


HUGGING_FACE: dict[str, tuple[str, dict[str, Any], Any]] = {
    "ViT": ("vit_base", {"norm_eps": 1e-3}, transformers.ViTForImageClassification),
    "no class position": (
        "vit_base",
        {"class_token_position": False},
        transformers.ViTForImageClassification,
    ),
    "distilled": (
        "vit_base",
        {"distillation_token": True},
        transformers.DeiTForImageClassificationWithTeacher,
    ),
    "DINOv2": (
        "vit_base",
        {"layer_scale": 0.1, "pool": "class_token_and_mean"},
        transformers.Dinov2ForImageClassification,
    ),
    "DINOv2, registers and gate": (
        "vit_base",
        {
            "layer_scale": 0.1,
            "pool": "class_token_and_mean",
            "registers": 2,
            "mlp": "gated",
            "activation": "silu",
            "mlp_ratio": 128 / 48,
        },
        transformers.Dinov2WithRegistersForImageClassification,
    ),
    "Swin": ("swin_tiny", {}, transformers.SwinForImageClassification),
    "Swin V2": (
        "swinv2_tiny",
        {"pretrained_window": [3, 3, 2]},
        transformers.Swinv2ForImageClassification,
    ),
}


@pytest.mark.parametrize("variant", HUGGING_FACE)
def test_converted_to_hugging_face_is_opened_by_it_with_the_same_logits(
    variant: str, tmp_path: Path
) -> None:
    name, changes, kind = HUGGING_FACE[variant]
    model = own_run(tmp_path / "own.safetensors", name, **changes)
    convert(tmp_path / "own.safetensors", "huggingface", tmp_path / "out")
    peer, found = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    torch.testing.assert_close(logits(peer), logits(model), atol=2e-5, rtol=2e-5)
    assert [peer.config.id2label[index] for index in range(7)] == NAMES
    processor = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert processor["image_mean"] == ODD["mean"] and processor["size"] == {"shortest_edge": 40}


def torchvision_peer(name: str) -> Any:
    if name == "vit_base":
        return torchvision_vit.VisionTransformer(32, 8, 3, 3, 48, 192, num_classes=7)
    parts: dict[str, Any] = {}
    if name == "swinv2_tiny":
        parts["block"] = torchvision_swin.SwinTransformerBlockV2
        parts["downsample_layer"] = torchvision_swin.PatchMergingV2
    return torchvision_swin.SwinTransformer(
        [2, 2], 16, [2, 3, 2], [2, 2, 4], [4, 4], num_classes=7, **parts
    )


@pytest.mark.parametrize("name", ["vit_base", "swin_tiny", "swinv2_tiny"])
def test_converted_to_torchvision_is_loaded_strictly_with_the_same_logits(
    name: str, tmp_path: Path
) -> None:
    model = own_run(tmp_path / "own.safetensors", name)
    convert(tmp_path / "own.safetensors", "torchvision", tmp_path / "out.pth")
    peer = torchvision_peer(name)
    peer.load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True), strict=True)
    torch.testing.assert_close(logits(peer), logits(model), atol=2e-5, rtol=2e-5)


PADDED = (40, 40)
"""Windows of 4 on grids of 20, 10 and 5."""


@pytest.mark.parametrize("padding", ["mask", "attend"])
@pytest.mark.parametrize("name", ["swin_tiny", "swinv2_tiny"])
@pytest.mark.parametrize("there", ["torchvision", "huggingface"])
def test_padding_that_a_library_does_otherwise_is_noted(
    name: str, padding: str, there: Any, tmp_path: Path
) -> None:
    model = own_run(tmp_path / "own.safetensors", name, PADDED, padding=padding)
    done = convert(tmp_path / "own.safetensors", there, tmp_path / "out")
    peer: Any
    if there == "torchvision":
        peer = torchvision_peer(name)
        peer.load_state_dict(torch.load(tmp_path / "out", weights_only=True), strict=True)
    else:
        peer = HUGGING_FACE["Swin" if name == "swin_tiny" else "Swin V2"][2]
        peer = peer.from_pretrained(tmp_path / "out")
    same = torch.allclose(logits(peer, PADDED), logits(model, PADDED), atol=2e-5, rtol=2e-5)
    noted = any("40 × 40" in note and "padding=attend" in note for note in done.notes)
    assert (same, noted) == ((True, False) if padding == "attend" else (False, True))


def test_padding_that_timm_does_otherwise_is_noted(tmp_path: Path) -> None:
    own_run(tmp_path / "own.safetensors", "swin_tiny", PADDED, padding="attend")
    done = convert(tmp_path / "own.safetensors", "timm", tmp_path / "out")
    assert any("40 × 40" in note and "timm" in note for note in done.notes)


@pytest.mark.parametrize(("name", "there"), [("swinv2_tiny", "timm"), ("swin_tiny", "official")])
def test_image_size_at_which_a_library_cannot_run_is_refused(
    name: str, there: Any, tmp_path: Path
) -> None:
    own_run(tmp_path / "own.safetensors", name, PADDED)
    with pytest.raises(ConfigError, match="40 × 40"):
        convert(tmp_path / "own.safetensors", there, tmp_path / "out")


@pytest.mark.parametrize("name", ["swin_tiny", "swinv2_tiny"])
def test_converted_to_the_official_layout_has_its_merging_at_the_end_and_its_buffers(
    name: str, tmp_path: Path
) -> None:
    own_run(tmp_path / "own.safetensors", name)
    convert(tmp_path / "own.safetensors", "official", tmp_path / "out.pth")
    stored = torch.load(tmp_path / "out.pth", weights_only=True)["model"]
    assert "layers.0.downsample.norm.weight" in stored
    assert "layers.2.downsample.norm.weight" not in stored
    # A window of 4 × 4 on a grid of 16 × 16, shifted by 2: the mask by the official recipe.
    regions = torch.zeros(16, 16)
    for number, (y, x) in enumerate((y, x) for y in range(3) for x in range(3)):
        bounds = [(0, 12), (12, 14), (14, 16)]
        regions[slice(*bounds[y]), slice(*bounds[x])] = number
    windows = regions.view(4, 4, 4, 4).permute(0, 2, 1, 3).reshape(16, 16)
    apart = windows[:, None] != windows[:, :, None]
    assert torch.equal(stored["layers.0.blocks.1.attn_mask"], apart * -100.0)
    assert stored["layers.0.blocks.0.attn.relative_position_index"].shape == (16, 16)


EACH = [[4, 4], [8, 8], [2, 2]]
ROUNDS = [
    ("vit_base", "timm"),
    ("vit_base", "torchvision"),
    ("vit_base", "huggingface"),
    ("vit_base", "vision"),
    *(
        (name, fmt)
        for name in ("swin_tiny", "swinv2_tiny")
        for fmt in ("timm", "torchvision", "huggingface", "official", "vision")
    ),
]


@pytest.mark.parametrize(
    ("name", "there", "dtype"),
    [
        *((name, there, torch.float32) for name, there in ROUNDS),
        ("vit_base", "timm", torch.float16),
        *(
            pytest.param(name, there, torch.float16, marks=pytest.mark.slow)
            for name, there in ROUNDS[1:]
        ),
    ],
)
def test_round_trip_through_another_layout_keeps_every_bit(
    name: str, there: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = own_run(tmp_path / "own.safetensors", name)
    first = tmp_path / "own.safetensors"
    if dtype is torch.float16:
        raw = read_raw(first)
        first = tmp_path / "half.safetensors"
        half = {n: t.to(dtype) for n, t in raw.tensors.items()}
        record = {k: v for k, v in raw.extra.items() if k not in ("format", "version")}
        write_checkpoint(first, half, record)
    given = {"heads": 3} if name == "vit_base" and there == "torchvision" else {}
    convert(first, there, tmp_path / "there")
    convert(tmp_path / "there", "vision", tmp_path / "back.safetensors", **given)
    before, after = read_raw(first).tensors, read_raw(tmp_path / "back.safetensors").tensors
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype == dtype
        assert torch.equal(tensor, after[key]), key
    again = open_model(tmp_path / "back.safetensors").model
    assert type(again.config) is type(model.config)


@pytest.mark.parametrize(
    ("name", "changes", "there", "reason"),
    [
        ("vit_base", {"stem": "patch_no_bias"}, "timm", "stem=patch instead of patch_no_bias"),
        ("vit_base", {"representation": 8}, "timm", "representation"),
        ("vit_base", {"head_width": 8}, "timm", "head_width"),
        ("vit_base", {"pool": "class_token_and_mean"}, "timm", "mean of the patches at once"),
        ("vit_base", {"qk_norm": True}, "huggingface", "qk_norm=True"),
        ("vit_base", {"pool": "mean"}, "huggingface", "pool=class_token"),
        ("vit_base", {}, "official", "Swin code"),
        ("swin_tiny", {"positions": "absolute"}, "timm", "positions=absolute"),
        ("swin_tiny", {"shift": False}, "official", "shift=false"),
        ("swin_tiny", {"window": 8}, "torchvision", "keep their size"),
        ("swin_tiny", {"window": 8}, "huggingface", "shrink with the grid"),
        ("swin_tiny", {"window": EACH}, "huggingface", "windows of their own"),
        ("swin_tiny", {"window": EACH}, "official", "windows of their own"),
        ("swin_tiny", {"window": [4, 8]}, "official", "square"),
        ("swinv2_tiny", {"window": EACH}, "timm", "windows of their own"),
        ("swin_tiny", {"window": [[4, 4], [4, 4], [6, 6]]}, "timm", "windows of their own"),
        ("swinv2_tiny", {"pretrained_window": [3, 3, 2]}, "torchvision", "pretrained"),
    ],
)
def test_model_that_a_library_cannot_express_is_refused_with_the_reason(
    name: str, changes: dict[str, Any], there: Any, reason: str, tmp_path: Path
) -> None:
    own_run(tmp_path / "own.safetensors", name, **changes)
    with pytest.raises(ConfigError, match=reason):
        convert(tmp_path / "own.safetensors", there, tmp_path / "out")
    assert not (tmp_path / "out").exists()


BEYOND_TORCHVISION: dict[str, dict[str, Any]] = {
    "stem": {"stem": "patch_no_bias"},
    "head_width": {"head_width": 8},
    "class_token": {"class_token": False, "pool": "mean"},
    "registers": {"registers": 2},
    "distillation_token": {"distillation_token": True},
    "positions": {"positions": "rotary"},
    "relative_bias": {"relative_bias": "block"},
    "embedding_norm": {"embedding_norm": True},
    "block_norm": {"block_norm": "after"},
    "qkv_bias": {"qkv_bias": "none"},
    "qk_norm": {"qk_norm": True},
    "attention_norm": {"attention_norm": True},
    "layer_scale": {"layer_scale": 0.5},
    "mlp": {"mlp": "gated"},
    "activation": {"activation": "quick_gelu"},
    "mlp_norm": {"mlp_norm": True},
    "norm_eps": {"norm_eps": 1e-5},
    "pool": {"pool": "mean"},
    "pool_norm": {"pool_norm": "none"},
    "projection": {"projection": 8},
}
"""Settings of a ViT with values that torchvision's does not have."""
WITHIN_TORCHVISION = {
    *("patch_size", "width", "depth", "heads", "mlp_ratio", "representation"),  # its arguments
    *("class_token_position", "rotary", "rotary_grid", "rotary_jitter"),  # of other positions
    *("pool_heads", "pool_mlp_ratio"),  # of another pooling
    *("kind", "pretrained", "initialization", "checkpoint_activations"),  # not of the function
    *("dropout", "attention_dropout", "drop_path", "drop_path_schedule"),
}


@pytest.mark.parametrize("field", BEYOND_TORCHVISION)
def test_vit_that_torchvision_cannot_express_is_refused_with_field_and_value(
    field: str, tmp_path: Path
) -> None:
    own_run(tmp_path / "own.safetensors", "vit_base", **BEYOND_TORCHVISION[field])
    value = BEYOND_TORCHVISION[field][field]
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        convert(tmp_path / "own.safetensors", "torchvision", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_setting_of_a_vit_is_checked_for_torchvision() -> None:
    assert {*BEYOND_TORCHVISION, *WITHIN_TORCHVISION} == set(ViTConfig.model_fields)


def test_converting_onto_something_that_exists_is_refused(tmp_path: Path) -> None:
    own_run(tmp_path / "own.safetensors", "vit_base")
    with pytest.raises(ConfigError, match="already exists"):
        convert(tmp_path / "own.safetensors", "vision", tmp_path / "own.safetensors")
    with pytest.raises(ConfigError, match="Did you mean 'timm'"):
        convert(tmp_path / "own.safetensors", "tim", tmp_path / "out")  # type: ignore[arg-type]


def test_converting_keeps_what_is_known_of_the_images(tmp_path: Path) -> None:
    own_run(tmp_path / "own.safetensors", "swin_tiny")
    convert(tmp_path / "own.safetensors", "huggingface", tmp_path / "there")
    convert(tmp_path / "there", "vision", tmp_path / "back.safetensors")
    record = read_record(tmp_path / "back.safetensors")
    assert record["classes"] == NAMES and record["preprocess"]["mean"] == ODD["mean"]
    assert record["preprocess"]["crop_ratio"] == 0.8
