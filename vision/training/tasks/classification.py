"""Classification of images: augmented, mixed (Mixup, CutMix) and smoothed."""

from collections.abc import Iterator, Mapping

import torch
from PIL.Image import Image
from torch import Tensor, nn

from vision.data.batches import Batch, evaluation_batches, training_batches
from vision.data.images.mixing import mix_batch
from vision.data.order import BatchOrder
from vision.data.preprocess import normalizer
from vision.data.tools.contact_sheet import contact_sheet
from vision.evaluation.evaluate import evaluate, evaluation_mode
from vision.models.precision import autocast
from vision.training.tasks.loss import check_loss, loss_and_sums
from vision.training.tasks.task import Task

TRAINING, VALIDATION = 32, 16
"""Largest number of images on a sheet."""


class Classification(Task[Batch]):
    """Cross-entropy or BCE of an image's classes."""

    measures = ("loss", "top1")
    headline = ("loss", "top1", "top5")

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
        return mix_batch(
            images,
            batch.labels.to(self.world.device, non_blocking=True),
            len(self.classes),
            self.config.augment,
            seed=self.config.seed,
            step=step,
            rank=self.world.rank,
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
        return evaluate(
            self.module,
            evaluation_batches(self.val_loader, batch_size, self.world.rank, self.world.size),
            self.data.preprocess,
            len(self.classes),
            self.world.device,
            self.config.precision,
            reduce=self.world.sum,
            channels_last=self.config.channels_last,
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
