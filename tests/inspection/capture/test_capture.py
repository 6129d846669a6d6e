"""Captured attention is the model's own, and the model stays as it was."""

from typing import Any

import pytest
import timm
import torch
from inspected_models import CLASSES, MODELS, OWN, built, dense, own, transformers_model, verified
from model_settings import random_images
from peers import counterpart, from_timm, from_torchvision_swin
from torch import Tensor, nn

from vision.inspection.capture.capture import Passes, capture
from vision.inspection.methods.rollout import rollout, seed_of
from vision.models.layers import static_bias


@pytest.mark.parametrize("name", MODELS)
def test_capture_of_any_model_leaves_its_logits_and_itself_as_they_were(name: str) -> None:
    model, images = built(name)
    model.train()
    next(model.children()).eval()
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    captured = verified(model, images)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any("observer" in vars(module) for module in model.modules())
    assert captured.logits is not None and captured.logits.shape == (2, CLASSES)
    for layer in captured.layers:
        weights = dense(layer)
        assert weights.shape[2:] == (layer.layout.tokens, layer.layout.tokens)
        if "padded" not in name and "v2" not in name and "transformers swin" not in name:
            assert torch.allclose(weights.sum(dim=-1), torch.ones(()), atol=1e-5)
    assert captured.tokens is not None
    assert captured.tokens.shape[:2] == (2, captured.layout.tokens)


def test_capture_of_our_vit_gives_softmax_of_scaled_products() -> None:
    model, images = built("own vit registers")
    seen: list[Tensor] = []
    module = model.blocks[1].attn  # type: ignore[index, union-attr]
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # type: ignore
    captured = capture(model, images)
    handle.remove()  # type: ignore[operator]
    q, k, _ = module.qkv(seen[0]).chunk(3, dim=-1)  # type: ignore[operator, union-attr]
    for head in range(3):
        part = slice(16 * head, 16 * (head + 1))
        for image in range(2):
            scores = q[image, :, part] @ k[image, :, part].T / 4
            expected = scores.exp() / scores.exp().sum(dim=1, keepdim=True)
            assert torch.allclose(captured.layers[1].weights[image, head], expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Dinov2WithRegisters", "Swin", "Swinv2"])
def test_capture_of_transformers_equals_its_own_eager_attentions(kind: str) -> None:
    from inspected_models import HF, HF_SWIN

    settings = HF_SWIN if "Swin" in kind else HF
    model = transformers_model(kind, settings)
    images = random_images(2, 3, settings["image_size"], settings["image_size"])
    captured = capture(model, images)
    if kind != "Swinv2":
        model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(images, output_attentions=True).attentions
    # transformers hands out the last block's attention of each stage of a Swin, or all.
    assert expected
    for theirs in expected:
        found = [layer.weights.flatten(0, -4) for layer in captured.layers]
        near = [torch.allclose(w, theirs, atol=1e-5) for w in found if w.shape == theirs.shape]
        assert any(near)


def test_capture_of_timm_equals_what_its_unfused_attention_drops_out() -> None:
    model, images = built("timm dinov2 registers")
    captured = capture(model, images)
    seen: list[Tensor] = []
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    with torch.no_grad():
        model(images)
    for layer, weights in zip(captured.layers, seen, strict=True):
        assert torch.allclose(layer.weights, weights, atol=1e-6)


def test_capture_of_torchvision_vit_equals_weights_that_its_attention_returns() -> None:
    model, images = built("torchvision vit")
    captured = capture(model, images)
    for i, layer in enumerate(captured.layers):
        module: Any = model.get_submodule(f"encoder.layers.encoder_layer_{i}.self_attention")
        assert layer.name == f"encoder.layers.encoder_layer_{i}.self_attention"
        seen: list[Tensor] = []
        handle = module.register_forward_pre_hook(lambda _, args, s=seen: s.append(args[0]))
        with torch.no_grad():
            model(images)
            handle.remove()
            expected = module(seen[0], seen[0], seen[0], average_attn_weights=False)[1]
        assert torch.allclose(layer.weights, expected, atol=1e-6)


def test_capture_under_attention_that_is_asked_for_weights_hands_them_out() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 8, 8, stride=8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, images: Tensor) -> Tensor:
            x = self.patches(images).flatten(2).transpose(1, 2)
            out, weights = self.attention(x, x, x)
            return (weights @ out).mean(dim=1)

    captured = verified(Asking(), random_images(2, 3, 16, 24))
    assert captured.layers[0].layout.grid == (2, 3)


# Gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["own vit", "own swin padded", "own swin v2"])
def test_gradient_of_attention_equals_finite_differences(name: str) -> None:
    model, images = built(name)
    model, images = model.double(), images.double()
    captured = capture(model, images, targets=[3, 5], gradients=True)
    step = 1e-6
    for layer in (captured.layers[0], captured.layers[-1]):
        assert layer.gradient is not None
        place = (1, *(size // 2 for size in layer.weights.shape[1:]))
        flat = (
            place if layer.layout.index is None else (layer.weights.shape[1] + place[1], *place[2:])
        )
        logits = []
        for sign in (1, -1):
            module = model.get_submodule(layer.name)

            def moved(weights: Tensor, flat: Any = flat, move: float = sign * step) -> Tensor:
                weights = weights.clone()
                weights[flat] += move
                return weights

            module.observer = moved  # type: ignore[assignment]
            with torch.no_grad():
                logits.append(model(images)[1, 5].item())
            module.observer = None  # type: ignore[assignment]
        expected = (logits[0] - logits[1]) / (2 * step)
        assert layer.gradient[place].item() == pytest.approx(expected, rel=1e-4, abs=1e-8)


def test_attention_and_gradient_of_timm_equal_ours_with_its_weights() -> None:
    peer = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=(64, 48),
        depth=3,
        num_heads=3,
        embed_dim=48,
        num_classes=11,
    )
    ours = counterpart(peer, (64, 48), "vit_base", from_timm, patch_size=16, width=48, depth=3,
                       heads=3, norm_eps=1e-6)  # fmt: skip
    _assert_same_captures(ours, peer, (64, 48))


def test_attention_and_gradient_of_torchvision_swin_equal_ours_with_its_weights() -> None:
    from torchvision.models import SwinTransformer

    peer = SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=11)
    ours = counterpart(peer, (64, 96), "swin_tiny", from_torchvision_swin, width=24, depths=[2, 2],
                       heads=[2, 4], window=4)  # fmt: skip
    _assert_same_captures(ours, peer, (64, 96))


def _assert_same_captures(ours: nn.Module, peer: nn.Module, size: tuple[int, int]) -> None:
    images = random_images(2, 3, *size)
    found = capture(ours, images, targets=4, gradients=True)
    expected = capture(peer, images, targets=4, gradients=True)
    assert found.depth == expected.depth
    for layer, theirs in zip(found.layers, expected.layers, strict=True):
        assert layer.layout.grid == theirs.layout.grid
        assert torch.allclose(dense(layer), dense(theirs), atol=1e-5)
        gradient, wanted = dense(layer, layer.gradient), dense(theirs, theirs.gradient)
        assert torch.allclose(gradient, wanted, atol=1e-4 * wanted.abs().max().item())
        assert layer.inputs is not None and theirs.inputs is not None
        assert torch.allclose(layer.inputs, theirs.inputs, atol=1e-4)
        assert layer.share is not None and theirs.share is not None
        assert torch.allclose(layer.share, theirs.share, atol=1e-5)
    assert found.tokens is not None and expected.tokens is not None
    assert torch.allclose(found.tokens, expected.tokens, atol=1e-4)


@pytest.mark.parametrize("name", ["own vit", "own swin", "timm vit", "torchvision vit"])
def test_gradients_of_a_frozen_model_exist_and_touch_no_parameter(name: str) -> None:
    model, images = built(name)
    thawed = capture(model, images, gradients=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.requires_grad_(False)
    frozen = capture(model, images, gradients=True)
    assert frozen.logits is not None and frozen.targets is not None
    assert torch.equal(frozen.targets, frozen.logits.argmax(dim=1))
    for ours, theirs in zip(frozen.layers, thawed.layers, strict=True):
        assert ours.gradient is not None and theirs.gradient is not None
        assert theirs.gradient.abs().max() > 0
        assert torch.allclose(ours.gradient, theirs.gradient, atol=1e-6)


@pytest.mark.parametrize("name", ["vit_base", "swin_tiny"])
def test_gradients_with_recomputed_activations_are_the_same(name: str) -> None:
    images = random_images(1, 3, 32, 32)
    plain = capture(own(name, (32, 32)), images, gradients=True)
    again = capture(own(name, (32, 32), checkpoint_activations=True), images, gradients=True)
    assert len(again.layers) == len(plain.layers)
    for ours, theirs in zip(again.layers, plain.layers, strict=True):
        assert ours.gradient is not None and theirs.gradient is not None
        assert torch.allclose(ours.gradient, theirs.gradient, atol=1e-7)


# Sizes and precisions ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit_base", "swin_tiny", "swinv2_tiny"])
@pytest.mark.parametrize("size", [(80, 52), (32, 96), (20, 20)])
def test_capture_at_another_size_than_the_model_was_built_for(
    name: str, size: tuple[int, int]
) -> None:
    changes: dict[str, Any] = {} if name == "vit_base" else {"window": [2, 3]}
    model = own(name, (48, 64), **changes)
    captured = verified(model, random_images(1, 3, *size))
    found = rollout(captured, seed_of(captured))
    assert found.sum().item() == pytest.approx(1, abs=1e-5)
    first = captured.layers[0].layout
    for axis in (0, 1):
        assert first.grid[axis] == -(-size[axis] // first.stride[axis])


@pytest.mark.parametrize("name", ["own vit", "own swin padded", "timm vit", "torchvision swin"])
def test_capture_in_low_precision_passes_its_checks(name: str) -> None:
    model, images = built(name)
    exact = capture(model, images)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = verified(model, images, gradients=True)
    low = verified(model.bfloat16(), images.bfloat16())
    for layers in (mixed.layers, low.layers):
        assert torch.allclose(layers[0].weights.float(), exact.layers[0].weights, atol=0.1)


def test_capture_while_biases_are_held_is_the_same() -> None:
    model, images = built("own swin padded")
    with static_bias(model):
        held = verified(model, images)
    for ours, theirs in zip(held.layers, capture(model, images).layers, strict=True):
        assert torch.equal(ours.weights, theirs.weights)


# Selection --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["own swin padded", "torchvision swin padded", "timm vit"])
def test_selected_layers_are_those_of_the_whole_capture(name: str) -> None:
    model, images = built(name)
    whole = capture(model, images)
    some = capture(model, images, layers=[-1, whole.layers[0].name])
    assert [layer.number for layer in some.layers] == [0, whole.depth - 1]
    assert some.depth == whole.depth and some.layout.grid == whole.layout.grid
    for layer in some.layers:
        assert torch.equal(layer.weights, whole.layers[layer.number].weights)


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("name", ["own vit", "own swin padded", "timm swin"])
def test_reduced_capture_keeps_one_matrix_per_layer(name: str, fusion: Any) -> None:
    model, images = built(name)
    whole, reduced = capture(model, images), capture(model, images, reduce=fusion)
    for layer, small in zip(whole.layers, reduced.layers, strict=True):
        axis = 1 if layer.layout.index is None else 2
        operation = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}[fusion]
        assert torch.allclose(small.weights, operation(layer.weights, axis, keepdim=True))
        assert small.weights.untyped_storage().nbytes() == small.weights.numel() * 4


@pytest.mark.parametrize("name", [n for n in OWN if "swin" not in n])
def test_prefix_tokens_are_named(name: str) -> None:
    model, images = built(name)
    prefix = capture(model, images, layers=[0]).layout.prefix
    expected = {
        "own vit": ("class",),
        "own vit registers": ("class", "register 1", "register 2"),
        "own vit distilled": ("class", "distillation", "register 1"),
        "own vit class and mean": ("class",),
        "own vit mean": (),
    }
    assert prefix == expected[name]


@pytest.mark.parametrize(
    ("name", "shares"),
    [("own vit distilled", {0: 0.5, 1: 0.5}), ("own vit class and mean", {0: 0.5})],
)
def test_pooled_query_is_what_the_head_takes(name: str, shares: dict[int, float]) -> None:
    captured = capture(*built(name), layers=[-1])
    seed = seed_of(captured)[0, 0]
    prefix = len(captured.layout.prefix)
    assert {i: float(s) for i, s in enumerate(seed[:prefix]) if s > 0} == shares
    cells = 1 - sum(shares.values())
    assert torch.allclose(seed[prefix:], torch.tensor(cells / captured.layout.cells))


@pytest.mark.parametrize("name", ["own vit", "own swin padded", "timm vit"])
def test_passes_run_the_model_once_for_the_gradients_of_several_classes(name: str) -> None:
    model, images = built(name)
    runs: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, args: runs.append(len(args[0])))
    passes = Passes(model, images)
    targets = torch.tensor([[1, 3, 0], [2, 2, 4]])
    found = passes.gradients(targets)
    assert len(runs) == 1 and passes.gradients(targets[:, 1:2]) == found[1:2] and len(runs) == 1
    assert passes.plain is passes.plain and len(runs) == 2
    handle.remove()
    for target, captured in zip(targets.T, found, strict=True):
        alone = capture(model, images, targets=target, gradients=True)
        assert captured.targets is not None and captured.targets.tolist() == target.tolist()
        for one, other in zip(captured.layers, alone.layers, strict=True):
            assert torch.equal(one.weights, other.weights)
            assert torch.allclose(one.need_gradient(), other.need_gradient(), atol=1e-7)
            assert torch.equal(one.inputs, other.inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["vit_mini", "swin_mini"])
def test_passes_of_a_model_that_recomputes_its_activations_are_the_same(name: str) -> None:
    images, targets = random_images(1, 3, 32, 32), torch.tensor([[0, 2]])
    plain = Passes(own(name, (32, 32)), images).gradients(targets)
    again = Passes(own(name, (32, 32), checkpoint_activations=True), images).gradients(targets)
    for one, other in zip(plain, again, strict=True):
        for layer, same in zip(one.layers, other.layers, strict=True):
            assert torch.allclose(layer.need_gradient(), same.need_gradient(), atol=1e-7)
