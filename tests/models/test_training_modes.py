"""Recomputed activations, stochastic depth, dropout, and precision."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_settings import random_images, small_model
from timm.layers.drop import DropPath as TimmDropPath
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from vision.models.layers import Classifier, DropPath, drop_path_rates

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_base", {}),
    "vit rotary": ("vit_base", {"positions": "rotary", "layer_scale": 0.1, "qk_norm": True}),
    "vit fourier": ("vit_base", {"positions": "fourier", "registers": 2}),
    "swin": ("swin_tiny", {}),
    "swin_v2": ("swinv2_tiny", {}),
}
RANDOM: dict[str, Any] = {"drop_path": 0.3, "dropout": 0.2, "attention_dropout": 0.2}


def step(model: Classifier, size: tuple[int, int], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a training step under a seed."""
    model.train().zero_grad()
    torch.manual_seed(seed)
    loss = F.cross_entropy(model(random_images(4, 3, *size)), torch.arange(4))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: g.clone() for name, g in gradients.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("randomness", [{}, RANDOM], ids=["none", "random"])
def test_checkpointed_activations_change_no_bit(family: str, randomness: dict[str, Any]) -> None:
    name, changes = FAMILIES[family]
    size = (32, 40)
    plain = small_model(name, size, **changes, **randomness)
    recomputed = small_model(name, size, checkpoint_activations=True, **changes, **randomness)
    loss, gradients = step(plain, size, seed=3)
    other_loss, other_gradients = step(recomputed, size, seed=3)
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == other_gradients.keys()
    assert all(torch.equal(gradients[n], other_gradients[n]) for n in gradients)
    if randomness:  # and the seed mattered
        assert not torch.equal(loss, step(plain, size, seed=4)[0])


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_checkpointed_activations_keep_fewer_tensors_for_the_backward_pass(family: str) -> None:
    name, changes = FAMILIES[family]
    kept = []
    for recompute in (False, True):
        model = small_model(name, (32, 32), checkpoint_activations=recompute, **changes)
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(random_images(4, 3, 32, 32))
        kept.append(sum(sizes))
    assert kept[1] < 0.5 * kept[0]


# Randomness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 12])
def test_drop_path_rates_rise_as_timms_or_stay(depth: int) -> None:
    peer = VisionTransformer(
        img_size=8, patch_size=8, embed_dim=4, num_heads=1, depth=depth, drop_path_rate=0.3
    )
    expected = [
        b.drop_path1.drop_prob if isinstance(b.drop_path1, TimmDropPath) else 0.0
        for b in peer.blocks
    ]
    assert drop_path_rates(0.3, "linear", depth) == pytest.approx(expected)
    assert drop_path_rates(0.3, "uniform", depth) == [0.3] * depth


@pytest.mark.parametrize(("name", "depth"), [("vit_base", 3), ("swin_tiny", 7), ("swinv2_tiny", 7)])
@pytest.mark.parametrize("schedule", ["linear", "uniform"])
def test_drop_path_of_a_model_is_spread_over_all_its_blocks(
    name: str, depth: int, schedule: str
) -> None:
    model = small_model(name, (32, 32), drop_path=0.4, drop_path_schedule=schedule)
    rates = [m.rate for m in model.modules() if isinstance(m, DropPath)]
    assert rates == pytest.approx(
        [0.4] * depth if schedule == "uniform" else [0.4 * i / (depth - 1) for i in range(depth)]
    )


def test_drop_path_drops_whole_samples_and_keeps_the_expectation() -> None:
    torch.manual_seed(0)
    drop = DropPath(0.3)
    out = drop(torch.ones(20_000, 3, 2))
    kept = out[:, 0, 0]
    assert torch.equal(out, kept[:, None, None].expand_as(out))
    assert torch.equal(kept.unique(), torch.tensor([0, 1 / 0.7]))
    assert (kept.mean() - 1).abs() < 0.02
    assert torch.equal(drop.eval()(out), out)


@pytest.mark.parametrize("name", ["vit_base", "swin_tiny", "swinv2_tiny"])
def test_drop_path_near_one_leaves_the_embedding(name: str) -> None:
    # With every branch dropped a ViT is its embedding and norm; the rest must not depend on blocks.
    model = small_model(name, (32, 32), drop_path=0.999_999, drop_path_schedule="uniform").train()
    images = random_images(2, 3, 32, 32)
    torch.manual_seed(0)
    expected = model(images)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if ".blocks." in f".{part}":
                parameter.zero_()
    assert torch.equal(model(images), expected)
    assert not torch.equal(model.eval()(images), small_model(name, (32, 32)).eval()(images))


@pytest.mark.parametrize("name", ["vit_base", "swin_tiny", "swinv2_tiny"])
@pytest.mark.parametrize("setting", ["dropout", "attention_dropout", "drop_path"])
def test_every_kind_of_dropout_acts_in_training_only(name: str, setting: str) -> None:
    plain = small_model(name, (32, 32)).eval()
    model = small_model(name, (32, 32), **dict[str, Any]({setting: 0.5}))
    images = random_images(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model.eval()(images), plain(images))
        torch.manual_seed(0)
        first = model.train()(images)
        assert (first - model(images)).abs().max() > 1e-3
        torch.manual_seed(0)
        assert torch.equal(model(images), first)


# Precision --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", [True, False])
def test_model_under_bfloat16_autocast_stays_close_to_single_precision(
    family: str, training: bool
) -> None:
    name, changes = FAMILIES[family]
    model = small_model(name, (36, 28), **changes).train(training)
    images = random_images(2, 3, 36, 28)
    expected = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(images)
    assert ((found - expected).norm() / expected.norm()).item() < 0.05
    found.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_model_in_bfloat16_stays_close_to_single_precision(family: str) -> None:
    name, changes = FAMILIES[family]
    model = small_model(name, (36, 28), **changes).eval()
    images = random_images(2, 3, 36, 28)
    with torch.no_grad():
        expected = model(images)
        found = model.to(torch.bfloat16)(images.bfloat16())
    assert found.dtype == torch.bfloat16
    assert ((found.float() - expected).norm() / expected.norm()).item() < 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_model_in_double_precision_computes_in_it(family: str) -> None:
    # A difference quotient over a step of 1e-6 is good to 1e-6 in double precision and to nothing
    # in single precision.
    name, changes = FAMILIES[family]
    model = small_model(name, (32, 32), **changes).double().eval()
    images, direction = (random_images(1, 3, 32, 32, seed=s).double() for s in (0, 1))
    with torch.no_grad():
        ahead, behind = (model(images + h * direction)[0, 0] for h in (1e-6, -1e-6))
    images.requires_grad_()
    (gradient,) = torch.autograd.grad(model(images)[0, 0], images)
    slope = (gradient * direction).sum().item()
    assert (ahead - behind).item() / 2e-6 == pytest.approx(slope, rel=1e-5)
