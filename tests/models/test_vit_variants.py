"""What published weights need beyond the plain ViT: two tokens, two poolings, a gated MLP."""

from typing import Any

import pytest
import torch
from measuring import counted_macs, kept_bytes
from model_settings import SMALL_VIT, model_config, random_images, small_model
from peers import CLASSES, assert_equal, counterpart, from_timm
from timm.layers import SwiGLUPacked
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vision.config import ConfigError
from vision.models.build import build_model
from vision.models.cost.count import cost

TIMM: dict[str, Any] = {"patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "two tokens": {"distillation_token": True},
    "two tokens without positions": {"distillation_token": True, "class_token_position": False},
    "two tokens, norm after": {"distillation_token": True, "pool_norm": "after"},
    "both poolings": {"pool": "class_token_and_mean", "registers": 2},
    "gated MLP": {"mlp": "gated", "activation": "silu", "mlp_ratio": 2.5},
    "gated MLP with dropout": {
        "mlp": "gated",
        "activation": "silu",
        "mlp_ratio": 2.5,
        "dropout": 0.1,
    },
}


def test_vit_with_a_distillation_token_equals_timm() -> None:
    peer = VisionTransformerDistilled(img_size=(32, 48), num_classes=CLASSES, **TIMM)
    ours = counterpart(peer, (32, 48), "vit_base", **SMALL_VIT, distillation_token=True)
    assert_equal(ours, peer, from_timm, random_images(2, 3, 32, 48))
    assert torch.isfinite(ours(random_images(2, 3, 64, 64))).all()


def test_vit_with_a_gated_mlp_equals_timm() -> None:
    gated: dict[str, Any] = {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 5.0}
    peer = VisionTransformer(img_size=32, num_classes=CLASSES, **gated, **TIMM)
    changes: dict[str, Any] = {"mlp": "gated", "activation": "silu", "mlp_ratio": 2.5}
    ours = counterpart(peer, (32, 32), "vit_base", **SMALL_VIT, **changes)
    assert_equal(ours, peer, from_timm, random_images(2, 3, 32, 32))


def test_vit_with_both_poolings_sees_the_class_token_and_the_mean_of_the_patches() -> None:
    model = small_model("vit_base", (32, 32), pool="class_token_and_mean", registers=2).eval()
    images = random_images(2, 3, 32, 32)
    with torch.no_grad():
        tokens = model.forward_features(images)
        pooled = torch.cat([tokens[:, 0], tokens[:, 3:].mean(1)], dim=1)
        expected = nn.functional.linear(pooled, model.head.weight, model.head.bias)
        torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize("classes", [0, 7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cost_of_a_variant_equals_what_the_model_has_and_does(variant: str, classes: int) -> None:
    config = model_config("vit_base", **(SMALL_VIT | VARIANTS[variant]))
    figures = cost(config, (32, 48), classes=classes)
    model = build_model(config, (32, 48), classes=classes)
    assert figures.parameters == sum(p.numel() for p in model.parameters())
    assert figures.activation_bytes == kept_bytes(config, (32, 48), classes)
    if classes:
        assert cost(config, (32, 48)).macs == counted_macs(config, (32, 48))
    assert figures.layers[-1].output == tuple(model(random_images(1, 3, 32, 48)).shape[1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": "class_token_and_mean", "class_token": False}, "needs class_token=true"),
        ({"pool": "class_token_and_mean", "pool_norm": "after"}, "needs pool_norm=before"),
        ({"distillation_token": True, "pool": "mean"}, "needs pool=class_token"),
    ],
)
def test_vit_config_with_a_contradiction_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config("vit_base", **changes)


def test_vit_with_a_distillation_token_treats_it_like_the_class_token() -> None:
    model = small_model("vit_base", (32, 32), distillation_token=True)
    assert model.layer_of("dist_token") == 0
    assert model.layer_of("head_dist.weight") == model.layer_of("head.weight")
    assert "dist_token" in model.no_weight_decay()
