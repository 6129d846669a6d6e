"""What an optimiser is told of a model: what must not shrink, and how deep a parameter lies."""

import re
from typing import Any

import pytest
from model_settings import model_config

from vision.models.build import build_model
from vision.models.layers import Classifier

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
