"""Muon and AdamW in one optimiser, against torch's own, single matrices and singular values."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vision.training.muon import MuonAdamW, orthogonalize, stack_shape


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def updates(*gradients: Tensor, matrices: int = 1, **settings: Any) -> list[Tensor]:
    """What one step with these gradients adds to parameters that were 0."""
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    group = {"params": parameters, "matrices": matrices}
    MuonAdamW([group], **({"lr": 1.0, "momentum": 0.0} | settings)).step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize(("bfloat16", "tolerance"), [(False, 1e-3), (True, 5e-2)])
@pytest.mark.parametrize("shape", [(48, 64), (32, 32), (32, 128), (4, 300)])
def test_singular_values_end_near_one(
    shape: tuple[int, int], bfloat16: bool, tolerance: float
) -> None:
    matrix = drawn(1, *shape)
    u, _, v = torch.linalg.svd(matrix[0], full_matrices=False)
    ours = orthogonalize(matrix, bfloat16)[0]
    assert ours.dtype == torch.float32
    values = torch.linalg.svdvals(ours)
    assert values.min() > 0.6 and values.max() < 1.3
    # It turns nothing: it has the singular vectors of the matrix.
    rotated = u.mT @ ours @ v.mT
    assert (rotated - rotated.diagonal().diag()).abs().max() < tolerance


@pytest.mark.parametrize("shape", [(32, 40), (32, 48), (24, 300)])
def test_iteration_in_either_form_is_the_plain_polynomial(shape: tuple[int, int]) -> None:
    """In float64, also where the singular values of a matrix are very different."""
    x = drawn(2, *shape).double() * torch.logspace(0, -8, shape[0]).double()[:, None]
    expected = []
    for matrix in x:
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        expected.append(u @ s.diag() @ v)
    torch.testing.assert_close(orthogonalize(x), torch.stack(expected), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        orthogonalize(x.float()), torch.stack(expected).float(), rtol=0, atol=1e-4
    )


def test_matrix_of_zeros_stays_zero() -> None:
    """The gradient of a layer whose output is multiplied by 0, as LoRA's first matrix at first."""
    (update,) = updates(torch.zeros(8, 16))
    assert update.equal(torch.zeros(8, 16))


@pytest.mark.parametrize(("matrices", "inputs"), [(3, 32), (2, 32), (2, 8), (3, 200)])
def test_fused_layer_is_updated_as_single_ones(matrices: int, inputs: int) -> None:
    gradient = drawn(matrices * 32, inputs)
    gradient[:32] *= 100  # alone in one matrix, it would drown the others
    (fused,) = updates(gradient, matrices=matrices)
    single = torch.cat([updates(part)[0] for part in gradient.chunk(matrices)])
    torch.testing.assert_close(fused, single, rtol=0, atol=1e-4)
    assert (fused - updates(gradient)[0]).abs().max() > 0.1


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_convolution_is_one_matrix_of_its_output_channels(order: torch.memory_format) -> None:
    kernel = drawn(16, 8, 3, 3)
    (update,) = updates(kernel.to(memory_format=order))
    torch.testing.assert_close(update, updates(kernel.flatten(1))[0].view_as(kernel))
    (groups,) = updates(kernel.to(memory_format=order), matrices=4)
    single = [updates(part.flatten(1))[0].view_as(part) for part in kernel.chunk(4)]
    torch.testing.assert_close(groups, torch.cat(single), rtol=0, atol=1e-4)


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_of_lora_are_single_matrices(parts: int) -> None:
    for shape in ((parts, 4, 32), (parts, 32, 4)):
        gradient = drawn(*shape)
        (update,) = updates(gradient, matrices=parts)
        single = [updates(part)[0] for part in gradient]
        torch.testing.assert_close(update, torch.stack(single), rtol=0, atol=1e-4)


def test_matrices_of_one_shape_do_not_see_each_other() -> None:
    gradients = [drawn(16, 48, seed=1), 1e3 * drawn(48, 16, seed=2), drawn(16, 48, seed=3)]
    together = updates(*gradients)
    for update, gradient in zip(together, gradients, strict=True):
        torch.testing.assert_close(update, updates(gradient)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "scale"), [((64, 16), 2.0), ((16, 64), 1.0), ((36, 4, 2, 2), 1.5), ((8, 8), 1.0)]
)
def test_update_has_the_size_of_the_original(shape: tuple[int, ...], scale: float) -> None:
    (update,) = updates(drawn(*shape))
    values = torch.linalg.svdvals(update.flatten(1))
    assert values.min() > 0.6 * scale and values.max() < 1.3 * scale


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (16, 64), (20, 20)])
@pytest.mark.parametrize(
    ("matrices", "bfloat16", "tolerance"), [(0, False, 1e-6), (1, False, 2e-3), (1, True, 2e-3)]
)
def test_steps_equal_those_of_torch(
    shape: tuple[int, int], matrices: int, bfloat16: bool, tolerance: float
) -> None:
    """torch.optim.Muon iterates in bfloat16: the third digit of an update of 0.02 differs."""
    if matrices and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has had Muon since 2.9")
    ours, theirs = nn.Parameter(drawn(*shape)), nn.Parameter(drawn(*shape))
    group = {"params": [ours], "matrices": matrices, "weight_decay": 0.1}
    mine = MuonAdamW([group], 0.02, 0.9, (0.9, 0.99), 1e-8, bfloat16)
    other: torch.optim.Optimizer
    if matrices:
        other = torch.optim.Muon([theirs], 0.02, 0.1, 0.9, adjust_lr_fn="original")
    else:
        other = torch.optim.AdamW([theirs], 0.02, (0.9, 0.99), 1e-8, 0.1)
    for step in range(5):
        gradient = drawn(*shape, seed=step)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_update_has_the_digits_of_its_precision(bfloat16: bool) -> None:
    (update,) = updates(drawn(16, 16), bfloat16=bfloat16)
    assert update.dtype == torch.float32
    assert update.equal(update.bfloat16().float()) == bfloat16


def test_parameter_without_a_gradient_stays_and_has_no_state() -> None:
    moved, still = (nn.Parameter(drawn(8, 8)) for _ in range(2))
    for matrices in (0, 1):
        moved.grad = drawn(8, 8, seed=1)
        optimizer = MuonAdamW([{"params": [moved, still], "matrices": matrices}], 0.1)
        optimizer.step()
        assert still.equal(drawn(8, 8)) and still not in optimizer.state
        moved.grad = None
        optimizer.step()


@pytest.mark.parametrize(
    ("shape", "matrices", "expected"),
    [
        ((96, 32), 3, (3, 32, 32)),
        ((96, 32), 1, (1, 96, 32)),
        ((16, 8, 3, 3), 1, (1, 16, 72)),
        ((16, 2, 3, 3), 4, (4, 4, 18)),
        ((2, 4, 32), 2, (2, 4, 32)),
        ((1, 4, 32), 1, (1, 4, 32)),
    ],
)
def test_shape_of_a_stack(
    shape: tuple[int, ...], matrices: int, expected: tuple[int, int, int]
) -> None:
    assert stack_shape(torch.Size(shape), matrices) == expected


@pytest.mark.parametrize("matrices", [0, 1])
def test_gradients_of_a_scaled_loss_give_the_same_step_and_infinite_ones_none(
    matrices: int,
) -> None:
    parameter = nn.Parameter(torch.zeros(8, 8))
    optimizer = MuonAdamW([{"params": [parameter], "matrices": matrices}], 1.0, momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # as a loss would be, before its backward pass
    parameter.grad = 1024 * drawn(8, 8)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.equal(updates(drawn(8, 8), matrices=matrices)[0])
    parameter.grad = drawn(8, 8) * torch.inf
    scaler.step(optimizer)
    assert parameter.equal(updates(drawn(8, 8), matrices=matrices)[0])
