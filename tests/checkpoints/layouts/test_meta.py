"""DINOv3 in Meta's names: timm's tensors, renamed, with what Meta stores beside them."""

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from foreign_models import assert_equal_function, drawn
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.open import open_model

SMALL: dict[str, Any] = {"patch_size": 8, "embed_dim": 128, "num_heads": 2, "depth": 2}
PERIODS = (100 ** (torch.arange(16) / 16)).bfloat16().float()
"""Rounded, as in published files."""


def peer_of(name: str) -> Any:
    """timm's DINOv3 with Meta's pooling and periods."""
    options = SMALL | {"img_size": 32, "num_classes": 0, "global_pool": "token"}
    peer = drawn(timm.create_model(name, **options))
    peer.rope.periods.copy_(PERIODS)
    return peer


def with_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's tensors under Meta's names."""
    gated = "blocks.0.mlp.fc1_g.weight" in tensors
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in (
            (r"^reg_token$", "storage_tokens"),
            (r"gamma_(\d)", r"ls\1.gamma"),
            (r"mlp\.fc1_g", "mlp.w1"),
            (r"mlp\.fc1_x", "mlp.w2"),
            (r"mlp\.fc2", "mlp.w3" if gated else "mlp.fc2"),
        ):
            name = re.sub(old, new, name)
        renamed[name] = tensor
    return renamed


def as_meta(tensors: dict[str, Tensor], mask: str) -> dict[str, Tensor]:
    """A file of Meta's: a masked bias of keys, rounded periods, what only pretraining needs."""
    renamed = with_names(tensors)
    for i in range(2):
        place = f"blocks.{i}.attn"
        queries, values = renamed.pop(f"{place}.q_bias", None), renamed.pop(f"{place}.v_bias", None)
        if queries is None or values is None:
            continue
        renamed[f"{place}.qkv.bias"] = torch.cat([queries, torch.ones_like(queries), values])
        kept = torch.cat([torch.ones(128), torch.zeros(128), torch.ones(128)])
        nan = torch.full_like(kept, torch.nan)
        renamed[f"{place}.qkv.bias_mask"] = nan if mask == "NaN" else kept
    own = {"mask_token": torch.ones(1, 128), "rope_embed.periods": PERIODS.bfloat16()}
    return renamed | own | {"local_cls_norm.weight": torch.ones(128)}


@pytest.mark.parametrize("mask", ["one and zero", "NaN"])
@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3_qkvb", "vit_small_plus_patch16_dinov3"])
def test_dinov3_of_meta_computes_the_same_with_its_rounded_periods(
    name: str, mask: str, tmp_path: Path
) -> None:
    peer = peer_of(name)
    torch.save(as_meta(peer.state_dict(), mask), tmp_path / "weights.pth")
    report = assert_equal_function(
        tmp_path / "weights.pth",
        peer,
        peer,
        (32, 32),
        (48, 40),
        tensors=lambda: as_meta(peer.state_dict(), mask),
        trained_size=32,
    )
    assert report.layout == "DINOv3"
    assert set(report.ignored) >= {"mask_token", "local_cls_norm.weight"}
    exact = open_model(tmp_path / "weights.pth").config
    assert (exact.rotary, exact.norm_eps, exact.heads) == ("dinov3", 1e-5, 2)  # type: ignore[union-attr]


def test_dinov3_with_separate_norms_is_refused() -> None:
    tensors = as_meta(peer_of("vit_small_patch16_dinov3").state_dict(), "NaN")
    with pytest.raises(CheckpointError, match="untie_cls_and_patch_norms"):
        open_model(tensors | {"cls_norm.weight": torch.ones(128)})


@pytest.mark.parametrize(
    ("name", "heads", "hidden"),
    [("vit_huge_plus_patch16_dinov3", 20, 5120), ("vit_7b_patch16_dinov3", 32, 8192)],
)
def test_large_dinov3_is_recognised_without_its_memory(name: str, heads: int, hidden: int) -> None:
    with torch.device("meta"):
        peer = timm.create_model(name, num_classes=0, depth=2)
        tensors = dict(peer.state_dict())
    named = with_names(tensors)
    named["rope_embed.periods"] = torch.empty(32 if heads == 32 else 16, device="meta")
    found = open_model(named).config
    assert found.heads == heads  # type: ignore[union-attr]
    assert int(found.width * found.mlp_ratio) == hidden  # type: ignore[union-attr]
    assert found.mlp == "gated" and found.registers == 4  # type: ignore[union-attr]
