"""Memory: how many images a device takes at once, and what to say when it takes no more."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vision.config import UserError
from vision.data.loader import Batch
from vision.data.preprocess import Preprocess
from vision.models.layers import Classifier
from vision.training.step import Setup, forward_backward


class OutOfMemoryError(UserError, RuntimeError):
    """A device that has no memory left, with the setting to try."""


@contextmanager
def memory_advice(micro_batch: int, device: torch.device) -> Iterator[None]:
    """Within, running out of memory ends with the peak, the micro-batch and what to try next."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"out of memory at {micro_batch} images per device (peak {_peak(device):.1f} GiB). "
            f"{_advice(micro_batch)}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left. For CPUs torch has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def largest_that_fits(
    share: int, at_most: int, model: Classifier, setup: Setup, preprocess: Preprocess
) -> int:
    """The largest equal part of a device's share, up to `at_most`, that a step has memory for."""
    device = setup.world.device
    for size in range(min(share, at_most), 0, -1):
        if share % size == 0 and _fits(size, model, setup, preprocess):
            return size
        if device.type == "cuda":
            torch.cuda.empty_cache()
    raise OutOfMemoryError(
        f"out of memory with a single image per device (peak {_peak(device):.1f} GiB). {_advice(1)}"
    )


def _fits(size: int, model: Classifier, setup: Setup, preprocess: Preprocess) -> bool:
    """Whether a forward and backward pass with so many images has memory enough."""
    nothing = torch.zeros(size, dtype=torch.int64)
    images = torch.zeros((size, preprocess.channels, *preprocess.image_size), dtype=torch.uint8)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    scaler = torch.amp.GradScaler(setup.world.device.type, enabled=False)
    try:
        with _reserved_for_later(model, setup):
            batch = Batch(images, labels=nothing, ids=nothing, epoch=0, failures=())
            forward_backward(model, [batch], setup, scaler, step=0)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
        for buffer, before in buffers:  # running statistics of a baseline's batch norms
            buffer.copy_(before)
    return True


@contextmanager
def _reserved_for_later(model: Classifier, setup: Setup) -> Iterator[None]:
    """Within, as much memory is taken as the first step takes that a trial does not: two moments of
    the optimiser, the average, and what processes exchange. Shares of FSDP need less than the whole
    model of the trial.
    """
    config, several = setup.config, setup.world.size > 1
    copies = 2 + (config.ema is not None) + several
    if several and config.parallel == "fsdp":
        copies = 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held = [torch.empty_like(parameter) for parameter in trained for _ in range(copies)]
    yield
    held.clear()


def _peak(device: torch.device) -> float:
    """GiB: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def _advice(micro_batch: int) -> str:
    if micro_batch > 1:
        return (
            f"Try max_batch_per_device={micro_batch // 2}: the batch stays the same, gradients are "
            "accumulated."
        )
    return (
        "Try model.checkpoint_activations=true, precision=bf16, parallel=fsdp on several devices, "
        "or smaller images (data.image_size)."
    )
