"""The distributions that weights are drawn from."""

import math
from typing import Any

import pytest
import torch
from model_settings import model_config
from torch import Tensor, nn

from vision.models.build import build_model
from vision.models.positions.added import FourierPositions
from vision.models.swin_v2 import SwinV2Block, WindowAttentionV2

SIZES: dict[str, dict[str, Any]] = {
    "vit_base": {"patch_size": 4, "width": 128, "depth": 4, "heads": 4},
    "vit_plain": {"patch_size": 4, "width": 128, "depth": 4, "heads": 4},
    "swin_tiny": {"patch_size": 2, "width": 48, "depths": [2, 2, 2], "heads": [2, 4, 8]},
    "swinv2_tiny": {"patch_size": 2, "width": 48, "depths": [2, 2, 2], "heads": [2, 4, 8]},
}
FAMILIES = ["vit_base", "swin_tiny", "swinv2_tiny"]


def build(name: str, **changes: Any) -> Any:
    config = model_config(name, **(SIZES[name] | changes))
    return build_model(config, (64, 64), classes=100, seed=1)


def assert_normal(tensor: Tensor, std: float) -> None:
    """Mean 0 and a deviation as given, as far as a sample of this size can tell."""
    error = 5 / math.sqrt(tensor.numel())
    assert tensor.std().item() == pytest.approx(std, rel=error)
    assert abs(tensor.mean().item()) < error * std
    # A uniform distribution ends at √3 deviations.
    assert tensor.abs().max().item() > 2 * std


def assert_uniform(tensor: Tensor, bound: float) -> None:
    """Evenly spread within ± bound."""
    assert 0.97 * bound < tensor.abs().max().item() <= bound * (1 + 1e-6)
    assert tensor.std().item() == pytest.approx(
        bound / math.sqrt(3), rel=5 / math.sqrt(tensor.numel())
    )


def norms_outside_of_blocks(model: nn.Module) -> list[nn.LayerNorm]:
    inside = {
        id(norm)
        for block in model.modules()
        if isinstance(block, SwinV2Block)
        for norm in (block.norm1, block.norm2)
    }
    return [m for m in model.modules() if isinstance(m, nn.LayerNorm) and id(m) not in inside]


@pytest.mark.parametrize("name", FAMILIES)
def test_linear_layers_start_with_a_deviation_of_002_and_no_bias(name: str) -> None:
    model = build(name)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(linears) > 10
    for linear in linears:
        assert_normal(linear.weight, 0.02)
        assert linear.bias is None or not linear.bias.any()


@pytest.mark.parametrize("name", FAMILIES)
def test_patch_embedding_starts_as_torch_draws_a_convolution(name: str) -> None:
    conv = build(name, patch_size=8, width=256).patch_embed.proj
    bound = 1 / math.sqrt(3 * 8 * 8)
    assert_uniform(conv.weight, bound)
    assert_uniform(conv.bias, bound)
    default = nn.Conv2d(3, 256, 8, 8)  # and this is what torch does
    assert conv.weight.std().item() == pytest.approx(default.weight.std().item(), rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_start_as_the_identity(name: str) -> None:
    norms = norms_outside_of_blocks(build(name, **({"qk_norm": True} if "vit" in name else {})))
    assert norms
    for norm in norms:
        assert norm.weight.eq(1).all()
        assert norm.bias.eq(0).all()


def test_vit_tokens_tables_and_scales_start_as_stated() -> None:
    model = build("vit_base", registers=64, layer_scale=1e-5, width=256)
    assert_normal(model.cls_token, 0.02)
    assert_normal(model.positions.table, 0.02)
    assert_normal(model.reg_token, 1e-6)
    for block in model.blocks:
        assert block.ls1.gamma.eq(1e-5).all()
        assert block.ls2.gamma.eq(1e-5).all()


def test_vit_fourier_positions_start_at_the_size_of_a_learned_table() -> None:
    positions = build("vit_base", positions="fourier").positions
    assert isinstance(positions, FourierPositions)
    assert positions((16, 16)).std().item() == pytest.approx(0.02, rel=0.1)
    assert not positions.proj.bias.any()


@pytest.mark.parametrize("class_token", [True, False])
def test_vit_with_xavier_starts_as_in_the_papers_code(class_token: bool) -> None:
    pool = "class_token" if class_token else "mean"
    model = build("vit_base", initialization="xavier", class_token=class_token, pool=pool)
    for block in model.blocks:
        for part in block.attn.qkv.weight.chunk(3):  # each on its own, not as one layer
            assert_uniform(part, math.sqrt(6 / (128 + 128)))
        assert_uniform(block.attn.proj.weight, math.sqrt(6 / (128 + 128)))
        assert_uniform(block.mlp.fc1.weight, math.sqrt(6 / (128 + 512)))
        assert_uniform(block.mlp.fc2.weight, math.sqrt(6 / (128 + 512)))
        assert not block.attn.qkv.bias.any()
        assert not block.attn.proj.bias.any()
        assert_normal(block.mlp.fc1.bias, 1e-6)
        assert_normal(block.mlp.fc2.bias, 1e-6)
    assert not model.head.weight.any()
    assert not model.head.bias.any()
    conv = model.patch_embed.proj
    # LeCun: variance 1 / fan-in, from a normal that is cut at twice its deviation before the cut.
    std = 1 / math.sqrt(3 * 4 * 4)
    assert conv.weight.std().item() == pytest.approx(std, rel=0.05)
    assert 2.1 * std < conv.weight.abs().max().item() <= 2 / 0.8796 * std
    assert not conv.bias.any()
    if class_token:
        assert not model.cls_token.any()


def test_swin_tables_start_with_a_deviation_of_002() -> None:
    for stage in build("swin_tiny").layers:
        assert_normal(stage.blocks[0].attn.relative_position_bias_table, 0.02)
    assert_normal(build("swin_tiny", positions="absolute").absolute_pos_embed, 0.02)


def test_swin_v2_branches_start_at_zero_and_scales_at_ten() -> None:
    model = build("swinv2_tiny")
    blocks = [m for m in model.modules() if isinstance(m, SwinV2Block)]
    for block in blocks:
        for norm in (block.norm1, block.norm2):
            assert not norm.weight.any()
            assert not norm.bias.any()
    attentions = [m for m in model.modules() if isinstance(m, WindowAttentionV2)]
    assert len(blocks) == len(attentions) == 6
    for attention in attentions:
        assert attention.logit_scale.exp().sub(10).abs().max().item() < 1e-5
        assert not attention.q_bias.any()
        assert not attention.v_bias.any()


@pytest.mark.parametrize("name", SIZES)
def test_model_starts_with_logits_near_zero_and_gradients_that_flow(name: str) -> None:
    model = build(name)
    torch.manual_seed(0)
    logits = model(torch.randn(4, 3, 64, 64))
    assert logits.abs().max().item() < 2
    torch.nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    head = model.get_parameter("head.weight").grad
    assert head is not None
    assert head.norm().item() > 1e-3
