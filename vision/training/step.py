"""One optimiser step: forward and backward over the parts of a batch, then the update.

Everything random in it is a function of (seed, step, rank, part), so that no generator has a state
to save.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vision.config import UserError
from vision.data.images.mixing import mix_batch
from vision.data.loader import Batch
from vision.models.precision import autocast
from vision.randomness import step_seed
from vision.training.clip import clip_gradients
from vision.training.configs import OptimizerConfig, TrainConfig
from vision.training.optim import head_parameters
from vision.training.run.distributed import World, last_part_only
from vision.training.tasks.loss import training_loss


@dataclass(frozen=True)
class Setup:
    """What stays the same in all steps of a run."""

    config: TrainConfig
    world: World
    classes: int
    normalize: Callable[[Tensor], Tensor]


class NonFiniteError(UserError, RuntimeError):
    """The loss is not a number any more."""


def forward_backward(
    module: nn.Module,
    parts: Sequence[Batch],
    setup: Setup,
    scaler: torch.amp.GradScaler,
    step: int,
) -> tuple[Tensor, bool]:
    """Gradients of the mean loss of all parts, left in the parameters.

    Returns the sums (loss, correct answers, images) as a tensor on the device, and whether all
    losses were finite, for this process alone.
    """
    sums = torch.zeros(3, device=setup.world.device)
    finite = []
    for number, batch in enumerate(parts):
        with last_part_only(module, last=number == len(parts) - 1):
            loss, correct = _loss(module, batch, setup, step, number)
            finite.append(_copy_to_host(loss.detach().isfinite()))
            scaler.scale(loss / len(parts)).backward()
        count = loss.new_tensor(float(len(batch.labels)))
        sums += torch.stack([loss.detach() * count, correct, count])
    return sums, all(arrived() for arrived in finite)


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    config: OptimizerConfig,
) -> None:
    """Clip, take the step, forget the gradients."""
    if config.clip != "none":
        scaler.unscale_(optimizer)
        clip_gradients(model.parameters(), config.clip, config.clip_at, head_parameters(model))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def explain_nonfinite(
    module: nn.Module, parts: Sequence[Batch], setup: Setup, step: int
) -> str | None:
    """Which images of the step and which module gave the first number that is none, if this
    process had one.

    The forward pass is made again with the same weights, images and random numbers; of all parts,
    since processes that share a model must make as many.
    """
    reasons = []
    for number, batch in enumerate(parts):
        first: list[str] = []
        hooks = [
            inner.register_forward_hook(_finder(name or "the model", first))
            for name, inner in module.named_modules()
        ]
        try:
            with torch.no_grad():
                loss, _ = _loss(module, batch, setup, step, number)
        finally:
            for hook in hooks:
                hook.remove()
        if not loss.isfinite():
            where = first[0] if first else "the loss itself: all modules gave finite numbers"
            ids = ", ".join(map(str, batch.ids.tolist()))
            reasons.append(f"first in {where}, for the images {ids}")
    return reasons[0] if reasons else None


def inputs(batch: Batch, setup: Setup, step: int, part: int) -> tuple[Tensor, Tensor]:
    """What the model gets of one part, and what it should answer: normalised and mixed."""
    config, world = setup.config, setup.world
    images = setup.normalize(batch.images.to(world.device, non_blocking=True))
    return mix_batch(
        images,
        batch.labels.to(world.device, non_blocking=True),
        setup.classes,
        config.augment,
        seed=config.seed,
        step=step,
        rank=world.rank,
        part=part,
    )


def _loss(
    module: nn.Module, batch: Batch, setup: Setup, step: int, part: int
) -> tuple[Tensor, Tensor]:
    """The mean loss of one part and its number of right answers."""
    config, world = setup.config, setup.world
    torch.manual_seed(step_seed(config.seed, step, world.rank, part))
    images, targets = inputs(batch, setup, step, part)
    if config.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    with autocast(config.precision, world.device):
        logits = module(images)
    loss = training_loss(logits, targets, config.loss)
    correct = (logits.detach().argmax(1) == targets.argmax(1)).sum()
    return loss, correct.to(loss.dtype)


def _copy_to_host(flag: Tensor) -> Callable[[], bool]:
    """Start copying a flag; the answer waits for what computed it, not for what came after."""
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
