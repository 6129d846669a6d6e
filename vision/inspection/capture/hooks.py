"""Temporary hooks: evaluation mode, residual shares, tokens before the norm."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

BRANCHES = ("drop_path1", "drop_path", "stochastic_depth", "dropout")
"""Names of the last module of the attention branch in the blocks of different libraries."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module has its former mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def measuring_shares(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """‖branch‖ / (‖branch‖ + ‖x‖) of the attention branch of every block that runs, by name.

    Tokens are in the order of the block: (b …).
    """
    shares: dict[str, Tensor] = {}
    handles = []
    for name, block in model.named_modules():
        branch = _branch(block)
        if branch is not None:
            handles += _measure(shares, name, block, branch)
    try:
        yield shares
    finally:
        for handle in handles:
            handle.remove()


def _branch(block: nn.Module) -> nn.Module | None:
    """The module that ends the attention branch of a block; None for other modules."""
    children = dict(block.named_children())
    if not any("norm" in type(child).__name__.lower() for child in children.values()):
        return None
    return next((children[name] for name in BRANCHES if name in children), None)


def _measure(
    shares: dict[str, Tensor], name: str, block: nn.Module, branch: nn.Module
) -> list[torch.utils.hooks.RemovableHandle]:
    entered: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered[:] = [first_tensor(args, kwargs).detach()]

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The same module may also end the branch of the MLP: the first call is the attention's.
        if entered:
            x = entered.pop()
            branch = first_tensor(args, kwargs).detach()
            if branch.shape == x.shape:
                ours, theirs = branch.norm(dim=-1), x.norm(dim=-1)
                shares[name] = ours / (ours + theirs).clamp_min(torch.finfo(ours.dtype).tiny)

    return [
        block.register_forward_pre_hook(enter, with_kwargs=True),
        branch.register_forward_pre_hook(add, with_kwargs=True),
    ]


@contextmanager
def keeping_tokens(module: nn.Module | None, which: str) -> Iterator[list[Tensor]]:
    """The input or output of a module, as (b n c)."""
    kept: list[Tensor] = []

    def hook(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensor = first_tensor(args, kwargs) if which == "input" else first_tensor((output,), {})
        kept[:] = [tensor.detach().flatten(1, -2)]

    handle = None if module is None else module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield kept
    finally:
        if handle is not None:
            handle.remove()


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor among arguments; outputs may also be tuples."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
        if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            return value[0]
    raise ValueError("a module was called without a tensor")
