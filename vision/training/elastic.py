"""Gradients that are the same to the bit for any number of processes.

The global batch is divided among virtual ranks, whose number is fixed. Each process has a
contiguous block of them, and takes their passes one after the other. Sums of floating-point numbers
depend on their order, so that there is only one: a binary tree over the virtual ranks,

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

whose lower levels are computed within a process and whose upper ones between processes.
"""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vision.config import ConfigError
from vision.training.run.distributed import World


class Addable(Protocol):
    """A number or a tensor."""

    def __iadd__(self, other: Any, /) -> Self:
        """Add in place."""


T = TypeVar("T", bound=Addable)


class BinaryCounter(Generic[T]):
    """The sum of a power of two of terms that come one by one, in the order of a balanced tree.

    As in a binary counter, two sums of the same number of terms are added at once: of 2ⁿ terms at
    most n + 1 sums are in memory.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, T]] = []
        """Depth and value of the subtrees so far, the deepest first."""

    def add(self, term: T) -> None:
        """Add the next term. It may be changed later."""
        depth = 0
        while self._sums and self._sums[-1][0] == depth:
            _, left = self._sums.pop()
            left += term  # type: ignore[operator] # a protocol with __iadd__ alone
            term, depth = left, depth + 1
        self._sums.append((depth, term))

    def take(self) -> T:
        """The sum of all terms, which are forgotten."""
        ((_, total),) = self._sums
        self._sums.clear()
        return total


def sum_over_processes(flat: Tensor, world: World) -> Tensor:
    """The sum of a vector over a power of two of processes, in the order of a balanced tree.

    Process r exchanges with r ^ 1, then r ^ 2, …, each time half of what it still has: of a pair,
    the lower one adds up the first half and the other one the second half. Then the sums go back
    along the same way. So every process sends and receives twice the vector at most, as in the
    usual ring, and every element is added up in the order of the tree.
    """
    count = flat.numel()
    flat = F.pad(flat, (0, -count % world.size))
    own, way = flat, []
    for level in range(world.size.bit_length() - 1):
        partner = world.rank ^ (1 << level)
        halves = own.chunk(2)
        lower = world.rank < partner
        own, other = halves if lower else halves[::-1]
        received = torch.empty_like(own)
        _exchange(other, received, partner)
        torch.add(*((own, received) if lower else (received, own)), out=own)
        way.append((partner, own, other))
    for partner, mine, theirs in reversed(way):
        _exchange(mine, theirs, partner)
    return flat[:count]


def _exchange(sent: Tensor, received: Tensor, partner: int) -> None:
    operations = [
        dist.P2POp(dist.isend, sent, partner),
        dist.P2POp(dist.irecv, received, partner),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def virtual_ranks_of_each(elastic: int, processes: int) -> int:
    """Number of virtual ranks of each process."""
    if elastic % processes:
        fitting = [str(1 << n) for n in range(elastic.bit_length())]
        raise ConfigError(
            f"elastic = {elastic} virtual ranks cannot be shared by {processes} processes; start "
            f"{' or '.join(fitting[-4:])} of them."
        )
    return elastic // processes


class VirtualRanks(nn.Module):
    """A module for training steps, of which each process takes several virtual ranks.

    After the backward pass of each of them, `collect` takes the gradients away; after that of the
    last one it leaves their sum over all virtual ranks of all processes in the parameters. Buffers
    (running statistics of batch norms) are then those of virtual rank 0, as those of rank 0 are
    with DDP.
    """

    def __init__(self, module: nn.Module, world: World, of_each: int) -> None:
        super().__init__()
        self.module = module
        self.world = world
        self.of_each = of_each
        self._collected = 0
        self._tree = BinaryCounter[Tensor]()
        self._before: list[Tensor] | None = None
        self._first: list[Tensor] = []
        if world.size > 1:  # as DDP does: weights drawn on another machine may differ
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """The output of the module."""
        if self._before is None:
            self._before = self._copies()
        return self.module(*inputs, **more)

    @torch.no_grad()
    def collect(self, sums: Tensor) -> Tensor:
        """Take the gradients of a virtual rank, and its sums of a task.

        Returns the sums that this process adds to its own: those of all virtual ranks, in the main
        process after the last one; else zeros.
        """
        trained = [p for p in self.module.parameters() if p.requires_grad]
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        self._tree.add(torch.cat([piece.reshape(-1) for piece in (*pieces, sums)]))
        for parameter in trained:
            parameter.grad = None
        del pieces
        if self._collected == 0 and self.world.main:
            self._first = self._copies()
        self._restore(self._before or [])
        self._collected += 1
        if self._collected < self.of_each:
            return torch.zeros_like(sums)
        self._collected, self._before = 0, None
        self._share_first()
        total = sum_over_processes(self._tree.take(), self.world)
        *gradients, sums = total.split([*(p.numel() for p in trained), len(sums)])
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient.view(parameter.shape)
        return sums.clone() if self.world.main else torch.zeros_like(sums)

    def _copies(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.module.buffers()]

    def _restore(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self.module.buffers(), values, strict=bool(values)):
            buffer.copy_(value)

    def _share_first(self) -> None:
        """Give all processes the buffers of virtual rank 0, those of a type in one vector."""
        self._restore(self._first)
        buffers = list(self.module.buffers())
        for dtype in sorted({buffer.dtype for buffer in buffers}, key=str):
            alike = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in alike])
            if self.world.size > 1:
                dist.broadcast(flat, src=0)
            for buffer, value in zip(alike, flat.split([b.numel() for b in alike]), strict=True):
                buffer.copy_(value.view(buffer.shape))
