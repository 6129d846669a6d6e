"""Parameter groups, Muon and timm's optimisers on this project's models."""

import copy
import math
from typing import Any

import pytest
import torch
from model_settings import model_config, random_images, small_model
from timm.optim import param_groups_layer_decay
from torch import nn

from vision.config import ConfigError
from vision.models.build import build_model
from vision.models.layers import Classifier
from vision.models.lora import add_lora
from vision.training.configs import OptimizerConfig
from vision.training.optim import (
    build_optimizer,
    parameter_groups,
    set_learning_rate,
)

FAMILIES = ["vit_tiny", "swin_tiny", "swinv2_tiny"]


def settings(name: str = "adamw", **changes: Any) -> OptimizerConfig:
    values: dict[str, Any] = {
        "name": name,
        "learning_rate": 1e-3,
        "rest_learning_rate": None,
        "reference_batch": None,
        "weight_decay": 0.05,
        "rest_weight_decay": None,
        "betas": None,
        "eps": None,
        "momentum": None,
        "layer_decay": 1.0,
        "clip": "none",
        "clip_at": 1.0,
    }
    return OptimizerConfig(**(values | changes))


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: group for group in groups for name in group["names"]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer_decay", [1.0, 0.75])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamuon"])
def test_every_parameter_is_in_exactly_one_group(
    family: str, layer_decay: float, optimizer: str
) -> None:
    model = small_model(family, (32, 32))
    groups = parameter_groups(model, settings(optimizer, layer_decay=layer_decay))
    pairs = [pair for g in groups for pair in zip(g["names"], g["params"], strict=True)]
    assert len(pairs) == len(dict(pairs))
    named = dict(model.named_parameters())
    assert {name: id(p) for name, p in pairs} == {name: id(p) for name, p in named.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_decay_acts_on_matrices_alone(family: str) -> None:
    changes = {"registers": 2, "layer_scale": 0.1, "qk_norm": True} if family == "vit_tiny" else {}
    model = small_model(family, (32, 32), **changes)
    groups = by_name(parameter_groups(model, settings(weight_decay=0.3)))
    decayed = {name for name, group in groups.items() if group["weight_decay"] == 0.3}
    assert {g["weight_decay"] for g in groups.values()} == {0.0, 0.3}
    # What is a layer's weight by its type, not by its name; V2's position network is none.
    matrices = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and "cpb_mlp" not in name
    }
    assert decayed == matrices


@pytest.mark.parametrize(
    ("family", "size", "undecayed"),
    [
        ("vit_tiny", 32, ["cls_token", "positions.table", "norm.weight", "head.bias"]),
        ("swin_tiny", 32, ["layers.0.blocks.1.attn.relative_position_bias_table"]),
        (
            "swinv2_tiny",
            32,
            [
                "layers.0.blocks.1.attn.logit_scale",
                "layers.0.blocks.1.attn.cpb_mlp.0.weight",
                "layers.0.blocks.1.attn.cpb_mlp.2.weight",
                "layers.0.blocks.1.attn.q_bias",
            ],
        ),
    ],
)
def test_named_parameters_take_no_weight_decay(
    family: str, size: int, undecayed: list[str]
) -> None:
    groups = by_name(parameter_groups(small_model(family, (size, size)), settings()))
    for name in undecayed:
        assert groups[name]["weight_decay"] == 0, name


def test_layer_decay_of_a_vit_falls_by_its_factor_from_layer_to_layer() -> None:
    model = small_model("vit_tiny", (32, 32))
    groups = by_name(parameter_groups(model, settings(layer_decay=0.5)))
    scales = {name: group["lr_scale"] for name, group in groups.items()}
    assert scales["head.weight"] == scales["norm.bias"] == 1
    assert scales["blocks.2.mlp.fc1.weight"] == 0.5
    assert scales["blocks.0.attn.qkv.bias"] == 0.125
    assert scales["patch_embed.proj.weight"] == scales["positions.table"] == 0.0625


def test_layer_decay_of_a_swin_goes_through_its_stages() -> None:
    model = small_model("swin_tiny", (32, 32))  # depths 2, 3, 2
    groups = by_name(parameter_groups(model, settings(layer_decay=0.5)))
    assert groups["head.weight"]["lr_scale"] == 1
    assert groups["layers.2.blocks.1.mlp.fc1.weight"]["lr_scale"] == 0.5
    assert groups["layers.2.downsample.reduction.weight"]["lr_scale"] == 0.25
    assert groups["layers.0.blocks.0.norm1.weight"]["lr_scale"] == 0.5**7
    assert groups["patch_embed.proj.bias"]["lr_scale"] == 0.5**8


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_groups_of_a_timm_model_equal_timms(name: str) -> None:
    config = model_config("timm", name=name)
    model = build_model(config, (224, 224), classes=5, device="meta")
    ours = by_name(parameter_groups(model, settings(layer_decay=0.7)))
    inner: Any = model.model
    theirs = {
        id(parameter): group
        for group in param_groups_layer_decay(
            inner,
            0.05,
            inner.no_weight_decay() if hasattr(inner, "no_weight_decay") else (),
            layer_decay=0.7,
        )
        for parameter in group["params"]
    }
    for key, parameter in model.named_parameters():
        assert ours[key]["lr_scale"] == pytest.approx(theirs[id(parameter)]["lr_scale"]), key
        assert ours[key]["weight_decay"] == theirs[id(parameter)]["weight_decay"], key


def test_frozen_parameters_are_in_no_group_and_do_not_move() -> None:
    model = small_model("vit_tiny", (32, 32))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("head.", "blocks.2.")))
    optimizer = build_optimizer(model, settings(layer_decay=0.5, weight_decay=0.5))
    names = [name for group in optimizer.param_groups for name in group["names"]]
    assert names and all(name.startswith(("head.", "blocks.2.")) for name in names)
    assert {g["lr_scale"] for g in optimizer.param_groups} == {
        0.5,
        1.0,
    }  # as if nothing were frozen
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    descend(model, optimizer, 1)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(names)


def test_model_with_nothing_to_train_is_refused() -> None:
    model = small_model("vit_tiny", (32, 32)).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(model, settings())


def test_learning_rate_is_set_by_the_share_of_each_group() -> None:
    optimizer = build_optimizer(small_model("vit_tiny", (32, 32)), settings(layer_decay=0.5))
    assert {g["lr"] for g in optimizer.param_groups} == {1e-3 * 0.5**i for i in range(5)}
    set_learning_rate(optimizer, 0.2)
    assert all(g["lr"] == 0.2 * g["lr_scale"] for g in optimizer.param_groups)
    set_learning_rate(optimizer, 0.0)
    assert {g["lr"] for g in optimizer.param_groups} == {0.0}


def descend(model: Classifier, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Losses while learning one small batch by heart."""
    images, labels = random_images(8, 3, 32, 32), torch.arange(8) % 7
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fresh(family: str) -> Classifier:
    """A small model with the weights that it starts training with."""
    small = small_model(family, (32, 32))
    small.init_weights(torch.Generator().manual_seed(0))
    return small


@pytest.mark.parametrize(
    ("name", "rate"),
    [("adamw", 3e-3), ("lamb", 0.03), ("lion", 1e-3), ("muon", 0.01), ("sgd", 0.03)],
)
@pytest.mark.parametrize("family", ["vit_tiny", "swinv2_tiny"])
def test_optimizer_lowers_the_loss(family: str, name: str, rate: float) -> None:
    model = fresh(family)
    optimizer = build_optimizer(model, settings(name, learning_rate=rate, layer_decay=0.9))
    losses = descend(model, optimizer, 8)
    assert losses[0] == pytest.approx(math.log(7), rel=0.2)
    assert losses[1] < losses[0]  # the first step already
    assert losses[-1] < 0.96 * losses[0]


def test_adamw_equals_torchs_step_for_step() -> None:
    ours, theirs = fresh("swin_tiny"), fresh("swin_tiny")
    options = {"betas": (0.8, 0.95), "eps": 1e-6}
    optimizer = build_optimizer(ours, settings(weight_decay=0.3, **options))
    undecayed = theirs.no_weight_decay()
    reference = torch.optim.AdamW(
        [
            {"params": [parameter], "weight_decay": 0.0 if name in undecayed else 0.3}
            for name, parameter in theirs.named_parameters()
        ],
        lr=1e-3,
        fused=True,
        **options,  # type: ignore[arg-type]
    )
    for step in range(4):
        set_learning_rate(optimizer, 1e-3 / (step + 1))
        for group in reference.param_groups:
            group["lr"] = 1e-3 / (step + 1)
        assert descend(ours, optimizer, 1) == descend(theirs, reference, 1)
        for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(own, other), name


def test_fused_adamw_equals_the_plain_one_to_rounding() -> None:
    ours, theirs = fresh("vit_tiny"), fresh("vit_tiny")
    optimizer = build_optimizer(ours, settings(weight_decay=0.0))
    assert optimizer.param_groups[0]["fused"] is True
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0, foreach=False)
    descend(ours, optimizer, 3)
    descend(theirs, reference, 3)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def hidden_layers(model: Classifier) -> set[str]:
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "cpb_mlp" not in name and name != "head"
    }


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    model = fresh("swinv2_tiny")
    optimizer = build_optimizer(model, settings("muon"))
    descend(model, optimizer, 1)
    slots = {name: set(optimizer.state[p]) for name, p in model.named_parameters()}
    assert {name for name in slots if slots[name] == {"momentum_buffer"}} == hidden_layers(model)
    rest = {name for name in slots if slots[name] == {"step", "exp_avg", "exp_avg_sq"}}
    assert rest == slots.keys() - hidden_layers(model)
    assert optimizer.defaults["momentum"] == 0.95


def test_timms_hybrid_takes_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    model = fresh("swinv2_tiny")
    optimizer = build_optimizer(model, settings("adamuon"))
    descend(model, optimizer, 1)
    muon = {n for n, p in model.named_parameters() if optimizer.state[p]["use_muon"]}
    assert muon == hidden_layers(model)


def test_muon_equals_torchs_optimisers_with_queries_keys_and_values_apart() -> None:
    """torch.optim.AdamW for the rest to the bit, torch.optim.Muon to the precision of bfloat16."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has had Muon since 2.9")
    ours, theirs = fresh("vit_tiny"), fresh("vit_tiny")
    options = {"betas": (0.8, 0.95), "eps": 1e-6}
    rates = {"learning_rate": 0.02, "rest_learning_rate": 2e-3}
    decays = {"weight_decay": 0.1, "rest_weight_decay": 0.3}
    optimizer = build_optimizer(ours, settings("muon", momentum=0.9, **rates, **decays, **options))
    hidden, undecayed = hidden_layers(theirs), theirs.no_weight_decay()
    parts = {
        name: [nn.Parameter(part.clone()) for part in p.detach().chunk(3 if "qkv" in name else 1)]
        for name, p in theirs.named_parameters()
        if name in hidden
    }
    muon = torch.optim.Muon([p for ps in parts.values() for p in ps], 0.02, 0.1, 0.9)
    adamw = torch.optim.AdamW(
        [
            {"params": [parameter], "weight_decay": 0.0 if name in undecayed else 0.3}
            for name, parameter in theirs.named_parameters()
            if name not in hidden
        ],
        lr=2e-3,
        fused=True,
        **options,  # type: ignore[arg-type]
    )
    for step in range(3):
        set_learning_rate(optimizer, 0.02 / (step + 1))
        for reference, rate in ((muon, 0.02), (adamw, 2e-3)):
            for group in reference.param_groups:
                group["lr"] = rate / (step + 1)
        for number, (name, own) in enumerate(ours.named_parameters()):
            own.grad = random_images(*own.shape, seed=100 * step + number)
            theirs.get_parameter(name).grad = own.grad.clone()
            if name in hidden:
                gradients = own.grad.chunk(len(parts[name]))
                for part, gradient in zip(parts[name], gradients, strict=True):
                    part.grad = gradient.clone()
        for each in (optimizer, muon, adamw):
            each.step()
    for name, parameter in ours.named_parameters():
        if name in hidden:
            torch.testing.assert_close(parameter, torch.cat(parts[name]), rtol=0, atol=2e-3)
        else:
            assert parameter.equal(theirs.get_parameter(name)), name


def test_rates_of_muon_and_adamw_keep_their_ratio_and_layer_decay_holds_for_both() -> None:
    config = settings(
        "muon", learning_rate=0.02, rest_learning_rate=2e-3, layer_decay=0.5, rest_weight_decay=0.0
    )
    optimizer = build_optimizer(small_model("vit_tiny", (32, 32)), config, peak=0.04)
    groups = by_name(optimizer.param_groups)
    assert groups["blocks.2.mlp.fc1.weight"]["lr"] == pytest.approx(0.04 * 0.5)
    assert groups["blocks.0.attn.qkv.weight"]["lr"] == pytest.approx(0.04 * 0.125)
    assert groups["blocks.2.mlp.fc1.bias"]["lr"] == pytest.approx(0.004 * 0.5)
    assert groups["head.weight"]["lr"] == pytest.approx(0.004)
    set_learning_rate(optimizer, 0.02)
    assert groups["head.weight"]["lr"] == pytest.approx(0.002)
    assert groups["patch_embed.proj.weight"]["lr"] == pytest.approx(0.002 / 16)
    assert groups["head.weight"]["weight_decay"] == 0
    assert groups["blocks.2.mlp.fc1.weight"]["weight_decay"] == 0.05
    assert groups["blocks.2.mlp.fc1.bias"]["weight_decay"] == 0


def test_rest_of_muon_has_the_settings_of_the_matrices_by_default() -> None:
    groups = by_name(parameter_groups(small_model("vit_tiny", (32, 32)), settings("muon")))
    assert {group["lr_scale"] for group in groups.values()} == {1.0}
    assert groups["head.weight"]["weight_decay"] == 0.05


@pytest.mark.parametrize("name", ["adamw", "adamuon", "sgd"])
@pytest.mark.parametrize("setting", ["rest_learning_rate", "rest_weight_decay"])
def test_settings_of_the_rest_are_refused_without_muon(name: str, setting: str) -> None:
    with pytest.raises(ValueError, match=rf"{setting} = 0\.01 .*{name} .*optimizer.{setting}=null"):
        settings(name, **{setting: 0.01})


def test_muon_of_lora_updates_its_matrices_and_no_frozen_ones() -> None:
    model = fresh("vit_tiny")
    add_lora(model, rank=2, alpha=2.0, targets=["q", "v", "fc2"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith("head."))
    optimizer = build_optimizer(model, settings("muon", learning_rate=0.02))
    losses = descend(model, optimizer, 8)
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        slots = set(optimizer.state[parameter]) if parameter.requires_grad else set()
        assert (slots == {"momentum_buffer"}) == ("lora_" in name), name
    assert by_name(optimizer.param_groups)["blocks.0.attn.qkv.lora_a"]["matrices"] == 2
    assert by_name(optimizer.param_groups)["blocks.0.mlp.fc2.lora_b"]["matrices"] == 1


# Kron is compiled by inductor.
@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        "lamb",
        "lion",
        "muon",
        "adamuon",
        "sgd",
        "adamc",
        pytest.param("kron", marks=pytest.mark.slow),
    ],
)
def test_optimizer_with_its_state_restored_goes_on_to_the_bit(name: str) -> None:
    plain, resumed = fresh("vit_tiny"), fresh("vit_tiny")
    first, config = build_optimizer(plain, settings(name)), settings(name)
    descend(plain, first, 2)
    resumed.load_state_dict(plain.state_dict())
    second = build_optimizer(resumed, config)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert descend(plain, first, 2) == descend(resumed, second, 2)
    for own, other in zip(plain.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(own, other)


def test_corrected_decay_is_relative_to_the_peak() -> None:
    model = small_model("vit_tiny", (32, 32))
    assert build_optimizer(model, settings("adamc"), peak=4e-3).defaults["lr"] == 4e-3


@pytest.mark.parametrize(
    ("name", "guess"), [("adamww", "adamw"), ("AdamW", "adamw"), ("moun", "muon")]
)
def test_unknown_optimizer_is_refused_with_the_nearest_name(name: str, guess: str) -> None:
    with pytest.raises(ConfigError, match=rf"no optimiser '{name}'. Did you mean '{guess}'"):
        build_optimizer(small_model("vit_tiny", (32, 32)), settings(name))


def test_optimizer_with_prefix_that_timm_would_ignore_is_refused() -> None:
    with pytest.raises(ConfigError, match="no optimiser 'fast_adamw'"):
        build_optimizer(small_model("vit_tiny", (32, 32)), settings("fast_adamw"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("adamw", {"momentum": 0.9}, r"optimizer\.momentum = 0\.9: timm's adamw"),
        ("sgd", {"betas": (0.9, 0.99)}, r"optimizer\.betas = .*sgd"),
        ("lion", {"eps": 1e-8}, r"optimizer\.eps = 1e-08: timm's lion"),
        ("adopt", {"betas": (0.9, 0.99)}, r"optimizer\.betas = .*adopt"),
        ("kronc", {"eps": 1e-8}, r"optimizer\.eps = 1e-08: timm's kronc"),
        ("adan", {"betas": (0.9, 0.99)}, r"adan has 3 of them"),
        ("sgd", {"momentum": 0.0}, r"sgd cannot be built: Nesterov momentum requires"),
        ("adahessian", {}, r"adahessian needs second derivatives"),
    ],
)
def test_setting_that_the_optimizer_does_not_have_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer(small_model("vit_tiny", (32, 32)), settings(name, **changes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it may be usable")
@pytest.mark.parametrize("name", ["fusedlamb", "bnbadamw8bit"])
def test_optimizer_of_a_missing_package_says_what_it_needs(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} cannot be built: CUDA required"):
        build_optimizer(small_model("vit_tiny", (32, 32)), settings(name))


def test_head_parameters_are_those_of_the_classifying_layer() -> None:
    model = small_model("swin_tiny", (32, 32))
    assert [id(p) for p in model.head_parameters()] == [id(p) for p in model.head.parameters()]
    baseline: Any = build_model(
        model_config("timm", name="resnet18"), (32, 32), classes=5, device="meta"
    )
    assert [p.shape[0] for p in baseline.head_parameters()] == [5, 5]
    config = model_config("timm", name="deit_tiny_distilled_patch16_224")
    distilled = build_model(config, (224, 224), classes=5, device="meta")
    assert [p.shape[0] for p in distilled.head_parameters()] == [5, 5, 5, 5]  # of both heads
