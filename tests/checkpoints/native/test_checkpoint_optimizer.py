"""An optimiser that went through a file goes on as if nothing had happened, bit for bit."""

import copy
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

from vision.checkpoints.native.checkpoint import read_checkpoint, write_checkpoint
from vision.checkpoints.native.optimizer import (
    flatten_optimizer,
    parameter_names,
    unflatten_optimizer,
)
from vision.training.muon import MuonAdamW

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"momentum": 0.9},
    "lamb": {},
    "lion": {},
    "muon": {},
    "our muon": {},
    "nadamw": {},
    "adafactorbv": {},  # keeps a torch.dtype among its settings
    "lookahead_adamw": {},
}


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LayerNorm(288), nn.Linear(288, 16), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(16, 5))


def optimize(model: nn.Module, name: str) -> Optimizer:
    if name == "our muon":
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim == 1]
        return MuonAdamW([{"params": matrices, "matrices": 1}, {"params": rest}], 1e-2)
    return create_optimizer_v2(model, opt=name, lr=1e-2, weight_decay=0.05, **OPTIMIZERS[name])


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 8, 8, generator=generator)
        labels = torch.randint(0, 5, (4,), generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)  # as a schedule does it
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def assert_same(first: Any, second: Any, place: str = "") -> None:
    """Equal in every type, value and bit."""
    assert type(first) is type(second), place
    match first:
        case Tensor():
            assert first.dtype == second.dtype and first.stride() == second.stride(), place
            assert torch.equal(first, second), place
        case dict():
            assert first.keys() == second.keys(), place
            for key in first:
                assert_same(first[key], second[key], f"{place}.{key}")
        case list() | tuple():
            assert len(first) == len(second), place
            for index, pair in enumerate(zip(first, second, strict=True)):
                assert_same(*pair, f"{place}[{index}]")
        case _:
            assert first == second, place


def through_a_file(folder: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimiser's state dict after a way through a file."""
    tensors, record = flatten_optimizer(optimizer.state_dict(), parameter_names(optimizer, model))
    path = folder / "a.safetensors"
    write_checkpoint(path, tensors, {"optimizer": record})
    found = read_checkpoint(path)
    return unflatten_optimizer(
        found.tensors, found.record["optimizer"], parameter_names(optimizer, model)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_comes_back_from_a_file_as_it_was(name: str, tmp_path: Path) -> None:
    model = build()
    optimizer = optimize(model, name)
    train(model, optimizer, range(3))
    before = copy.deepcopy(optimizer.state_dict())
    assert any(isinstance(v, Tensor) for s in before["state"].values() for v in s.values())
    assert_same(through_a_file(tmp_path, model, optimizer), before)


@pytest.mark.parametrize("channels_last", [False, True], ids=["usual", "channels_last"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_stopped(
    name: str, channels_last: bool, tmp_path: Path
) -> None:
    order = torch.channels_last if channels_last else torch.contiguous_format
    whole = build().to(memory_format=order)
    train(whole, whole_optimizer := optimize(whole, name), range(6))

    first = build().to(memory_format=order)
    train(first, optimizer := optimize(first, name), range(3))
    state = through_a_file(tmp_path, first, optimizer)
    second = build().to(memory_format=order)
    second.load_state_dict(first.state_dict())
    resumed = optimize(second, name)
    resumed.load_state_dict(state)
    train(second, resumed, range(3, 6))

    assert_same(dict(second.state_dict()), dict(whole.state_dict()))
    assert_same(resumed.state_dict(), whole_optimizer.state_dict())


def test_optimizer_before_its_first_step_comes_back(tmp_path: Path) -> None:
    model = build()
    optimizer = optimize(model, "adamw")
    assert_same(through_a_file(tmp_path, model, optimizer), optimizer.state_dict())


def test_frozen_parameter_without_state_comes_back_without_state(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].weight.requires_grad_(False)
    train(model, optimizer, range(2))
    assert len(optimizer.state_dict()["state"]) == 7
    assert_same(through_a_file(tmp_path, model, optimizer), optimizer.state_dict())


def test_state_follows_the_name_when_parameters_come_in_another_order() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(3))
    flat = flatten_optimizer(optimizer.state_dict(), parameter_names(optimizer, model))
    assert {"state/0.weight/exp_avg", "state/5.bias/step"} <= set(flat[0])

    again = torch.optim.AdamW(list(model.parameters())[::-1])
    again.load_state_dict(unflatten_optimizer(*flat, parameter_names(again, model)))
    for parameter in model.parameters():
        assert_same(again.state[parameter], optimizer.state[parameter])


def test_state_has_the_names_and_values_of_torch_distributed() -> None:
    model = build()
    optimizer = optimize(model, "adamw")
    train(model, optimizer, range(3))
    tensors, _ = flatten_optimizer(optimizer.state_dict(), parameter_names(optimizer, model))
    theirs = get_optimizer_state_dict(model, optimizer)["state"]
    flat = {
        f"state/{n}/{key}": value for n, slots in theirs.items() for key, value in slots.items()
    }
    assert_same(tensors, flat)


def test_values_of_any_nesting_come_back_with_their_types(tmp_path: Path) -> None:
    state = {
        0: {
            "step": 3,
            "none": None,
            "flag": True,
            "nested": {"list": [1.5, (2, "x")], "deep": {"tensor": torch.ones(2)}},
            "list of tensors": [torch.zeros(1), torch.ones(1)],
            "by number": {0: torch.ones(3), 1: "one"},
            "$tuple": "a key that looks like a mark",
            "nothing": {},
        }
    }
    groups = [{"params": [0], "betas": (0.9, 0.999), "lr": torch.tensor(0.1), "eps": 1e-8}]
    before = {"state": state, "param_groups": groups, "rng_state": (3, (1, 2), None)}
    tensors, record = flatten_optimizer(before, [["a"]])
    write_checkpoint(tmp_path / "a.safetensors", tensors, {"optimizer": record})
    found = read_checkpoint(tmp_path / "a.safetensors")
    assert_same(unflatten_optimizer(found.tensors, found.record["optimizer"], [["a"]]), before)


@pytest.mark.parametrize("value", [{1, 2}, namedtuple("Pair", "a b")(1, 2), len, 1j])
def test_value_that_cannot_be_stored_is_named(value: Any) -> None:
    state = {"state": {0: {"odd": value}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(TypeError, match=r"optimizer\.state\.w\.odd: a "):
        flatten_optimizer(state, [["w"]])


def test_names_that_do_not_fit_the_optimizer_are_refused() -> None:
    model = build()
    state = torch.optim.AdamW(model.parameters()).state_dict()
    with pytest.raises(ValueError, match=r"hold \[8\] parameters, but \[2\] names"):
        flatten_optimizer(state, [["a", "b"]])
    with pytest.raises(ValueError, match=r"twice: a\."):
        flatten_optimizer(state, [["a", "a", *"bcdefg"]])


def test_optimizer_of_other_parameters_is_refused() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    names = parameter_names(optimizer, model)
    tensors, record = flatten_optimizer(optimizer.state_dict(), names)
    other = [[*names[0][:-1], "head.bias"]]
    with pytest.raises(
        ValueError, match=r"Group 0 .*without \['head.bias'\], but with \['5.bias'\]"
    ):
        unflatten_optimizer(tensors, record, other)
    with pytest.raises(ValueError, match="has 1 groups of parameters, this one 2"):
        unflatten_optimizer(tensors, record, [names[0][:4], names[0][4:]])
    del tensors["state/0.weight/exp_avg"]
    with pytest.raises(ValueError, match=r"lacks the tensor 'state/0\.weight/exp_avg'"):
        unflatten_optimizer(tensors, record, names)
