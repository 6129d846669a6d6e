"""Low-rank additions: what they compute, that they merge, and that models work with them."""

from typing import Any

import pytest
import torch
from model_settings import model_config, random_images, small_model
from torch import Tensor, nn

from vision.config import ConfigError
from vision.models.build import build_model
from vision.models.layers import static_bias
from vision.models.lora import LoraLinear, add_lora, merge_lora, merge_tensors

MODELS = ["vit_base", "swin_tiny", "swinv2_tiny"]
EVERYWHERE = ("q", "k", "v", "proj", "fc1", "fc2")
SIZE = (32, 24)


def with_lora(name: str, targets: tuple[str, ...] = EVERYWHERE, **changes: Any) -> Any:
    """A small model whose additions are not zero."""
    model = small_model(name, SIZE, **changes)
    add_lora(model, rank=2, alpha=3.0, targets=targets, seed=5)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_b" in parameter_name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def plain_names(name: str) -> set[str]:
    return set(small_model(name, SIZE).state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_lora_before_training_changes_no_logit(name: str) -> None:
    images = random_images(2, 3, *SIZE)
    model = small_model(name, SIZE).eval()
    before = model(images)
    layers = add_lora(model, rank=2, alpha=3.0, targets=EVERYWHERE)
    assert len(layers) == 4 * len([m for m in layers if m.endswith("qkv")])
    torch.testing.assert_close(model(images), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_merged_model_gives_the_same_logits_under_the_plain_names(name: str) -> None:
    images = random_images(2, 3, *SIZE)
    model = with_lora(name)
    tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    plain, low_rank = small_model(name, SIZE).eval()(images), model(images)
    assert (plain - low_rank).abs().max() > 0.01  # or else nothing would be shown
    assert merge_lora(model) > 0
    torch.testing.assert_close(model(images), low_rank, rtol=1e-5, atol=1e-5)
    assert set(model.state_dict()) == plain_names(name)
    assert not any(isinstance(module, LoraLinear) for module in model.modules())
    from_file = merge_tensors(tensors, 3.0, EVERYWHERE)
    assert from_file.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(from_file[key], tensor, rtol=0, atol=1e-6)


@torch.no_grad()
def test_addition_is_the_product_of_the_paper_in_the_rows_of_its_part() -> None:
    base = nn.Linear(6, 12)
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"qkv": base})])})
    weight = base.weight.clone()
    add_lora(model, rank=2, alpha=5.0, targets=("q", "v"))
    layer: Any = model.get_submodule("blocks.0.qkv")
    layer.lora_b.copy_(torch.randn(layer.lora_b.shape))
    x = torch.randn(3, 6)
    expected = x @ weight.T + base.bias
    expected[:, :4] += 5.0 / 2 * x @ layer.lora_a[0].T @ layer.lora_b[0].T
    expected[:, 8:] += 5.0 / 2 * x @ layer.lora_a[1].T @ layer.lora_b[1].T
    torch.testing.assert_close(layer(x), expected)
    assert layer.state_dict()["weight"].equal(weight)  # a checkpoint has the weight itself
    merged = layer.merged()
    torch.testing.assert_close(merged(x), expected)
    assert merged.weight[4:8].equal(weight[4:8])


@pytest.mark.parametrize("name", MODELS)
def test_every_addition_gets_a_gradient_and_with_recomputation_the_same(name: str) -> None:
    gradients: list[dict[str, Tensor]] = []
    for recompute in (False, True):
        model = with_lora(name, checkpoint_activations=recompute).train()
        for key, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in key)
        model(random_images(2, 3, *SIZE)).square().sum().backward()
        gradients.append({k: p.grad for k, p in model.named_parameters() if p.grad is not None})
        assert all("lora" in key for key in gradients[-1])
        assert all(gradient.abs().max() > 0 for gradient in gradients[-1].values())
        assert len(gradients[-1]) == sum("lora" in k for k, _ in model.named_parameters())
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient)


@pytest.mark.parametrize(
    "name",
    ["swin_tiny", *(pytest.param(n, marks=pytest.mark.slow) for n in (MODELS[0], MODELS[2]))],
)
@torch.no_grad()
def test_model_with_lora_compiles_and_keeps_static_biases(name: str) -> None:
    images = random_images(2, 3, *SIZE)
    one_stage: dict[str, Any] = {} if name == "vit_base" else {"depths": [2], "heads": [2]}
    model = with_lora(name, **one_stage)
    expected = model(images)
    with static_bias(model):
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), expected, rtol=1e-4, atol=1e-4)


def test_lora_of_one_seed_is_the_same_and_of_another_one_not() -> None:
    drawn = []
    for seed in (1, 1, 2):
        model = small_model("vit_base", SIZE)
        add_lora(model, rank=2, alpha=1.0, targets=("q",), seed=seed)
        drawn.append(model.blocks[0].attn.qkv.lora_a)
    assert drawn[0].equal(drawn[1]) and not drawn[0].equal(drawn[2])


def test_lora_dropout_drops_inputs_of_the_addition_alone() -> None:
    layer: Any = nn.ModuleDict({"blocks": nn.ModuleDict({"fc1": nn.Linear(64, 8)})})
    add_lora(layer, rank=4, alpha=4.0, targets=("fc1",), dropout=0.5)
    fc1 = layer.get_submodule("blocks.fc1")
    x = torch.randn(5, 64)
    assert fc1(x).equal(fc1.eval()(x))  # the addition is zero still, whatever it drops
    with torch.no_grad():
        fc1.lora_b.normal_()
    assert not fc1.train()(x).equal(fc1.eval()(x))


def test_lora_that_a_model_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tune.rank = 40 is larger than blocks.0.attn.qkv"):
        add_lora(small_model("vit_base", SIZE, width=32, heads=2), rank=40, alpha=1, targets=("q",))
    resnet = build_model(model_config("timm", name="resnet10t"), SIZE, classes=3)
    with pytest.raises(ConfigError, match="no linear layer for q, v"):
        add_lora(resnet, rank=2, alpha=1, targets=("q", "v"))
