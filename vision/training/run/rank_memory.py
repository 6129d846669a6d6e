"""Memory of training on each of several GPUs, estimated without them: `vision info world=8`."""

from typing import TYPE_CHECKING

import torch

from vision.models.configs import ModelConfig
from vision.models.cost.count import format_bytes
from vision.models.layers import Grid
from vision.training.configs import TrainConfig
from vision.training.run.distributed import World
from vision.training.run.step_memory import StepMemory

if TYPE_CHECKING:
    from rich.table import Table

IMAGES = (1, 8, 32, 128)
"""Images in one forward pass on one device."""


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
