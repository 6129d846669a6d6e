"""Classification of images: augmented, mixed (Mixup, CutMix) and smoothed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor, nn

from vision.config import ConfigError, shorten
from vision.data.batches import Batch
from vision.data.configs import DataConfig, FolderConfig
from vision.data.images.mixing import mix_batch
from vision.data.sources.folder import list_classes
from vision.data.sources.source import Labels, class_sizes
from vision.data.tools.contact_sheet import contact_sheet
from vision.evaluation.evaluate import evaluate, evaluation_mode
from vision.models.build import autocast
from vision.models.layers import Activation
from vision.terminal import percent
from vision.training.tasks.configs import LossConfig
from vision.training.tasks.task import ImageTask, Task, sums_of

Floats = NDArray[np.float64]

TRAINING, VALIDATION = 32, 16
"""Largest number of images on a sheet."""


@dataclass(frozen=True)
class ClassBalance:
    """What the loss does about unequal classes; None: nothing."""

    weights: Tensor | None = None
    """float32 (classes,): weight of each class, of mean 1 over the images as they are sampled. The
    loss is then a plain mean over images, whatever batch or process they are in."""
    shift: Tensor | None = None
    """float32 (classes,): τ · log(share), added to the logits in training."""


class Classification(ImageTask):
    """Cross-entropy, BCE or focal loss of an image's classes."""

    activation: ClassVar[Activation] = "softmax"
    measures: ClassVar[tuple[str, ...]] = ("loss", "top1")
    headline: ClassVar[tuple[str, ...]] = (
        *("loss", "top1", "top5", "balanced_accuracy", "macro_f1", "top1_flipped"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classes = self.data.train.classes
        self.model.activation = self.activation
        self.balance = checked_balance(self)

    def inputs(self, batch: Batch, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Normalised and mixed images with their targets (n, classes)."""
        rank, part = self.place(part)
        return mix_batch(
            self.images(batch.images),
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
        with autocast(self.config.precision, self.world.device):
            logits = module(images)
        return loss_and_sums(logits, targets, self.config.loss, self.balance)

    def evaluate(self, batch_size: int) -> dict[str, float]:
        """The metrics of `vision.evaluation.metrics`."""
        world = self.world
        return evaluate(
            self.module,
            self.validation_batches(batch_size),
            self.data.preprocess,
            len(self.classes),
            world.device,
            self.config.precision,
            reduce=world.sum,
            channels_last=self.config.channels_last,
            flip_test=self.config.flip_test,
        )

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
        images = self.images(batch.images[shown])
        with evaluation_mode(self.module), autocast(self.config.precision, self.world.device):
            logits = self.module(images)
        captions = [
            self.caption(label, answer)
            for label, answer in zip(batch.labels[shown], logits.float(), strict=True)
        ]
        return contact_sheet(
            images,
            torch.arange(len(captions)),
            captions,
            self.data.preprocess,
            columns=4,
            title=f"Step {step}: label / prediction",
        )

    def caption(self, label: Tensor, logits: Tensor) -> str:
        """The label of an image, and the predicted class."""
        confidence, answer = logits.softmax(0).max(0)
        names = f"{self.classes[int(label)]} / {self.classes[int(answer)]}"
        return f"{names} {percent(float(confidence), 0)}"


def training_loss(
    logits: Tensor, targets: Tensor, config: LossConfig, balance: ClassBalance
) -> Tensor:
    """The mean loss of logits z (n, classes), computed in full precision.

    Targets t are probabilities (n, classes), already mixed and smoothed
    (vision.data.images.mixing), or labels (n,). With p = softmax(z + shift), class weights w and
    k over classes, the loss of an image is

    cross_entropy   − Σ_k w_k t_k log p_k, as torch weighs probabilities
    focal           − Σ_k w_k t_k (1 − p_k)^gamma log p_k
    bce             (Σ_k w_k t_k) · mean_k BCE(sigmoid(z_k), t_k), weighed by image as in Cui et al.

    BCE is averaged over classes, as in DeiT-III (Touvron et al., ECCV 2022), which makes it smaller
    by about their number. Weights have mean 1 over the training set (`ClassBalance`), so means of
    parts of a batch can be averaged.
    """
    logits = logits.float()
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1]).to(logits.dtype)
    weights = balance.weights
    if config.kind == "bce":
        hard = targets
        if config.bce_threshold is not None:
            hard = (targets > config.bce_threshold).to(logits.dtype)
        by_image = None if weights is None else (targets * weights).sum(1, keepdim=True)
        return F.binary_cross_entropy_with_logits(logits, hard, weight=by_image)
    if balance.shift is not None:
        logits = logits + balance.shift
    if config.kind == "cross_entropy":
        return F.cross_entropy(logits, targets, weight=weights)
    logs = logits.log_softmax(1)
    # (1 − p)^gamma from log(1 − p), whose gradient stays finite at p = 1.
    wrong = torch.log1p(-logs.exp().clamp(max=1 - torch.finfo(logs.dtype).eps))
    terms = targets * (config.focal_gamma * wrong).exp() * logs
    return -(terms if weights is None else terms * weights).sum(1).mean()


def loss_and_sums(
    logits: Tensor, targets: Tensor, config: LossConfig, balance: ClassBalance
) -> tuple[Tensor, Tensor]:
    """The mean loss, and the sums (loss, correct predictions, images) for targets (n, classes)."""
    loss = training_loss(logits, targets, config, balance)
    correct = (logits.detach().argmax(1) == targets.argmax(1)).sum()
    return loss, sums_of(loss, len(targets), correct)


def checked_balance(task: Task[Any]) -> ClassBalance:
    """The balance of a classifier's run, refused where its loss does not fit its classes."""
    config, train = task.config, task.data.train
    if not train.multi_label:
        check_classes(config.data, train.classes)
    check_loss(config.loss, config.augment.label_smoothing, len(train.classes))
    sampling = config.data.sampling
    return class_balance(config.loss, train.labels, train.classes, sampling, task.world.device)


def class_balance(
    config: LossConfig,
    labels: Labels,
    classes: tuple[str, ...],
    sampling: Literal["uniform", "balanced"],
    device: torch.device,
) -> ClassBalance:
    """The balance of a run on training images with these labels; refused where it has none. Classes
    have the share that they are sampled with: with data.sampling=balanced all have the same.
    """
    counts = class_sizes(labels, len(classes)).astype(np.float64)
    shares = counts if sampling == "uniform" else (counts > 0).astype(np.float64)
    shares = shares / max(shares.sum(), 1.0)
    weights = shift = None
    if config.class_weights != "none":
        found = class_weights(config, counts, shares)
        weights = torch.tensor(found, dtype=torch.float32, device=device)
    if config.logit_adjustment:
        if (counts == 0).any():
            raise ConfigError(
                f"loss.logit_adjustment = {config.logit_adjustment:g}: the class "
                f"'{classes[int(counts.argmin())]}' has no training images, so the logarithm of "
                "its share is not finite; use 0, or data without empty classes."
            )
        adjusted = config.logit_adjustment * np.log(shares)
        shift = torch.tensor(adjusted, dtype=torch.float32, device=device)
    return ClassBalance(weights, shift)


def class_weights(config: LossConfig, counts: Floats, shares: Floats) -> Floats:
    """The weight of every class, of mean 1 over images in which classes have these shares. A class
    without images has none.
    """
    present = counts > 0
    match config.class_weights:
        case "none":
            raw = np.ones_like(counts)
        case "balanced":
            raw = 1 / np.maximum(counts, 1)
        case "effective":
            beta = config.effective_beta
            raw = (1 - beta) / (1 - beta ** np.maximum(counts, 1))
        case given:
            if len(given) != len(counts):
                raise ConfigError(
                    f"loss.class_weights has {len(given)} numbers, but the data has {len(counts)} "
                    "classes; give one for each, in their order (`vision data check=true`)."
                )
            raw = np.array(given)
    mean = float((raw * shares).sum())
    if not mean:
        raise ConfigError(
            "loss.class_weights: every class with training images has the weight 0; give one of "
            "them a larger one."
        )
    weights: Floats = np.where(present, raw, 0) / mean
    return weights


def check_classes(data: DataConfig, classes: Sequence[str]) -> None:
    """Refuse a single class: every answer would be right."""
    if len(classes) > 1:
        return
    text = f"data: there is a single class, {shorten(classes)}: every answer would be right."
    if not isinstance(data, FolderConfig):
        raise ConfigError(f"{text} Choose data with at least two.")
    inside = data.root / classes[0]
    folders = list_classes(inside) if inside.is_dir() else ()
    if len(folders) > 1:
        meant = f"{inside} has {shorten(folders, 3)}; set data.root={inside}."
    else:
        meant = f"Expected a folder for each class in {data.root}, or in its train/ and val/."
    raise ConfigError(f"{text} {meant}")


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
