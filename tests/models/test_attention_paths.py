"""Fused, explicit and static: ways to the same logits."""

from typing import Any

import pytest
import torch
from model_settings import random_images, small_model
from torch import Tensor, nn

from vision.models.attention import Observer, attention
from vision.models.layers import static_bias
from vision.models.swin import WindowAttention
from vision.models.vit import Attention

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_base", {}),
    "vit rotary": ("vit_base", {"positions": "rotary", "qk_norm": True, "registers": 2}),
    "swin": ("swin_tiny", {}),
    "swin without bias": ("swin_tiny", {"positions": "none"}),
    "swin_v2": ("swinv2_tiny", {}),
    "swin_v2 without bias": ("swinv2_tiny", {"positions": "none"}),
}
SWINS = [family for family in FAMILIES if family.startswith("swin")]
SIZE = (36, 28)
"""Windows of 4 do not divide the grids, and shifts are masked."""


def build(family: str) -> Any:
    name, changes = FAMILIES[family]
    return small_model(name, SIZE, **changes).eval()


def attentions(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, Attention | WindowAttention)]


def recorder(seen: list[Tensor]) -> Observer:
    """Notes the weights and leaves them as they are."""

    def observe(weights: Tensor) -> Tensor:
        seen.append(weights)
        return weights

    return observe


# One function, two paths ------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [None, 1, 3])
def test_attention_with_and_without_an_observer_follows_its_formula(windows: int | None) -> None:
    q, k, v = (random_images(6, 2, 5, 4, seed=seed) for seed in (1, 2, 3))
    bias = None if windows is None else random_images(windows, 2, 5, 5, seed=4)
    scores = 0.7 * torch.einsum("bhnd,bhmd->bhnm", q, k)
    if bias is not None:
        # Images first, windows second: images 0 and 1 of the batch have three windows each.
        scores = scores + torch.stack([bias[i % len(bias)] for i in range(6)])
    weights = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
    expected = torch.einsum("bhnm,bhmd->bnhd", weights, v).flatten(2)
    fused = attention(q, k, v, bias, scale=0.7)
    seen: list[Tensor] = []
    explicit = attention(q, k, v, bias, scale=0.7, observer=recorder(seen))
    assert torch.allclose(fused, expected, atol=1e-6)
    assert torch.allclose(explicit, expected, atol=1e-6)
    assert torch.allclose(seen[0], weights, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_those_of_double_precision(dtype: torch.dtype) -> None:
    inputs = [random_images(6, 2, 5, 4, seed=seed).to(dtype) for seed in (1, 2, 3)]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    scores = 0.7 * torch.einsum("bhnd,bhmd->bhnm", *exact[:2])
    expected = torch.einsum("bhnm,bhmd->bnhd", scores.softmax(dim=-1), exact[2]).flatten(2)
    expected.square().sum().backward()
    inputs = [tensor.requires_grad_() for tensor in inputs]
    found = attention(*inputs, scale=0.7)
    found.double().square().sum().backward()
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=0.02, atol=0.02)
    for tensor, reference in zip(inputs, exact, strict=True):
        assert tensor.grad is not None and reference.grad is not None
        error = (tensor.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert error < 0.02


@pytest.mark.parametrize("observed", [True, False])
def test_attention_dropout_keeps_the_expectation(observed: bool) -> None:
    q, k = random_images(1, 1, 4, 2, seed=1), random_images(1, 1, 4, 2, seed=2)
    v = torch.ones(1, 1, 4, 1)
    observer = (lambda weights: weights) if observed else None
    torch.manual_seed(0)
    out = torch.stack(
        [attention(q, k, v, scale=1.0, dropout=0.4, observer=observer) for _ in range(4000)]
    )
    # Rows sum to 1, so without dropout every output is 1.
    assert out.std() > 0.3
    assert (out.mean() - 1).abs() < 0.02


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", [True, False])
def test_model_that_is_observed_gives_the_same_logits(family: str, training: bool) -> None:
    model = build(family).train(training)
    images = random_images(2, 3, *SIZE)
    with torch.no_grad():
        expected = model(images)
        seen: list[Tensor] = []
        for module in attentions(model):
            module.observer = recorder(seen)
        found = model(images)
    assert (found - expected).abs().max().item() < 1e-5
    assert len(seen) == len(attentions(model)) >= 3
    for weights in seen:
        assert (weights >= 0).all()
        assert torch.allclose(weights.sum(dim=-1), torch.ones(()), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_whose_observer_changes_the_weights_follows_them(family: str) -> None:
    model = build(family)
    module = attentions(model)[1]
    with torch.no_grad():
        tokens = random_images(
            2, 4 * 16 if family.startswith("swin") else 9, module.proj.in_features
        )
        extra = (None,)
        module.observer = torch.zeros_like
        nothing = module(tokens, *extra)
        # Weights of zero leave the bias of the output layer.
        assert torch.allclose(nothing, module.proj.bias.expand_as(nothing), atol=1e-6)
        images = random_images(2, 3, *SIZE)
        changed = model(images)
        module.observer = None
        assert (changed - model(images)).abs().max().item() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_observed_weights_receive_gradients(family: str) -> None:
    model = build(family)
    seen: list[Tensor] = []

    def observe(weights: Tensor) -> Tensor:
        weights.retain_grad()
        seen.append(weights)
        return weights

    attentions(model)[0].observer = observe
    model(random_images(2, 3, *SIZE))[:, 0].sum().backward()
    assert seen[0].grad is not None
    assert seen[0].grad.abs().sum() > 0


# Static biases ----------------------------------------------------------------------------------


def held(model: nn.Module) -> list[Any]:
    return [m.held for m in model.modules() if isinstance(m, WindowAttention)]


@pytest.mark.parametrize("family", FAMILIES)
def test_static_bias_gives_the_same_logits_and_is_gone_afterwards(family: str) -> None:
    model = build(family)
    images, other = random_images(2, 3, *SIZE), random_images(2, 3, 44, 20)
    with torch.no_grad():
        expected = model(images), model(other)
        with static_bias(model):
            assert "without" in family or all(bias is not None for bias in held(model))
            assert torch.equal(model(images), expected[0])
            assert torch.equal(model(other), expected[1])
        assert all(bias is None for bias in held(model))
        assert torch.equal(model(images), expected[0])


def test_static_bias_after_an_exception_is_gone() -> None:
    model = build("swin")
    with pytest.raises(KeyError), static_bias(model):
        raise KeyError
    assert all(bias is None for bias in held(model))


def test_static_bias_that_cannot_be_computed_leaves_nothing_behind() -> None:
    model = build("swin")
    attentions(model)[-1].relative_position_bias_table = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises((IndexError, RuntimeError)), static_bias(model):
        pass
    assert all(bias is None for bias in held(model))


@pytest.mark.parametrize("family", ["swin", "swin_v2"])
def test_static_bias_computes_each_bias_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    calls: list[WindowAttention] = []
    kind = type(attentions(model)[0])
    compute = kind.position_bias

    def counted(self: WindowAttention) -> Tensor:
        calls.append(self)
        return compute(self)

    monkeypatch.setattr(kind, "position_bias", counted)
    with torch.no_grad(), static_bias(model):
        for _ in range(3):
            model(random_images(1, 3, *SIZE))
    assert len(calls) == len(attentions(model))


@pytest.mark.parametrize("family", ["swin", "swin_v2"])
def test_bias_outside_static_bias_follows_every_kind_of_update(family: str) -> None:
    model = build(family)
    images = random_images(2, 3, *SIZE)
    name = {
        "swin": "layers.0.blocks.1.attn.relative_position_bias_table",
        "swin_v2": "layers.0.blocks.1.attn.cpb_mlp.2.weight",
    }[family]
    other = {name: random_images(*model.get_parameter(name).shape, seed=8)}
    with torch.no_grad():
        before = model(images)
        with static_bias(model):
            model(images)
        by_call = torch.func.functional_call(model, other, (images,))
        assert (by_call - before).abs().max().item() > 1e-3
        assert torch.equal(model(images), before)
        model.get_parameter(name).data = other[name]
        assert torch.equal(model(images), by_call)


def test_static_bias_entered_again_and_again_compiles_two_graphs() -> None:
    model = small_model("swin_tiny", (16, 16), depths=[1], heads=[2]).eval()
    images = random_images(1, 3, 16, 16)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            expected = model(images)
            assert torch.allclose(compiled(images), expected, atol=1e-6)
            with static_bias(model):
                assert torch.allclose(compiled(images), expected, atol=1e-6)
    assert len(graphs) == 2


@pytest.mark.parametrize("family", SWINS)
def test_static_bias_works_with_gradients_for_everything_else(family: str) -> None:
    model = build(family)
    images = random_images(2, 3, *SIZE)
    model(images).sum().backward()
    expected = model.get_parameter("patch_embed.proj.weight").grad
    model.zero_grad()
    with static_bias(model):
        model(images).sum().backward()
    found = model.get_parameter("patch_embed.proj.weight").grad
    assert expected is not None
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)  # type: ignore[arg-type]
