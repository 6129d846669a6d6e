"""Processes of a run: their communication, and models wrapped for DDP and FSDP.

The same code runs in a single process. Under `torchrun` every process has a rank; CPU tensors use
gloo and CUDA tensors NCCL, so that small decisions never make a device wait.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from vision.models.build import pick_device

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set in any process."""
        return [bool(number) for number in self.max(*flags)]

    def max(self, *numbers: int) -> list[int]:
        """For each number, the largest over all processes."""
        values = torch.tensor(numbers)
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return [int(value) for value in values.tolist()]

    def from_main(self, value: T) -> T:
        """The value of the main process."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def first(self, value: T | None) -> T | None:
        """The value of the first process that has one."""
        values: list[T | None] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return next((value for value in values if value is not None), None)

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def world(setting: Literal["auto", "cpu", "cuda", "mps"]) -> Iterator[World]:
    """The processes that `torchrun` started, or this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(0, 1, pick_device(setting))
        return
    device = pick_device(setting, int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Processes that torchrun has restarted share a store with their predecessors, and would find
    # addresses of dead processes in it: every attempt gets a prefix of its own.
    store, rank, _ = next(iter(rendezvous("env://")))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"attempt_{attempt}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
    )
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def parallelize(model: nn.Module, parallel: Literal["ddp", "fsdp"], world: World) -> nn.Module:
    """The module to call in a training step. The given model keeps the weights."""
    if world.size == 1:
        return model
    if parallel == "ddp":
        devices = [world.device] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    # The root too, so that between passes every parameter is sharded.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def compile_steps(module: nn.Module) -> None:
    """Compile the module that a training step calls."""
    if not isinstance(module, FSDPModule):
        module.compile()
        return
    # Block by block, since FSDP gathers the weights of each before it and drops them after. Blocks
    # of different shapes share one code object, each shape with a graph of its own.
    torch._dynamo.config.recompile_limit = 64
    for block in _blocks(module):
        if not _blocks(block):
            block.forward = torch.compile(block.forward, dynamic=False)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The members of all module lists: blocks before the stages that contain them."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for blocks in reversed(lists) for block in blocks]


@contextmanager
def last_part_only(model: nn.Module, last: bool) -> Iterator[None]:
    """Exchange gradients once per step, in the backward pass of its last part."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield


def gathered(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, whole on the CPU. All processes must call it together."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def sharded_like(tensor: Tensor, target: Tensor) -> Tensor:
    """A whole tensor, which every process has, sharded as the target is."""
    if isinstance(target, DTensor):
        mesh, placements = target.device_mesh, target.placements
        return distribute_tensor(tensor.to(target.device), mesh, placements, src_data_rank=None)
    return tensor.to(target.device)
