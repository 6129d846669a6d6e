"""The loops of `training.py`: one of timm's public parts, and this project's."""

import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from timm.data import ImageDataset, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, accuracy, dispatch_clip_grad

from vision.cli.composition import compose
from vision.config import parse
from vision.training import loop
from vision.training.configs import TrainConfig
from vision.training.tasks import task

LEARNING_RATE, LEAST_RATE, WEIGHT_DECAY, CLIP = 1e-3, 1e-5, 0.05, 1.0
CLASSES = ("one", "other")


@dataclass(frozen=True)
class Setting:
    """What both loops are given."""

    title: str
    images: int
    photo: bool
    """JPEG of about ImageNet's size, else PNG of the size that the model gets."""
    size: int
    batch: int
    epochs: int
    log_every: int
    timm_model: str = "vit_tiny_patch16_224"
    our_model: tuple[str, ...] = ("model=vit_tiny",)
    """Overrides that make the same architecture."""

    @property
    def steps(self) -> int:
        """Of one run."""
        return self.images // self.batch * self.epochs


@dataclass
class Times:
    """CPU seconds of one run of a loop."""

    total: float = 0.0
    data: float = 0.0
    step: float = 0.0
    """Forward, backward and optimiser."""
    apart: float = 0.0
    """Evaluation and checkpoints, which are not part of the total."""

    @property
    def outside(self) -> float:
        """The share of everything else: logging, bookkeeping, the schedule."""
        return 1 - (self.data + self.step) / self.total


# timm -------------------------------------------------------------------------------------------


def timm_loop(setting: Setting, root: Path, turn: int) -> Times:
    """As timm's train.py does it, with a bare training accuracy beside the loss, as ours has."""
    torch.manual_seed(turn)
    model = timm.create_model(
        setting.timm_model, img_size=setting.size, num_classes=len(CLASSES)
    ).train()
    loader = create_loader(
        ImageDataset(str(root / "train")),
        input_size=(3, setting.size, setting.size),
        batch_size=setting.batch,
        is_training=True,
        color_jitter=None,
        interpolation="bicubic",
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
    )
    optimizer = create_optimizer_v2(
        model, "adamw", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.99)
    )
    scheduler = CosineLRScheduler(optimizer, setting.steps, lr_min=LEAST_RATE, t_in_epochs=False)
    times = Times()
    start = time.process_time()
    updates = 0
    for epoch in range(setting.epochs):
        updates = timm_epoch(epoch, updates, setting, model, loader, optimizer, scheduler, times)
        scheduler.step(epoch + 1)
    times.total = time.process_time() - start
    assert updates == setting.steps, (updates, setting.steps)
    return times


def timm_epoch(
    epoch: int,
    updates: int,
    setting: Setting,
    model: torch.nn.Module,
    loader: Any,
    optimizer: torch.optim.Optimizer,
    scheduler: CosineLRScheduler,
    times: Times,
) -> int:
    """One epoch; returns the number of updates so far."""
    losses, top1, seconds = AverageMeter(), AverageMeter(), AverageMeter()
    logger = logging.getLogger("benchmark")
    optimizer.zero_grad()
    since = time.perf_counter()
    for images, labels in timed_items(loader, times):
        before = time.process_time()
        output = model(images)
        loss = F.cross_entropy(output, labels)
        loss.backward()
        dispatch_clip_grad(model.parameters(), CLIP, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        times.step += time.process_time() - before
        losses.update(loss.item(), len(images))
        top1.update(accuracy(output.detach(), labels)[0].item(), len(images))
        updates += 1
        seconds.update(time.perf_counter() - since)
        since = time.perf_counter()
        if updates % setting.log_every == 0:
            rates = [group["lr"] for group in optimizer.param_groups]
            logger.info(
                f"Train: {epoch} [{updates:>4d}/{setting.steps}] Loss: {losses.val:#.3g} "
                f"({losses.avg:#.3g}) Top-1: {top1.avg:.2f} Time: {seconds.val:.3f}s "
                f"{len(images) / seconds.avg:>7.2f}/s LR: {sum(rates) / len(rates):.3e}"
            )
        scheduler.step_update(num_updates=updates, metric=losses.avg)
    return updates


def timed_items(items: Any, times: Times) -> Iterator[Any]:
    """The items, with the time that each takes to come."""
    iterator = iter(items)
    while True:
        before = time.process_time()
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            times.data += time.process_time() - before
        yield item


# This project -----------------------------------------------------------------------------------


def our_loop(setting: Setting, root: Path, outputs: Path, turn: int, own: bool) -> Times:
    """`vision train` as a user starts it."""
    return timed_training(training_config(our_words(setting, root, outputs, turn, own)))


def timed_training(config: TrainConfig) -> Times:
    """A training run, whose parts are timed where the loop calls them."""
    times = Times()

    def batches(*arguments: Any) -> Iterator[Any]:
        return timed_items(training_batches(*arguments), times)

    training_batches = task.training_batches
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(patch.object(task, "training_batches", batches))
        for name, part in (
            ("_loop", "total"),
            ("forward_backward", "step"),
            ("update", "step"),
            ("_evaluate", "apart"),
            ("_save_if_due", "apart"),
        ):
            stack.enter_context(patch.object(loop, name, timed(getattr(loop, name), times, part)))
        code = loop.train(config, "benchmark")
    assert code == 0, code
    times.total -= times.apart
    return times


def training_config(words: list[str]) -> TrainConfig:
    """What these overrides of `vision train` make."""
    values, _ = compose("train", words)
    return parse(TrainConfig, values)


def our_words(setting: Setting, root: Path, outputs: Path, turn: int, own: bool) -> list[str]:
    """The overrides of a run with timm's settings."""
    timm_model = ("model=timm", f"model.name={setting.timm_model}")
    return [
        *(setting.our_model if own else timm_model),
        "data=folder",
        f"data.root={root}",
        f"data.image_size={setting.size}",
        "augment=inception",
        "loader.workers=0",
        "device=cpu",
        f"batch_size={setting.batch}",
        f"duration={setting.epochs}epochs",
        f"log.every={setting.log_every}steps",
        f"evaluate_every={setting.epochs}epochs",
        f"checkpoint.every={setting.epochs}epochs",
        "optimizer.name=adamw",
        f"optimizer.learning_rate={LEARNING_RATE}",
        f"optimizer.weight_decay={WEIGHT_DECAY}",
        "optimizer.clip=norm",
        f"optimizer.clip_at={CLIP}",
        "schedule.shape=cosine",
        "schedule.warmup=0steps",
        f"schedule.end_at={LEAST_RATE}",
        f"output={outputs}",
        f"name=run-{'own' if own else 'timm'}-{turn}",
    ]


def timed(function: Callable[..., Any], times: Times, part: str) -> Callable[..., Any]:
    """The function, with its CPU time added to a part."""

    def run(*arguments: Any, **named: Any) -> Any:
        before = time.process_time()
        try:
            return function(*arguments, **named)
        finally:
            setattr(times, part, getattr(times, part) + time.process_time() - before)

    return run
