"""timm's definition of an architecture, in our words."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from foreign_models import drawn
from safetensors.torch import save_file

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts.timm.timm_models import describe
from vision.checkpoints.open import open_model


def settings(architecture: str, **arguments: Any) -> dict[str, Any]:
    found = describe(architecture, arguments, {})
    assert found is not None
    return found.settings


@pytest.mark.parametrize(
    ("architecture", "wanted"),
    [
        ("vit_base_patch16_gap_224", {"heads": 16, "pool": "mean", "pool_norm": "before"}),
        ("vit_base_patch16_clip_quickgelu_224", {"activation": "quick_gelu", "norm_eps": 1e-5}),
        ("vit_base_patch16_rpn_224", {"block_norm": "after", "qkv_bias": "none"}),
        ("vit_intern300m_patch14_448", {"pool": "class_token", "pool_norm": "none"}),
        ("vit_so400m_patch16_siglip_256", {"activation": "gelu_tanh", "pool": "attention"}),
        ("eva02_enormous_patch14_clip_224", {"block_norm": "after", "heads": 16}),
        ("vit_7b_patch16_dinov3", {"heads": 32, "rotary": "dinov3", "norm_eps": 1e-5}),
        ("vit_base_patch16_rope_ape_224", {"positions": "learned_rotary", "rotary": "axial"}),
        ("vit_pe_core_tiny_patch16_384", {"rotary": "pe", "rotary_grid": 24, "pool_heads": 8}),
        ("swin_s3_tiny_224", {"window": [[7, 7], [7, 7], [14, 14], [7, 7]], "shift": True}),
        ("swin_tiny_patch4_window7_224", {"window": 7, "heads": [3, 6, 12, 24]}),
        (
            "swinv2_base_window12to16_192to256",
            {"window": 16, "pretrained_window": [12, 12, 12, 6], "kind": "swin_v2"},
        ),
    ],
)
def test_settings_that_tensors_do_not_show_are_those_of_timm(
    architecture: str, wanted: dict[str, Any]
) -> None:
    found = settings(architecture)
    assert {name: found[name] for name in wanted} == wanted


def test_settings_follow_the_arguments() -> None:
    found = settings("vit_base_patch16_224", num_heads=6, act_layer="relu", qk_norm=True)
    assert (found["heads"], found["activation"], found["qk_norm"]) == (6, "relu", True)
    assert settings("swin_tiny_patch4_window7_224", window_size=[7, 14])["window"] == [7, 14]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "parallel": ("vit_base_patch16_xp_224", {}, "ParallelScalingBlock"),
    "parallel things": ("vit_small_patch16_18x2_224", {}, "ParallelThingsBlock"),
    "RMSNorm": ("aimv2_large_patch14_224", {}, "RmsNorm"),
    "grouped queries": (
        "vit_base_patch16_rope_224",
        {"num_kv_heads": 3, "qkv_fused": False},
        "share keys",
    ),
    "attention scaled alone": (
        "eva_giant_patch14_224",
        {"attn_only_layer_scale": True, "init_values": 1.0},
        "one branch",
    ),
    "gate": ("naflexvit_base_patch16_gap", {"attn_gated": True}, "gated"),
    "stem": ("vit_base_r50_s16_224", {}, "HybridEmbed"),
    "norm of the stem": ("vit_base_patch16_224", {"embed_norm_layer": "layernorm"}, "norm"),
    "both pools": ("vit_base_patch16_224", {"global_pool": "avgmax"}, "avgmax"),
    "prefix": (
        "vit_base_patch16_224",
        {"global_pool": "avg", "pool_include_prefix": True},
        "tokens before the patches",
    ),
    "pooling": ("vit_base_patch16_224", {"global_pool": "map"}, "class token"),
    "pooling of registers": (
        "vit_pe_core_tiny_patch16_384",
        {"num_reg_tokens": 2},
        "registers",
    ),
    "factors of positions": ("naflexvit_base_patch16_parfac_gap", {}, "factorized"),
    "rotation": ("vit_base_patch16_rope_224", {"rope_temperature": 50.0}, "temperature"),
    "order of columns": ("vit_base_patch16_rope_mixed_224", {"rope_grid_indexing": "ij"}, "RoPE"),
    "other class": ("vit_relpos_base_patch16_224", {}, "VisionTransformerRelPos"),
    "large windows": (
        "swin_tiny_patch4_window7_224",
        {"always_partition": True, "window_size": 14},
        "larger",
    ),
    "activation of Swin": ("swinv2_tiny_window8_256", {"act_layer": "silu"}, "GELU"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_model_here_has_is_refused_with_the_way_that_works(case: str) -> None:
    architecture, arguments, reason = REFUSED[case]
    with pytest.raises(CheckpointError, match=reason) as error:
        describe(
            architecture, {"depth": 2} | arguments if "swin" not in architecture else arguments, {}
        )
    assert f"model=timm model.name={architecture}" in str(error.value)


def test_arguments_that_timm_refuses_are_named() -> None:
    with pytest.raises(CheckpointError, match="no_such_thing"):
        describe("vit_base_patch16_224", {"no_such_thing": 1}, {})


@pytest.mark.parametrize(
    "arguments", [{"depth": 10**9}, {"embed_dim": 10**9}, {"checkpoint_path": "weights.pth"}]
)
def test_arguments_of_a_hostile_file_are_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(arguments))):
        describe("vit_base_patch16_224", arguments, {})


def test_describing_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    settings("vit_small_patch16_rope_mixed_224")
    assert torch.equal(before, torch.get_rng_state())


def stored(folder: Path, config: dict[str, Any], **options: Any) -> Any:
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_classes": 5}
    peer = drawn(timm.create_model(config["architecture"].lower(), **(small | options)))
    save_file(peer.state_dict(), folder / "model.safetensors")
    written = {
        k: v for k, v in (small | options).items() if k not in ("num_classes", "global_pool")
    }
    (folder / "config.json").write_text(json.dumps({"model_args": written, **config}))
    return peer


def test_heads_of_the_architecture_win_over_the_usual_ones(tmp_path: Path) -> None:
    peer = stored(tmp_path, {"architecture": "vit_base_patch16_gap_224"})
    found = open_model(tmp_path)
    assert found.config.heads == 16  # type: ignore[union-attr]
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(found.model(images), peer(images), atol=1e-5, rtol=1e-5)


def test_pooling_that_the_saved_model_had_wins_over_the_architectures(tmp_path: Path) -> None:
    config = {"architecture": "vit_small_patch16_dinov3", "global_pool": "token"}
    stored(tmp_path, config, num_heads=3, global_pool="token")
    assert open_model(tmp_path).config.pool == "class_token"  # type: ignore[union-attr]


def test_architecture_that_timm_does_not_have_is_said(tmp_path: Path) -> None:
    stored(tmp_path, {"architecture": "VIT_base_patch16_224"}, num_heads=3)
    found = open_model(tmp_path)
    assert found.config.heads == 3  # type: ignore[union-attr]
    assert any("VIT_base_patch16_224" in line for line in found.report.warnings)


def test_refusal_names_the_architecture_that_timm_runs(tmp_path: Path) -> None:
    name = "vit_relpos_small_patch16_224"
    save_file(timm.create_model(name, depth=1).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    with pytest.raises(CheckpointError, match=rf"model=timm model\.name={name}\."):
        open_model(tmp_path)
