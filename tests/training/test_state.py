"""The average of the weights: its recursion, its names, and that the weights come back."""

from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from vision.training.state import averaged, decay_at, start_average, update_average


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))


def train_steps(model: nn.Module, steps: int) -> Any:
    """Plain training, yielding after every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(16, 6, generator=generator)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_average_equals_timms_after_every_step() -> None:
    model = network()
    average, reference = start_average(model), ModelEmaV3(model, decay=0.8)
    for _ in train_steps(model, 10):
        update_average(average, model, 0.8)
        reference.update(model)
        for name, tensor in reference.module.state_dict().items():
            if tensor.is_floating_point():
                torch.testing.assert_close(average[name], tensor)


def test_average_equals_its_closed_form() -> None:
    model = network()
    average, history = start_average(model), [state(model)]
    for _ in train_steps(model, 6):
        update_average(average, model, 0.9)
        history.append(state(model))
    for name, tensor in average.items():
        expected = 0.9**6 * history[0][name].double()
        for step in range(1, 7):
            expected += 0.1 * 0.9 ** (6 - step) * history[step][name].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-7)


def test_average_holds_parameters_and_float_buffers_alone() -> None:
    average = start_average(network())
    assert {"0.weight", "3.bias", "1.running_mean", "1.running_var"} <= average.keys()
    assert "1.num_batches_tracked" not in average
    assert all(not tensor.requires_grad for tensor in average.values())


def test_average_of_frozen_weights_stays_what_they_are() -> None:
    model = network().eval()
    average, before = start_average(model), state(model)
    for _ in range(100):
        update_average(average, model, 0.987)
    assert all(torch.equal(average[name], before[name]) for name in average)


def test_average_is_no_view_of_the_weights() -> None:
    model = network()
    average, before = start_average(model), state(model)
    for _ in train_steps(model, 1):
        pass
    assert all(torch.equal(tensor, before[name]) for name, tensor in average.items())
    assert not torch.equal(model[0].weight, average["0.weight"])


def test_decay_rises_from_a_tenth_to_the_configured_one() -> None:
    assert decay_at(0, 0.999) == 0.1
    assert decay_at(90, 0.999) == pytest.approx(0.91)
    assert decay_at(10**6, 0.999) == 0.999
    assert decay_at(0, 0.05) == 0.05
    found = [decay_at(step, 0.99) for step in range(2000)]
    assert found == sorted(found)


def test_model_within_the_context_has_the_average_and_then_its_own_weights() -> None:
    model = network()
    average = start_average(model)
    for _ in train_steps(model, 3):
        update_average(average, model, 0.5)
    own, kept = state(model), {name: tensor.clone() for name, tensor in average.items()}
    tensors = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with averaged(model, average):
        for name, tensor in average.items():
            assert torch.equal(model.state_dict()[name], tensor)
            assert not torch.equal(tensor, own[name])
        assert torch.equal(model[1].num_batches_tracked, own["1.num_batches_tracked"])
    assert_same(model, own)
    assert all(torch.equal(average[name], kept[name]) for name in kept)
    assert tensors == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_weights_come_back_after_an_exception() -> None:
    model = network()
    average = {name: tensor + 1 for name, tensor in start_average(model).items()}
    own = state(model)
    with pytest.raises(RuntimeError, match="no more memory"), averaged(model, average):
        raise RuntimeError("no more memory")
    assert_same(model, own)


def test_weights_come_back_after_an_exception_while_they_are_exchanged() -> None:
    model = network()
    average = start_average(network(seed=1))
    average["3.bias"] = torch.zeros(99)
    own = state(model)
    with pytest.raises(RuntimeError), averaged(model, average):
        pass
    assert_same(model, own)


def test_training_after_an_evaluation_of_the_average_is_as_without_it() -> None:
    looked, plain = network(), network()
    average = start_average(looked)
    for _ in zip(train_steps(looked, 5), train_steps(plain, 5), strict=True):
        update_average(average, looked, 0.5)
        with averaged(looked, average), torch.no_grad():
            looked.eval()
            looked(torch.randn(4, 6))
            looked.train()
    assert_same(looked, state(plain))
