"""Memory by trial: the part of a batch that fits a device, and the error where memory runs out.
Also what `vision info` says of several GPUs.
"""

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from vision.config import UserError
from vision.models.configs import ModelConfig
from vision.models.cost.count import format_bytes
from vision.models.layers import Grid
from vision.training.configs import TrainConfig
from vision.training.run.distributed import World
from vision.training.run.step_memory import StepMemory, memory_remedy
from vision.training.step import forward_backward, kept_buffers
from vision.training.tasks.task import Task

if TYPE_CHECKING:
    from rich.table import Table

IMAGES = (1, 8, 32, 128)
"""Images in one forward pass on one device, in the table of `vision info world=8`."""


class OutOfMemoryError(UserError, RuntimeError):
    """A device without free memory; the message names the setting to try."""


def memory_advice(
    error: BaseException, micro_batch: int, device: torch.device, elastic: int | None
) -> OutOfMemoryError | None:
    """The error to raise in place of one of memory: it names the peak, the micro-batch and the
    setting to try. None for any other error.
    """
    if not _is_out_of_memory(error):
        return None
    return _out_of_memory(micro_batch, device, elastic)


def _out_of_memory(images: int, device: torch.device, elastic: int | None) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"out of memory at {images} image{'' if images == 1 else 's'} per device (peak "
        f"{_peak(device):.1f} GiB). {memory_remedy(images, elastic, images // 2)}"
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory. For CPUs torch has no exception class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def largest_in_trial(task: Task[Any], memory: StepMemory, sizes: Sequence[int]) -> int:
    """The first of these numbers of images that a step has memory for, by trial where the estimate
    is not sure.
    """
    for size in sizes:
        if memory.is_sure(size) or _fits(task, size):
            return size
        if task.world.device.type == "cuda":
            torch.cuda.empty_cache()
    raise _out_of_memory(1, task.world.device, None)


def _fits(task: Task[Any], size: int) -> bool:
    """Whether a forward and backward pass with this number of samples has enough memory."""
    batch = task.trial_batch(size)
    if batch is None:
        return True
    scaler = torch.amp.GradScaler(task.world.device.type, enabled=False)
    try:
        with _reserved_for_later(task), kept_buffers(task.module):
            forward_backward(task, task.module, [batch], scaler, step=0)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        return False
    finally:
        task.module.zero_grad(set_to_none=True)
    return True


@contextmanager
def _reserved_for_later(task: Task[Any]) -> Iterator[None]:
    """Within, hold the memory that a first step takes beyond that of a trial: two moments of the
    optimiser, the average, and the buffers of DDP. The shards of FSDP need less than the whole
    model of the trial.
    """
    several = task.world.size > 1
    copies = 2 + (task.config.ema is not None) + several
    if several and task.parallel == "fsdp":
        copies = 0
    trained = [parameter for parameter in task.module.parameters() if parameter.requires_grad]
    held = [torch.empty_like(parameter) for parameter in trained for _ in range(copies)]
    yield
    held.clear()


def _peak(device: torch.device) -> float:
    """Peak memory in GiB: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def memory_per_rank(
    config: TrainConfig, model: ModelConfig, size: Grid, channels: int, classes: int, world: int
) -> dict[int, int]:
    """Peak bytes on each device by the number of images in a forward pass, all of its step."""
    peaks = {}
    for images in IMAGES:
        whole = config.model_copy(update={"batch_size": images * world})
        processes = World(0, world, torch.device("cuda"))
        memory = StepMemory(whole, model, size, channels, classes, processes)
        peaks[images] = int(memory.peak(images))
    return peaks


def rank_table(peaks: dict[int, int], config: TrainConfig, world: int) -> "Table":
    """The peaks as a table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    averaged = "no average" if config.ema is None else "an average of the weights"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    table.caption = (
        f"estimated; {world} GPUs, parallel={config.parallel}, {config.precision}, "
        f"{config.optimizer.name}, {averaged}"
    )
    table.add_column("images per GPU", justify="right")
    table.add_column("memory of each GPU", justify="right")
    for images, peak in peaks.items():
        table.add_row(str(images), format_bytes(peak))
    return table
