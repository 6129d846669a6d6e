"""Gradient methods against their formulas, written out with whole matrices."""

import pytest
import torch
from inspected_models import built, dense, merge_matrix, rows_normal
from torch import Tensor

from vision.inspection.capture.capture import capture, logits_of
from vision.inspection.capture.captured import Captured, LayerAttention
from vision.inspection.methods.layer_maps import attention_gradcam, token_gradcam
from vision.inspection.methods.rollout import chefer, gradient_rollout, seed_of

NAMES = ["own vit registers", "own swin padded", "timm vit", "torchvision swin padded"]


def taken(name: str) -> Captured:
    model, images = built(name)
    return capture(model, images, targets=[2, 4], gradients=True)


def product(layer: LayerAttention, clamp: str) -> Tensor:
    both = dense(layer) * dense(layer, layer.gradient)
    return both.clamp(min=0).mean(dim=1) if clamp == "before" else both.mean(dim=1).clamp(min=0)


def merged(result: Tensor, below: LayerAttention | None, layer: LayerAttention) -> Tensor:
    if below is None or below.layout.grid == layer.layout.grid:
        return result
    return merge_matrix(layer.layout.grid, below.layout.grid).to(result.dtype) @ result


@pytest.mark.parametrize("clamp", ["after", "before"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_rollout_equals_product_of_whole_matrices(
    name: str, normalize: bool, clamp: str
) -> None:
    captured = taken(name)
    result = torch.eye(captured.layers[0].layout.tokens)
    below = None
    for layer in captured.layers:
        matrix = product(layer, clamp)
        if normalize:
            total = matrix.sum(dim=-1, keepdim=True)
            matrix = torch.where(total > 0, matrix / total, matrix)
        matrix = rows_normal(0.5 * matrix + 0.5 * torch.eye(matrix.shape[-1]))
        result = matrix @ merged(result, below, layer)
        below = layer
    seed = seed_of(captured)
    found = gradient_rollout(captured, seed, clamp=clamp, normalize=normalize)  # type: ignore
    assert torch.allclose(found, seed @ result, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_chefer_equals_the_update_of_the_whole_relevance_matrix(name: str) -> None:
    captured = taken(name)
    relevance = torch.eye(captured.layers[0].layout.tokens, dtype=torch.float64)
    identity = relevance
    below = None
    for layer in captured.layers:
        relevance = merged(relevance, below, layer)
        relevance = relevance + product(layer, "before").double() @ relevance
        identity = merged(identity, below, layer)
        below = layer
    seed = seed_of(captured)
    found = chefer(captured, seed)
    whole = seed.double() @ relevance
    expected = whole - seed.double() @ identity
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-6 * expected.max().item())
    assert found.max() > 0 and found.min() >= 0
    if "vit" in name:  # with a class token no cell is touched by the identity path
        cells = slice(len(captured.layout.prefix), None)
        assert torch.allclose(found[..., cells], whole[..., cells].float(), rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_attention_gradcam_equals_heads_weighted_one_by_one(name: str) -> None:
    captured = taken(name)
    layer = captured.layers[-1]
    seed = seed_of(captured)
    weights, gradient = dense(layer), dense(layer, layer.gradient)
    prefix = len(layer.layout.prefix)
    expected = torch.zeros(2, layer.layout.cells)
    for image in range(2):
        for head in range(weights.shape[1]):
            row = seed[image, 0] @ weights[image, head]
            slope = (seed[image, 0] @ gradient[image, head])[prefix:].mean()
            expected[image] += slope * row[prefix:] / weights.shape[1]
    found = attention_gradcam(layer, seed)[:, 0]
    assert torch.allclose(found[:, prefix:], expected.clamp(min=0), rtol=1e-4, atol=1e-8)
    assert torch.all(found[:, :prefix] == 0)


@pytest.mark.parametrize(
    ("name", "norm", "number"),
    [
        ("own vit", "blocks.0.norm1", 0),
        ("own vit", "blocks.2.norm1", 2),
        ("timm vit", "blocks.1.norm1", 1),
        ("torchvision vit", "encoder.layers.encoder_layer_1.ln_1", 1),
        ("transformers vit", "vit.layers.1.layernorm_before", 1),
    ],
)
def test_token_gradcam_equals_grad_cam_on_the_first_norm_of_a_block(
    name: str, norm: str, number: int
) -> None:
    model, images = built(name)
    layer = capture(model, images, targets=1, gradients=True).layers[number]
    found = token_gradcam(layer)
    kept: list[Tensor] = []
    model.get_submodule(norm).register_forward_hook(lambda _, args, out: kept.append(out))
    logits = logits_of(model(images.requires_grad_()))
    assert logits is not None
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), kept)
    assert layer.inputs_gradient is not None and gradient.abs().max() > 0
    assert torch.allclose(layer.inputs_gradient, gradient, rtol=1e-3, atol=1e-6)
    for image in range(2):
        weights = gradient[image, 1:].mean(dim=0)
        expected = (kept[0][image, 1:] @ weights).clamp(min=0)
        assert torch.allclose(found[image, 1:], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["own swin padded", "torchvision swin padded"])
def test_token_gradcam_of_windows_is_in_raster_order(name: str) -> None:
    """The first block is given its windows' tokens, which in raster order are the first norm's."""
    model, images = built(name)
    captured = capture(model, images, targets=1, gradients=True)
    layer = captured.layers[1]
    assert layer.inputs is not None and layer.inputs_gradient is not None
    weights = layer.inputs_gradient.mean(dim=1)
    expected = torch.stack(
        [(x @ w).clamp(min=0) for x, w in zip(layer.inputs, weights, strict=True)]
    )
    assert torch.allclose(token_gradcam(layer), expected, rtol=1e-4, atol=1e-7)
    if name.startswith("torchvision"):
        seen: list[Tensor] = []
        module = model.get_submodule(layer.name)
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with torch.no_grad():
            model(images)
        assert torch.allclose(layer.inputs, seen[0].flatten(1, 2), atol=1e-5)


def test_gradient_methods_without_gradients_say_how_to_get_them() -> None:
    captured = capture(*built("own vit"))
    with pytest.raises(ValueError, match="gradients=True"):
        chefer(captured, seed_of(captured))
    with pytest.raises(ValueError, match="gradients=True"):
        token_gradcam(captured.layers[-1])
    with pytest.raises(ValueError, match="'after' or 'before'"):
        gradient_rollout(taken("own vit"), seed_of(captured), clamp="never")  # type: ignore
