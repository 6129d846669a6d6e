"""Muon for hidden matrices and AdamW for everything else, as one optimiser.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by
the nearest orthogonal matrix, so that every direction is learned at the same rate. timm's Muon
takes fused queries, keys and values for one matrix, and torch's has no convolutions; here each of
the three is a matrix of its own.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from vision.models.layers import full_precision
from vision.training.run.distributed import sharded_like

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton–Schulz iteration: singular values end between 0.7 and 1.2."""


class MuonAdamW(Optimizer):
    """Muon for the groups with `matrices`, AdamW for the others.

    A group's `matrices` is the number of matrices that each of its parameters stacks (see
    `stack_shape`), or 0 for parameters that AdamW updates. `momentum` is Muon's (Nesterov's),
    `betas` and `eps` are AdamW's. The update of a matrix is scaled by √max(1, rows / columns), as
    in the original. With `bfloat16` updates are computed in it, which suits a run in bf16.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        bfloat16: bool = False,
    ) -> None:
        self.bfloat16 = bfloat16
        defaults = {"momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "matrices": 0, **defaults})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. There is no closure to call."""
        # Matrices of one shape are orthogonalised together, those of fc1 with those of fc2.
        batches: dict[tuple[int, ...], list[tuple[Tensor, dict[str, Any]]]] = defaultdict(list)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters and not group["matrices"]:
                self._adamw(parameters, group)
                continue
            for parameter in parameters:
                _, *sides = stack_shape(parameter.shape, group["matrices"])
                batches[tuple(sorted(sides))].append((parameter, group))
        for batch in batches.values():
            self._muon(batch)

    def _muon(self, batch: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Update parameters, each with its group, whose matrices have one shape, turned or not."""
        shapes = [stack_shape(p.shape, group["matrices"]) for p, group in batch]
        stacks = [
            _transposed_if_tall(self._momentum(parameter, group).reshape(shape), shape)
            for (parameter, group), shape in zip(batch, shapes, strict=True)
        ]
        update = orthogonalize(torch.cat(stacks), self.bfloat16)
        updates = update.split([number for number, _, _ in shapes])
        for (parameter, group), shape, update in zip(batch, shapes, updates, strict=True):
            update = _transposed_if_tall(update, shape).reshape(parameter.shape)
            _, rows, columns = shape
            scale = max(1, rows / columns) ** 0.5
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(sharded_like(update, parameter), alpha=-group["lr"] * scale)

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Nesterov's momentum of a parameter; that of a sharded one is whole in every process."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        momentum = gradient.lerp(average, group["momentum"])
        return momentum.full_tensor() if isinstance(momentum, DTensor) else momentum

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def stack_shape(shape: torch.Size, matrices: int) -> tuple[int, int, int]:
    """Number, rows and columns of the matrices that a weight stacks on its first axis.

    Fused queries, keys and values (3·rows columns) are 3; a convolution (rows inputs y x) is 1, as
    is every other layer; LoRA's (number rows columns) have this shape already.
    """
    if len(shape) == 3 and shape[0] == matrices:
        return matrices, shape[1], shape[2]
    return matrices, shape[0] // matrices, shape[1:].numel()


def orthogonalize(matrices: Tensor, bfloat16: bool = False) -> Tensor:
    """The nearest orthogonal matrices, nearly, of some (n rows columns) with rows ≤ columns."""
    a, b, c = COEFFICIENTS
    rows, columns = matrices.shape[1:]
    x = full_precision(matrices)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = x.bfloat16() if bfloat16 else x
    if bfloat16 or 2 * columns < 3 * rows:
        for _ in range(STEPS):
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
        return x.to(matrices.dtype)
    # The same iteration with fewer multiplications, on (rows rows) alone: each step multiplies x by
    # a polynomial of x xᵀ. In bfloat16 it would lose digits.
    gram, product = x @ x.mT, None
    for step in range(STEPS):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        product = polynomial if product is None else polynomial @ product
        if step < STEPS - 1:
            gram = polynomial @ gram @ polynomial
    assert product is not None
    return (product @ x).to(matrices.dtype)


def _transposed_if_tall(matrices: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Matrices transposed if those of this shape have more rows than columns."""
    return matrices.mT if shape[1] > shape[2] else matrices
