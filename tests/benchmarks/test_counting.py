"""The counters against closed forms, and against the cost of whole models."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import Count, PeakMemory, Product, Products, Replay
from model_settings import SMALL_SWIN, SMALL_VIT, model_config
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from vision.models.build import build_model
from vision.models.cost.count import cost
from vision.models.layers import static_bias

ROWS, COLUMNS = 6, 10
MATRIX = 4 * ROWS * COLUMNS
"""Bytes of the matrix that the tests work on."""


def matrix() -> Tensor:
    return torch.randn(ROWS, COLUMNS)


OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], object], int, float]] = {
    # kernels, bytes in units of the matrix
    "add": (lambda a, b: a + b, 1, 3),
    "a tensor with itself is read once": (lambda a, b: a * a, 1, 2),
    "two operations": (lambda a, b: (a + b).exp(), 2, 5),
    "views": (lambda a, b: a.view(-1)[3:].unsqueeze(0).expand(4, -1).detach(), 0, 0),
    "a transposed matrix": (lambda a, b: a.T, 0, 0),
    "a reshape that is a view": (lambda a, b: a.reshape(2, -1), 0, 0),
    "a reshape that copies": (lambda a, b: a.T.reshape(-1), 1, 2),
    "a part is read, not the whole": (lambda a, b: a[: ROWS // 2].exp(), 1, 1),
    "a broadcast row is read once": (lambda a, b: a + b[0].expand_as(a), 1, 2 + 1 / ROWS),
    "in place": (lambda a, b: a.add_(b), 1, 3),
    "copying in place reads the source": (lambda a, b: a.copy_(b), 1, 2),
    "zeroing reads nothing": (lambda a, b: a.zero_(), 1, 1),
    "a given output is not read": (lambda a, b: torch.add(a, a, out=b), 1, 2),
    "many tensors in one call": (lambda a, b: torch._foreach_add_([a, b], 1.0), 1, 4),
    "making zeros": (lambda a, b: torch.zeros_like(a), 1, 1),
    "allocating": (lambda a, b: torch.empty_like(a), 0, 0),
    "a product moves no counted bytes": (lambda a, b: a @ b.T, 1, 0),
    "a batched product": (lambda a, b: torch.bmm(a[None], b.T[None]), 1, 0),
    "a linear layer": (lambda a, b: F.linear(a, b, torch.empty(ROWS)), 1, 0),
    "a norm also writes mean and deviation": (
        lambda a, b: F.layer_norm(a, (COLUMNS,), b[0], b[1]),
        1,
        2 + 2 / ROWS + 2 / COLUMNS,
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_count_of_an_operation_is_its_kernels_and_bytes(name: str) -> None:
    operation, kernels, matrices = OPERATIONS[name]
    a, b = matrix(), matrix()
    with torch.no_grad(), Count() as count:
        operation(a, b)
    assert count.kernels == kernels == count.by_operation.total()
    assert count.bytes == pytest.approx(matrices * MATRIX)
    assert count.bytes == count.bytes_by_operation.total()


def test_count_sees_the_backward_pass() -> None:
    x = matrix().requires_grad_()
    with Count() as count:
        x.exp().sum().backward()
    # exp; sum; ones for the gradient of the sum, which is expanded; its product with exp(x). The
    # gradient becomes x.grad without a copy.
    assert count.by_operation == {"exp": 1, "sum": 1, "ones_like": 1, "mul": 1}
    scalar = 4
    assert count.bytes == 2 * MATRIX + (MATRIX + scalar) + scalar + (2 * MATRIX + scalar)


def test_count_of_a_linear_layer_with_its_gradients_has_products_only_and_one_sum() -> None:
    layer = nn.Linear(COLUMNS, 3)
    x = matrix().requires_grad_()
    with Count() as count:
        y = layer(x)
        y.backward(torch.ones_like(y))
    assert count.by_operation == {"addmm": 1, "ones_like": 1, "mm": 2, "sum": 1}


def test_peak_counts_what_is_alive_at_once() -> None:
    with PeakMemory() as memory:
        a = matrix()
        b = a + 1
        del a
        c = b + 1
        assert (memory.live, memory.peak) == (2 * MATRIX, 2 * MATRIX)
        d = b + c
        assert (memory.live, memory.peak) == (3 * MATRIX, 3 * MATRIX)
        del b, c
        assert (memory.live, memory.peak) == (MATRIX, 3 * MATRIX)
        del d
    assert (memory.live, memory.peak) == (0, 3 * MATRIX)


def test_peak_of_a_view_is_that_of_its_whole_storage_until_the_last_view_is_gone() -> None:
    with PeakMemory() as memory:
        whole = torch.zeros(ROWS, COLUMNS)
        row = whole[0]
        transposed = whole.T
        assert memory.live == MATRIX
        del whole, transposed
        assert memory.live == MATRIX
        del row
        assert memory.live == 0


def test_peak_leaves_out_what_existed_before_and_what_is_changed_in_place() -> None:
    before = matrix()
    with PeakMemory() as memory:
        before.add_(1).view(-1)
        before[0].zero_()
    assert memory.peak == 0


def test_peak_counts_what_autograd_keeps() -> None:
    x = matrix().requires_grad_()
    with PeakMemory() as memory:
        y = x.exp().exp().sum()  # both results are kept for their gradients
        assert memory.live == 2 * MATRIX + 4
        y.backward()
    # In the backward pass: the gradient of one result beside both results.
    assert memory.peak == pytest.approx(3 * MATRIX, abs=16)
    assert memory.live == MATRIX + 4  # x.grad and y


def test_peak_of_a_training_step_is_that_of_the_allocator() -> None:
    """torch's profiler sees every allocation, also those inside an operation."""
    model = build_model(model_config("swin_mini"), (32, 32), classes=10)
    images = torch.randn(4, 3, 32, 32)

    def step() -> None:
        model(images).square().sum().backward()
        model.zero_grad()

    step()  # what is computed once and kept
    with PeakMemory() as memory:
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    allocations = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree()))
    live = itertools.accumulate(size for _, size in allocations)
    assert memory.peak == pytest.approx(max(live), rel=0.001)


def _allocations(events: Any) -> Iterator[tuple[int, int]]:
    """Time and bytes of every allocation, negative where memory is given back."""
    for event in events:
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["vit_mini", "swin_mini", "swinv2_mini"])
def test_live_bytes_after_a_forward_pass_are_the_activation_bytes_of_cost(
    name: str, recompute: bool
) -> None:
    small = SMALL_VIT if name == "vit_mini" else SMALL_SWIN
    config = model_config(name, **small, checkpoint_activations=recompute)
    model = build_model(config, (32, 40), classes=10)

    def live(images: int) -> int:
        with PeakMemory() as memory:
            logits = model(torch.randn(images, 3, 32, 40))
            return memory.live - 4 * logits.numel()

    assert live(3) - live(2) == cost(config, (32, 40), classes=10).activation_bytes


@pytest.mark.parametrize("name", ["vit_mini", "swin_mini", "swinv2_mini"])
def test_recorded_products_are_the_macs_of_cost(name: str) -> None:
    config = model_config(name)
    model = build_model(config, (32, 32), classes=10).eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Products() as recorded:
        model(torch.randn(1, 3, 32, 32))
    assert sum(p.macs for p in recorded.products) == cost(config, 32, classes=10).macs
    if name != "vit_mini":  # the biases are ready, so their networks are not run
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), static_bias(model), Products() as ready:
            model(torch.randn(1, 3, 32, 32))
        assert sum(p.macs for p in ready.products) <= cost(config, 32, classes=10).macs


def test_recorded_products_of_a_training_step_are_three_times_those_of_a_forward_pass() -> None:
    """Each product has two gradients, but images have none: theirs through the patches is left
    out.
    """
    model = build_model(model_config("vit_mini", patch_size=4), (32, 32), classes=10)
    images = torch.randn(2, 3, 32, 32)
    with sdpa_kernel(SDPBackend.MATH), Products() as forward:
        loss = model(images).square().sum()
    with sdpa_kernel(SDPBackend.MATH), Products() as backward:
        loss.backward()
    patches = next(p for p in forward.products if p.k == 3 * 4 * 4)
    macs = sum(p.macs for p in forward.products)
    assert sum(p.macs for p in backward.products) == 2 * macs - patches.macs


def test_recorded_convolution_that_is_no_patch_embedding_is_refused() -> None:
    with pytest.raises(ValueError, match="not a patch embedding"), Products():
        F.conv2d(torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3))


def test_replay_computes_every_product_in_its_layout() -> None:
    left, right = torch.randn(5, 3).T, torch.randn(5, 4)
    with Products() as recorded:
        left @ right
        torch.bmm(torch.randn(2, 3, 4), torch.randn(2, 5, 4).transpose(1, 2))
    assert recorded.products == [
        Product(1, 3, 5, 4, True, False),
        Product(2, 3, 4, 5, False, True),
    ]
    replay = Replay(recorded.products)
    for _, _, out in replay.calls:
        out.fill_(torch.nan)
    with Products() as again:
        replay()
    assert again.products == recorded.products
    for left, right, out in replay.calls:
        torch.testing.assert_close(out, left @ right)
