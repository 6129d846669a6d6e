"""What an optimiser is told of a model: what must not shrink, and how deep a parameter lies."""

import re
from itertools import pairwise
from typing import Any

import pytest
from model_settings import model_config
from torch import nn

from vision.models.build import build_model
from vision.models.layers import Classifier
from vision.models.lora import add_lora

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny", {}),
    "vit with everything": (
        "vit_registers",
        {"qk_norm": True, "pool": "mean", "pool_norm": "after"},
    ),
    "vit fourier": ("vit_tiny", {"positions": "fourier"}),
    "vit plain": ("vit_plain", {}),
    "swin": ("swin_tiny", {}),
    "swin absolute": ("swin_tiny", {"positions": "absolute"}),
    "swin_v2": ("swinv2_tiny", {}),
    "swin_v2 absolute": ("swinv2_tiny", {"positions": "absolute"}),
}


def build(variant: str) -> Classifier:
    name, changes = VARIANTS[variant]
    return build_model(model_config(name, **changes), (64, 64), device="meta")


@pytest.mark.parametrize("variant", VARIANTS)
def test_weight_decay_is_for_the_matrices_of_layers_only(variant: str) -> None:
    model = build(variant)
    decayed = {name for name, _ in model.named_parameters()} - model.no_weight_decay()
    layers = r"(patch_embed\.proj|qkv|attn\.proj|fc1|fc2|reduction|head|positions\.proj)\.weight"
    expected = {n for n, _ in model.named_parameters() if re.search(rf"(^|\.){layers}$", n)}
    assert decayed == expected


@pytest.mark.parametrize(
    ("variant", "spared"),
    [
        (
            "vit",
            ["cls_token", "positions.table", "norm.weight", "head.bias", "patch_embed.proj.bias"],
        ),
        (
            "vit with everything",
            [
                "reg_token",
                "blocks.3.ls1.gamma",
                "blocks.3.attn.q_norm.weight",
                "blocks.3.attn.k_norm.bias",
                "blocks.3.attn.qkv.bias",
            ],
        ),
        ("swin", ["layers.2.blocks.5.attn.relative_position_bias_table", "patch_norm.weight"]),
        ("swin absolute", ["absolute_pos_embed", "layers.1.downsample.norm.weight"]),
        (
            "swin_v2",
            [
                "layers.2.blocks.5.attn.logit_scale",
                "layers.2.blocks.5.attn.cpb_mlp.0.weight",
                "layers.2.blocks.5.attn.cpb_mlp.0.bias",
                "layers.2.blocks.5.attn.cpb_mlp.2.weight",
                "layers.2.blocks.5.attn.q_bias",
            ],
        ),
    ],
)
def test_weight_decay_spares_what_the_papers_spare(variant: str, spared: list[str]) -> None:
    model = build(variant)
    assert set(spared) <= model.no_weight_decay()
    for name in spared:
        model.get_parameter(name)  # and the names exist


def expected_layer(model: Classifier, name: str) -> int:
    """Blocks counted through all stages; a merging counts with the block that follows it."""
    config = model.config
    depths = getattr(config, "depths", None) or (config.depth,)
    if match := re.match(r"(?:layers\.(\d+)\.)?blocks\.(\d+)\.", name):
        return sum(depths[: int(match[1] or 0)]) + int(match[2]) + 1
    if match := re.match(r"layers\.(\d+)\.downsample\.", name):
        return sum(depths[: int(match[1])]) + 1
    return sum(depths) + 1 if name.split(".")[0] in ("norm", "head") else 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_count_blocks_from_the_embedding_to_the_head(variant: str) -> None:
    model = build(variant)
    found = {name: model.layer_of(name) for name, _ in model.named_parameters()}
    assert found == {name: expected_layer(model, name) for name in found}
    depth = max(found.values())
    assert set(found.values()) == set(range(depth + 1))
    assert found["head.weight"] == depth
    assert found["patch_embed.proj.weight"] == 0


@pytest.mark.parametrize("name", ["resnet50", "vit_tiny_patch16_224", "swinv2_tiny_window8_256"])
def test_timm_model_is_grouped_as_timm_groups_it_and_spares_real_parameters(name: str) -> None:
    model = build_model(model_config("timm", name=name), (256, 256), device="meta")
    names = {n for n, _ in model.named_parameters()}
    spared = model.no_weight_decay()
    assert {n for n, p in model.named_parameters() if p.ndim <= 1} <= spared
    assert spared <= names
    assert len({model.layer_of(n) for n in names}) > 10
    if name.startswith("swinv2"):  # timm names modules here, whose parameters are meant
        attention = "model.layers.0.blocks.1.attn"
        assert {f"{attention}.logit_scale", f"{attention}.cpb_mlp.2.weight"} <= spared


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_matrices_are_decayed_and_neither_embedding_nor_head(variant: str) -> None:
    model = build(variant)
    layers = r"(qkv|attn\.proj|fc1|fc2|reduction)\.weight"
    expected = {n for n, _ in model.named_parameters() if re.search(rf"(^|\.){layers}$", n)}
    found = model.hidden_matrices()
    assert found.keys() == expected
    assert found == {name: 3 if name.endswith(".qkv.weight") else 1 for name in expected}


def test_gates_keys_of_a_pooling_and_hidden_layers_before_the_head_are_hidden_matrices() -> None:
    config = model_config(
        "vit_tiny", mlp="gated", pool="attention", class_token=False, representation=24
    )
    found = build_model(config, (64, 64), device="meta").hidden_matrices()
    assert found["blocks.0.mlp.fc1.weight"] == 2
    assert found["blocks.0.mlp.fc2.weight"] == 1
    pooling = {name: number for name, number in found.items() if name.startswith("pooling.")}
    assert pooling == {
        "pooling.q.weight": 1,
        "pooling.kv.weight": 2,
        "pooling.proj.weight": 1,
        "pooling.mlp.fc1.weight": 1,
        "pooling.mlp.fc2.weight": 1,
    }
    assert found["representation.weight"] == 1
    assert "head.weight" not in found and "patch_embed.proj.weight" not in found


def test_additions_of_lora_are_hidden_matrices_of_their_parts() -> None:
    model = build_model(model_config("vit_tiny"), (64, 64))
    add_lora(model, rank=2, alpha=2.0, targets=["q", "v", "fc1"])
    found = model.hidden_matrices()
    assert found["blocks.0.attn.qkv.lora_a"] == found["blocks.0.attn.qkv.lora_b"] == 2
    assert found["blocks.0.mlp.fc1.lora_a"] == found["blocks.0.mlp.fc1.lora_b"] == 1
    assert found["blocks.0.attn.qkv.weight"] == 3


class ConvolutionalStem(nn.Module):
    """Convolutions under the names that they have in a stem."""

    def __init__(self, whitened: bool) -> None:
        super().__init__()
        if whitened:
            self.whitening = nn.Conv2d(3, 24, 2)
        widths = [24 if whitened else 3, 16, 32]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3) for a, b in pairwise(widths))


@pytest.mark.parametrize("whitened", [False, True])
def test_convolutions_of_a_stem_that_do_not_read_pixels_are_hidden_matrices(whitened: bool) -> None:
    model = build("vit")
    model.patch_embed = ConvolutionalStem(whitened)
    found = {name: n for name, n in model.hidden_matrices().items() if "patch_embed" in name}
    first = {"patch_embed.convs.0.weight": 1} if whitened else {}
    assert found == first | {"patch_embed.convs.1.weight": 1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", {"layer1.0.conv1": 1, "layer4.0.downsample.0": 1, "conv1": 0, "fc": 0}),
        ("resnext50_32x4d", {"layer1.0.conv1": 1, "layer1.0.conv2": 32}),
        (
            "vit_tiny_patch16_224",
            {"blocks.0.attn.qkv": 3, "blocks.0.mlp.fc1": 1, "patch_embed.proj": 0, "head": 0},
        ),
        ("vit_giant_patch14_reg4_dinov2", {"blocks.0.mlp.fc1": 2, "blocks.0.mlp.fc2": 1}),
        ("swinv2_tiny_window8_256", {"layers.0.blocks.0.attn.qkv": 3, "head.fc": 0}),
        ("efficientformer_l1", {"stages.3.blocks.4.token_mixer.qkv": 1}),
        ("convnext_atto", {"stages.0.blocks.0.conv_dw": 0, "stages.0.blocks.0.mlp.fc1": 1}),
    ],
)
def test_hidden_matrices_of_a_timm_model(name: str, expected: dict[str, int]) -> None:
    model = build_model(model_config("timm", name=name), (256, 256), device="meta")
    found = model.hidden_matrices()
    for layer, number in expected.items():
        model.get_parameter(f"model.{layer}.weight")
        assert found.get(f"model.{layer}.weight", 0) == number, layer
    for parameter, number in found.items():
        assert model.get_parameter(parameter).shape[0] % number == 0, parameter
