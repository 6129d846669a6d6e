"""One optimiser step: forward and backward over the parts of a batch, clipping, the update.

Everything random in it is a function of (seed, step, rank, part), so that no generator has a state
to save. With `elastic`, each part is a virtual rank (vision/training/elastic.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from vision.config import UserError
from vision.randomness import step_seed
from vision.training.configs import TrainConfig
from vision.training.elastic import VirtualRanks
from vision.training.run.distributed import last_part_only
from vision.training.state import TrainState, decay_at, update_average
from vision.training.tasks.task import B, Task


class NonFiniteError(UserError, RuntimeError):
    """The loss is not finite."""


def forward_backward(
    task: Task[B],
    module: nn.Module,
    parts: Sequence[B],
    scaler: torch.amp.GradScaler,
    step: int,
) -> tuple[Tensor, bool]:
    """Compute the gradients of the mean loss of all parts, and leave them in the parameters.

    Returns the task's sums as a tensor on the device, and whether all losses were finite, for this
    process alone.
    """
    sums = empty_sums(task)
    finite = []
    # DDP averages the gradients of processes; those of virtual ranks are summed over all of them.
    averaged = task.config.elastic or len(parts)
    for number, batch in enumerate(parts):
        with last_part_only(module, last=number == len(parts) - 1):
            loss, part_sums = _loss(task, module, batch, step, number)
            finite.append(_copy_to_host(loss.detach().isfinite()))
            scaler.scale(loss / averaged).backward()
        # Gradients of virtual ranks are summed here; other modules leave that to autograd and DDP.
        sums += module.collect(part_sums) if isinstance(module, VirtualRanks) else part_sums
    return sums, all(arrived() for arrived in finite)


def empty_sums(task: Task[B]) -> Tensor:
    """The task's sums before the first batch: one for each measure, and the number of samples."""
    return torch.zeros(len(task.measures) + 1, device=task.world.device)


def update(state: TrainState, config: TrainConfig) -> None:
    """Clip the gradients, update the weights and their average, and drop the gradients."""
    model, clip = state.model, config.optimizer.clip
    if clip != "none":
        state.scaler.unscale_(state.optimizer)
        head = model.head_parameters()
        clip_gradients(model.parameters(), clip, config.optimizer.clip_at, head)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    if state.average is not None and config.ema is not None:
        update_average(state.average, model, decay_at(state.step, config.ema))


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor],
    clip: Literal["none", "norm", "value", "agc"],
    clip_at: float,
    head: Iterable[Tensor] = (),
) -> None:
    """Clip the gradients in place.

    norm: the norm of all gradients together is at most `clip_at`. value: so is every number. agc:
    so is the gradient of every unit, relative to its weights (Brock et al., ICML 2021), except in
    the `head`, as in the paper.
    """
    parameters = list(parameters)
    match clip:
        case "norm":
            clip_grad_norm_(parameters, clip_at)
        case "value":
            clip_grad_value_(parameters, clip_at)
        case "agc":
            exempt = {id(parameter) for parameter in head}
            for parameter in parameters:
                if id(parameter) not in exempt and parameter.grad is not None:
                    _clip_units(parameter, parameter.grad, clip_at)


def _clip_units(weights: Tensor, gradient: Tensor, share: float) -> None:
    """Scale the gradient of each unit (row of a matrix, output channel) down to its limit.

    Not timm's function, which cannot handle sharded parameters.
    """
    # Weights near 0 may grow: they count as 10⁻³.
    limit = _unit_norms(weights).clamp(min=1e-3) * share
    norm = _unit_norms(gradient)
    gradient.mul_(torch.where(norm > limit, limit / norm, torch.ones_like(norm)))


def _unit_norms(tensor: Tensor) -> Tensor:
    axes = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=axes, keepdim=axes is not None)
    return norms


def explain_nonfinite(task: Task[B], parts: Sequence[B], step: int) -> str | None:
    """The module and the images of the first non-finite value, if this process had one.

    Repeats the forward pass with the same weights, images and random numbers; of all parts, since
    processes that share a model must make the same number of passes.
    """
    reasons = []
    for number, batch in enumerate(parts):
        first: list[str] = []
        hooks = [
            inner.register_forward_hook(_finder(name or "the model", first))
            for name, inner in task.module.named_modules()
        ]
        try:
            with torch.no_grad(), kept_buffers(task.module):
                loss, _ = _loss(task, task.module, batch, step, number)
        finally:
            for hook in hooks:
                hook.remove()
        if not loss.isfinite():
            where = first[0] if first else "the loss itself: the outputs of all modules are finite"
            ids = ", ".join(map(str, batch.ids.tolist()))
            reasons.append(f"first in {where}, for the images {ids}")
    return reasons[0] if reasons else None


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Within, a pass may change buffers (running statistics of batch norms); afterwards they are as
    before.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


def _loss(
    task: Task[B], module: nn.Module, batch: B, step: int, part: int
) -> tuple[Tensor, Tensor]:
    """The loss and the sums of one part, with the random numbers of that part."""
    torch.manual_seed(step_seed(task.config.seed, step, *task.place(part)))
    return task.loss(module, batch, step, part)


def _copy_to_host(flag: Tensor) -> Callable[[], bool]:
    """Start copying a flag; the result waits for its computation, not for later kernels."""
    if flag.device.type != "cuda":
        return lambda: bool(flag)
    copy = flag.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def answer() -> bool:
        arrived.synchronize()
        return bool(copy)

    return answer


def _finder(name: str, found: list[str]) -> Callable[[nn.Module, object, object], None]:
    def look(module: nn.Module, inputs: object, output: object) -> None:
        if not found and isinstance(output, Tensor) and not output.isfinite().all():
            found.append(name)

    return look
