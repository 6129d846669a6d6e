"""Memory of a run, estimated before it is taken, and that of the device.

The steps of the run are taken on `meta`, where tensors have shapes but no contents: the model is
built, parameters are frozen, the optimiser updates them, a batch goes forward and back. What is
alive at each moment is counted (`vision/models/cost/live_memory.py`), so every optimiser, EMA,
LoRA and precision has its own figure. The peak is the larger one of the backward pass and the
update. Not counted: the interpreter and its libraries, the data loader, and the workspace of
kernels.
"""

import math
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision.config import ConfigError
from vision.data.preprocess import Preprocess
from vision.data.sources.source import Source
from vision.models.build import build_model
from vision.models.configs import ModelConfig, TimmConfig
from vision.models.cost.as_on import AsOn
from vision.models.cost.count import format_bytes
from vision.models.cost.live_memory import LiveMemory
from vision.models.layers import Classifier, Grid
from vision.models.reconstruction import MaskedModel
from vision.training.configs import TrainConfig
from vision.training.elastic import virtual_ranks_of_each
from vision.training.optim import build_optimizer
from vision.training.run.distributed import World
from vision.training.state import start_average
from vision.training.tasks.configs import DistillConfig, MaskedConfig, TuneAllConfig, TuneHeadConfig
from vision.training.tasks.distillation import teacher_bytes
from vision.training.tasks.masked_model import masked_model
from vision.training.tune import freeze

REFUSED, WARNED, SURE = 1.5, 0.9, 0.5
"""Parts of a device's memory above which a run is refused, warned about or tried. The estimate may
be too high, and systems swap and compress."""
_GIVEN_UP = 8
"""Part of a device's memory at which an estimate ends."""
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""Files with the limit of a control group: of version 2, and of the memory controller of 1."""


@dataclass(eq=False)
class StepMemory:
    """Memory of the steps of a run on one device, in bytes, by images in one forward pass."""

    config: TrainConfig
    model: ModelConfig
    image_size: Grid
    channels: int
    classes: int
    world: World

    def __post_init__(self) -> None:
        config, world = self.config, self.world
        self.available = device_memory(world.device)
        """Memory of the device; None where that, or what the run needs, is unknown."""
        self.share = max(1, config.batch_size // world.size)
        """Images of a step on one device."""
        self.beside = 0
        """Weights of a teacher, whole on every device."""
        if self.available is not None and isinstance(config.task, DistillConfig):
            self.beside = teacher_bytes(config.task, world)
        virtual = 1
        if config.elastic is not None:
            virtual = virtual_ranks_of_each(config.elastic, world.size)
        self._sums = virtual.bit_length() - 1
        """Largest number of sums of gradients that wait for those of further virtual ranks."""
        self._live = LiveMemory(_GIVEN_UP * self.available if self.available else math.inf)
        self._peaks: dict[int, float] = {}
        self._update = self._counted(self._peak_of_update)

    def peak(self, images: int) -> float:
        """The larger peak of a backward pass and an update, beside a teacher; infinite if it is far
        above what the device has.
        """
        if isinstance(self.model, TimmConfig):
            images = max(images, 2)  # batch norms refuse a single value per channel
        if images not in self._peaks and self._update < math.inf:
            backward = self._counted(lambda: self._peak_of_backward(images))
            self._peaks[images] = max(self._update, backward)
        return self._peaks.get(images, math.inf) + self.beside

    def sizes_that_fit(self, at_most: int) -> list[int]:
        """Equal parts of a device's share, up to `at_most` images, with enough memory, the largest
        first.
        """
        sizes = [n for n in range(1, min(at_most, self.share) + 1) if self.share % n == 0]
        if self.available is not None:
            sizes = sizes[: bisect_right(sizes, WARNED * self.available, key=self.peak)]
        return sizes[::-1]

    def is_sure(self, images: int) -> bool:
        """Whether these fit without a trial: the estimate is far below the memory. On a CPU it
        decides alone: without memory that ends the process instead of refusing.
        """
        if self.available is None:
            return False
        return self.world.device.type == "cpu" or self.peak(images) < SURE * self.available

    def check(self) -> None:
        """Refuse a run that needs far more memory than the device has."""
        limit, elastic = self.config.max_batch_per_device, self.config.elastic
        if elastic is not None:
            limit = self.config.batch_size // elastic
        images = 1 if limit == "auto" else min(self.share, limit or self.share)
        peak = self.peak(images)  # which may find that the memory cannot be estimated
        if self.available is not None and peak > REFUSED * self.available:
            raise ConfigError(f"{self._figure(images)}. {self._remedy(images)}")

    def warning(self, images: int) -> str:
        """A sentence on a run that may not fit; empty for one that does."""
        if self.available is None or self.peak(images) <= WARNED * self.available:
            return ""
        return f"{self._figure(images)}, and may not fit. {self._remedy(images)}"

    def line(self, images: int) -> str:
        """The figure for a summary."""
        if self.available is None:
            return "unknown"
        peak = format_bytes(int(self.peak(images)))
        return f"about {peak} in a step, of {format_bytes(self.available)}"

    def _figure(self, images: int) -> str:
        assert self.available is not None
        peak, counted = self.peak(images), f"{images} image{'' if images == 1 else 's'}"
        needed = f"more than {format_bytes(_GIVEN_UP * self.available)}"
        if peak < math.inf:
            needed = f"about {format_bytes(int(peak))}"
        return (
            f"memory: the run needs {needed} at {counted} per device, which has "
            f"{format_bytes(self.available)} ({self.world.device.type})"
        )

    def _remedy(self, images: int) -> str:
        height, width = self.image_size
        fitting = next(iter(self.sizes_that_fit(images - 1)), None)
        smaller = f"images smaller than {height} × {width} (data.image_size)"
        return memory_remedy(images, self.config.elastic, fitting, smaller)

    def _counted(self, peak: Callable[[], float]) -> float:
        """A peak, computed while memory is counted."""
        with torch.inference_mode(False), torch.enable_grad(), self._live:
            try:
                return peak()
            except MemoryError:
                return math.inf
            except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError):
                if not isinstance(self.model, TimmConfig):
                    raise
                self.available = None  # some models of timm look at contents
                return 0.0

    def _trained_model(self) -> Classifier:
        """The model with what the task adds to it, on `meta`."""
        task, size, channels = self.config.task, self.image_size, self.channels
        model = build_model(
            self.model, size, channels=channels, classes=self.classes, device="meta"
        )
        if not isinstance(task, MaskedConfig):
            return model
        return masked_model(task, model, size, channels, self.config.seed)

    def _loss(self, images: Tensor) -> Tensor:
        """The loss of a batch, of the shape and type of any other."""
        if isinstance(self._module, MaskedModel):
            mask = torch.zeros(len(images), *self._module.encoder.grid, dtype=torch.bool)
            return self._module.losses(self._module(images, mask), images, mask).mean()
        logits = self._module(images)
        return F.cross_entropy(logits.float(), torch.zeros_like(logits, dtype=torch.float32))

    def _peak_of_update(self) -> float:
        """Peak of an update. Afterwards everything is there that lasts from step to step."""
        config, live = self.config, self._live
        model = self._trained_model()
        self._module = model.train()
        if getattr(self.model, "checkpoint_activations", False):
            lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
            for block in (block for blocks in lists for block in blocks):
                block.forward = self._recomputed(block.forward)
        if not isinstance(config.tune, TuneAllConfig):
            freeze(self._module, config.tune, config.seed)
        self._trained = [p for p in self._module.parameters() if p.requires_grad]
        self._lasting: list[object] = []
        if config.ema is not None:
            self._lasting.append(start_average(self._module))
        if self.world.size > 1 and config.parallel == "ddp" and config.elastic is None:
            self._lasting.append(self._gradients())  # the buckets that processes exchange
        self._optimizer = build_optimizer(
            self._module, config.optimizer, bfloat16=config.precision == "bf16"
        )
        self._accumulate()
        try:
            self._optimizer.step()
        except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError):
            # One that looks at contents, which `meta` does not have. Most have two moments.
            self._lasting += [self._gradients(), self._gradients()]
        peak, with_gradients = live.peak, live.now
        self._optimizer.zero_grad(set_to_none=True)
        return peak - self._elsewhere(with_gradients)

    def _peak_of_backward(self, images: int) -> float:
        """Peak of a forward and a backward pass; of the former alone where features are cached."""
        config, live = self.config, self._live
        cached = isinstance(config.tune, TuneHeadConfig) and config.tune.cache
        waiting = [self._gradients() for _ in range(0 if cached else self._sums)]
        if images < self.share and not cached and config.elastic is None:
            self._accumulate()
        lasting = live.now
        live.start_peak()
        try:
            with torch.device("meta"), self._as_on():
                batch = torch.zeros(images, self.channels, *self.image_size)
                if cached:
                    with torch.no_grad():
                        self._module(batch)
                else:
                    self._loss(batch).backward()
            if config.elastic is not None and not cached:
                waiting.append(self._gradients())  # those of this virtual rank in one vector
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        waiting.clear()
        return live.peak - self._elsewhere(lasting)

    def _as_on(self) -> AsOn:
        return AsOn(self.world.device.type, _DTYPES[self.config.precision])

    def _recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a block that is also called in the backward pass, where no mode is."""

        def run(*args: Any) -> Any:
            with self._as_on():
                return forward(*args)

        return run

    def _gradients(self) -> list[Tensor]:
        return [torch.empty_like(parameter) for parameter in self._trained]

    def _accumulate(self) -> None:
        """Have gradients, as after an earlier part of a step."""
        for parameter, gradient in zip(self._trained, self._gradients(), strict=True):
            parameter.grad = gradient

    def _elsewhere(self, lasting: int) -> float:
        """The part of weights, states and gradients that FSDP leaves to other processes."""
        sharded = self.config.parallel == "fsdp" and self.world.size > 1
        return lasting * (1 - 1 / self.world.size) if sharded else 0.0


def memory_remedy(
    images: int,
    elastic: int | None,
    fitting: int | None,
    smaller: str = "smaller images (data.image_size)",
) -> str:
    """What to try where a step with this number of images per device has not enough memory;
    `fitting` is a smaller number that may have.
    """
    if images > 1 and elastic is not None:
        return f"Try elastic={2 * elastic} in a new run, for micro-batches of half the size."
    if images > 1 and fitting is not None:
        return (
            f"Try max_batch_per_device={fitting}: the batch stays the same, gradients are "
            f"accumulated; or {smaller}."
        )
    return (
        f"Try {smaller}, a smaller model, model.checkpoint_activations=true, precision=bf16, or "
        f"parallel=fsdp on several devices{': a single image is too much' * (images > 1)}."
    )


def checked_memory(
    config: TrainConfig, model: ModelConfig, preprocess: Preprocess, train: Source, world: World
) -> StepMemory:
    """The memory of a run with this model, refused if the device has far less."""
    size, channels, classes = preprocess.image_size, train.channels, len(train.classes)
    if isinstance(model, TimmConfig):
        from vision.models.timm import check_size

        check_size(model, size, channels, classes)
    memory = StepMemory(config, model, size, channels, classes, world)
    memory.check()
    return memory


def device_memory(device: torch.device) -> int | None:
    """Bytes of a device, None where that is unknown; those of a CPU are shared by the processes of
    the run on this machine.
    """
    match device.type:
        case "cuda" if torch.cuda.is_available():
            return torch.cuda.get_device_properties(device).total_memory
        case "mps":
            return torch.mps.recommended_max_memory()
        case "cpu":
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            limit = control_group_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            return min(total, limit or total) // processes
        case _:
            return None


def control_group_limit(groups: Path, mounted: Path) -> int | None:
    """The smallest limit of the control groups of this process and of those above them, which a
    container, Slurm or systemd sets; None if there is none.

    `groups` lists those of the process, `mounted` is the folder of their files.
    """
    limits = []
    for line in _text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        kind = next((k for k in controllers.split(",") if k in _FILES), None)
        if kind is None:
            continue
        group = mounted / kind / path.strip("/")
        while group.is_relative_to(mounted / kind):  # in a container the path may be the host's
            limit = _text(group / _FILES[kind]).strip()
            if limit.isdigit():  # else "max"
                limits.append(int(limit))
            group = group.parent
    return min(limits, default=None)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
