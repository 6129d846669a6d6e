"""Fake tensors against what the same operations do on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vision.models.cost.fake_tensors import Fakes, storage_of

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum of a transposed and a broadcast tensor": lambda x: x.transpose(0, 2) + x[0, 0, 0],
    "an integer keeps integers": lambda x: (x > 0).long() + 1,
    "a fraction does not": lambda x: (x > 0).long() + 1.0,
    "norm with its statistics": lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5),
    "views": lambda x: x.flatten(1).unsqueeze(0).expand(5, -1, -1)[..., ::2],
    "a reshape that copies": lambda x: x.transpose(1, 2).reshape(2, -1),
    "pieces": lambda x: x.split([1, 2], dim=1),
    "a product": lambda x: x @ x.transpose(1, 2),
    "an index on the CPU": lambda x: x.index_select(1, torch.tensor([2, 0])),
    "a new tensor on its device": lambda x: x.new_zeros(3, device=x.device) + x[0, :, 0],
    "in place": lambda x: x.clone().mul_(2).relu_(),
    "another type": lambda x: x.to(torch.float64),
}


def described(tree: Any) -> list[Any]:
    tensors = tree if isinstance(tree, tuple | list) else [tree]
    return [(x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_of_an_operation_are_as_on_a_cpu_the_first_and_the_second_time(
    name: str, learned: bool
) -> None:
    operation = OPERATIONS[name]
    expected = described(operation(torch.randn(2, 3, 4, requires_grad=learned)))
    meta = torch.empty(2, 3, 4, device="meta", requires_grad=learned)
    fake = Fakes(lambda *_: None).wrap(meta)
    first, second = operation(fake), operation(fake)
    assert described(first) == described(second) == expected


def test_storages_are_shared_by_views_and_by_nothing_else() -> None:
    fakes = Fakes(lambda *_: None)
    x = fakes.wrap(torch.empty(2, 3, device="meta"))
    assert storage_of(x.view(3, 2)) is storage_of(x[1:]) is storage_of(x)
    first, second = x + 1, x + 1
    assert len({storage_of(x), storage_of(first), storage_of(second)}) == 3
    assert storage_of(first).nbytes() == storage_of(second).nbytes() == 4 * 6
    assert first.mul_(2) is first
    _, mean, deviation = torch.native_layer_norm(x, (3,), None, None, 1e-5)
    assert storage_of(mean) is not storage_of(deviation)


@pytest.mark.parametrize(
    ("dropout", "learned_mask", "fused"),
    [(0.0, False, True), (0.1, False, False), (0.0, True, False)],
)
def test_attention_takes_the_kernel_that_it_takes_on_a_cpu(
    dropout: float, learned_mask: bool, fused: bool
) -> None:
    seen = []
    fakes = Fakes(lambda operation, args, result: seen.append(operation))
    q = fakes.wrap(torch.empty(2, 4, 9, 8, device="meta", requires_grad=True))
    mask = fakes.wrap(torch.empty(9, 9, device="meta", requires_grad=learned_mask))
    F.scaled_dot_product_attention(q, q, q, mask, dropout_p=dropout)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    real = torch.randn(2, 4, 9, 8, requires_grad=True)
    real_mask = torch.randn(9, 9, requires_grad=learned_mask)
    out = F.scaled_dot_product_attention(real, real, real, real_mask, dropout_p=dropout)
    assert ("Flash" in type(out.grad_fn).__name__) == fused
    assert (kernel in seen) == fused
