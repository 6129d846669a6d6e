"""Classification of images: augmented, mixed (Mixup, CutMix) and smoothed."""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor, nn

from vision.config import ConfigError
from vision.data.batches import Batch, evaluation_batches, training_batches
from vision.data.images.mixing import mix_batch
from vision.data.order import BatchOrder
from vision.data.preprocess import normalizer
from vision.data.tools.contact_sheet import contact_sheet
from vision.evaluation.evaluate import evaluate, evaluation_mode
from vision.models.build import autocast
from vision.training.tasks.configs import LossConfig
from vision.training.tasks.task import Task

TRAINING, VALIDATION = 32, 16
"""Largest number of images on a sheet."""


class Classification(Task[Batch]):
    """Cross-entropy or BCE of an image's classes."""

    measures = ("loss", "top1")
    headline = ("loss", "top1", "top5", "top1_flipped")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classes = self.data.train.classes
        check_loss(self.config.loss, self.config.augment.label_smoothing, len(self.classes))
        self.train_loader = self.image_loader(self.data.train, self.config.augment)
        self.normalize = normalizer(self.data.preprocess, self.world.device)

    def training_batches(self, order: BatchOrder, start: int, stop: int) -> Iterator[Batch]:
        """Augmented images."""
        return training_batches(self.train_loader, order, start, stop)

    def inputs(self, batch: Batch, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Normalised and mixed images with their targets (n, classes)."""
        images = self.normalize(batch.images.to(self.world.device, non_blocking=True))
        rank, part = self.place(part)
        return mix_batch(
            images,
            batch.labels.to(self.world.device, non_blocking=True),
            len(self.classes),
            self.config.augment,
            seed=self.config.seed,
            step=step,
            rank=rank,
            part=part,
        )

    def loss(self, module: nn.Module, batch: Batch, step: int, part: int) -> tuple[Tensor, Tensor]:
        """The loss of the logits for mixed targets."""
        images, targets = self.inputs(batch, step, part)
        if self.config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with autocast(self.config.precision, self.world.device):
            logits = module(images)
        return loss_and_sums(logits, targets, self.config.loss)

    def evaluate(self, batch_size: int) -> dict[str, float]:
        """The metrics of `vision.evaluation.metrics`."""
        world = self.world
        batches = evaluation_batches(
            self.val_loader, batch_size, world.rank, world.size, self.shares
        )
        return evaluate(
            self.module,
            self.stop.until(batches, world),
            self.data.preprocess,
            len(self.classes),
            world.device,
            self.config.precision,
            reduce=world.sum,
            channels_last=self.config.channels_last,
            flip_test=self.config.flip_test,
        )

    def trial_batch(self, size: int) -> Batch:
        """Black images."""
        preprocess, nothing = self.data.preprocess, torch.zeros(size, dtype=torch.int64)
        shape = (size, preprocess.channels, *preprocess.image_size)
        return Batch(torch.zeros(shape, dtype=torch.uint8), nothing, nothing, epoch=0, failures=())

    def training_sheet(self, batch: Batch) -> Image:
        """The first images: augmented, normalised and mixed."""
        images, targets = self.inputs(batch, step=0, part=0)
        return contact_sheet(
            images[:TRAINING],
            targets[:TRAINING],
            self.classes,
            self.data.preprocess,
            title="Step 1, as the model gets it",
        )

    @torch.no_grad()
    def prediction_sheet(self, batch_size: int, step: int) -> Image:
        """Validation images with label and predicted class."""
        batch = self.first_validation_images(batch_size)
        shown = (batch.ids >= 0).nonzero().flatten()[:VALIDATION]
        shown = shown if len(shown) else torch.arange(1)  # a process with nothing but filling rows
        images = self.normalize(batch.images[shown].to(self.world.device))
        with evaluation_mode(self.module), autocast(self.config.precision, self.world.device):
            logits = self.module(images)
        confidences, predicted = logits.float().softmax(1).max(1)
        captions = [
            f"{self.classes[label]} / {self.classes[answer]} {confidence:.0%}"
            for label, answer, confidence in zip(
                batch.labels[shown].tolist(), predicted.tolist(), confidences.tolist(), strict=True
            )
        ]
        return contact_sheet(
            images,
            torch.arange(len(captions)),
            captions,
            self.data.preprocess,
            columns=4,
            title=f"Step {step}: label / prediction",
        )

    def unreadable(self) -> Mapping[str, str]:
        """Training and validation images alike."""
        training = {f.name: f.reason for f in self.train_loader.failures.values()}
        return {**training, **super().unreadable()}


def training_loss(logits: Tensor, targets: Tensor, config: LossConfig) -> Tensor:
    """The mean loss of logits (n, classes), computed in full precision.

    Targets are probabilities (n, classes), already mixed and smoothed (vision.data.images.mixing),
    or labels (n,). Cross-entropy is summed over classes; BCE is averaged over them, as in DeiT-III
    (Touvron et al., ECCV 2022), which makes it smaller by about the number of classes.
    """
    logits = logits.float()
    if config.kind == "cross_entropy":
        return F.cross_entropy(logits, targets)
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1]).to(logits.dtype)
    if config.bce_threshold is not None:
        targets = (targets > config.bce_threshold).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets)


def loss_and_sums(logits: Tensor, targets: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The mean loss, and the sums (loss, correct predictions, images) for targets (n, classes)."""
    loss = training_loss(logits, targets, config)
    correct = (logits.detach().argmax(1) == targets.argmax(1)).sum()
    count = loss.new_full((), len(targets))  # new_tensor would make the host wait for the device
    return loss, torch.stack([loss.detach() * count, correct.to(loss.dtype), count])


def check_loss(config: LossConfig, label_smoothing: float, classes: int) -> None:
    """Refuse a threshold above or below all values of a smoothed target.

    Smoothing gives each wrong class smoothing / classes: small, but above a threshold of 0.
    """
    if config.bce_threshold is None:
        return
    if config.kind != "bce":
        raise ConfigError(
            f"loss.bce_threshold = {config.bce_threshold}, but loss.kind = {config.kind} has no "
            "threshold; set it to null, or choose loss.kind=bce."
        )
    wrong = label_smoothing / classes
    right = 1 - label_smoothing + wrong
    if not wrong <= config.bce_threshold < right:
        counted = "all" if wrong > config.bce_threshold else "none"
        raise ConfigError(
            f"loss.bce_threshold = {config.bce_threshold}: with augment.label_smoothing = "
            f"{label_smoothing} and {classes} classes a target is {right:g} for the right class "
            f"and {wrong:g} for every other, so that {counted} would count as 1. Choose a "
            f"threshold from {wrong:g} to below {right:g}, or no smoothing."
        )
