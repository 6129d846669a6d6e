"""One optimiser step: forward and backward over the parts of a batch, then the update.

Everything random in it is a function of (seed, step, rank, part), so that no generator has a state
to save.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vision.config import UserError
from vision.models.layers import Classifier
from vision.randomness import step_seed
from vision.training.clip import clip_gradients
from vision.training.configs import OptimizerConfig
from vision.training.optim import head_parameters
from vision.training.run.distributed import last_part_only
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
    for number, batch in enumerate(parts):
        with last_part_only(module, last=number == len(parts) - 1):
            loss, part_sums = _loss(task, module, batch, step, number)
            finite.append(_copy_to_host(loss.detach().isfinite()))
            scaler.scale(loss / len(parts)).backward()
        sums += part_sums
    return sums, all(arrived() for arrived in finite)


def empty_sums(task: Task[B]) -> Tensor:
    """The task's sums before the first batch: one for each measure, and the number of samples."""
    return torch.zeros(len(task.measures) + 1, device=task.world.device)


def update(
    model: Classifier,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    config: OptimizerConfig,
) -> None:
    """Clip the gradients, update the weights and drop the gradients."""
    if config.clip != "none":
        scaler.unscale_(optimizer)
        clip_gradients(model.parameters(), config.clip, config.clip_at, head_parameters(model))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


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
            with torch.no_grad():
                loss, _ = _loss(task, task.module, batch, step, number)
        finally:
            for hook in hooks:
                hook.remove()
        if not loss.isfinite():
            where = first[0] if first else "the loss itself: the outputs of all modules are finite"
            ids = ", ".join(map(str, batch.ids.tolist()))
            reasons.append(f"first in {where}, for the images {ids}")
    return reasons[0] if reasons else None


def _loss(
    task: Task[B], module: nn.Module, batch: B, step: int, part: int
) -> tuple[Tensor, Tensor]:
    """The loss and the sums of one part, with the random numbers of that part."""
    torch.manual_seed(step_seed(task.config.seed, step, task.world.rank, part))
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
