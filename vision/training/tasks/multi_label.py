"""Images with any number of classes, each by a sigmoid of its own; some labels may be unknown."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vision.config import ConfigError
from vision.data.batches import Batch
from vision.data.sources.source import Source, label_names
from vision.evaluation.evaluate import predict
from vision.evaluation.metrics import with_flips
from vision.evaluation.multi_label_metrics import best_thresholds, overall_metrics, sort_scores
from vision.models.build import autocast
from vision.training.tasks.classification import Classification
from vision.training.tasks.configs import MultiLabelConfig
from vision.training.tasks.task import sums_of

EPSILON = 1e-8
"""Smallest probability whose logarithm or power the asymmetric loss takes; as in the original."""


class MultiLabel(Classification):
    """Binary cross-entropy or asymmetric loss of every known label of an image."""

    activation = "sigmoid"
    measures = ("loss", "sample_f1")
    headline = ("loss", "map", "micro_f1", "map_flipped")

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.config.task, MultiLabelConfig)
        self.settings = self.config.task
        weights = positive_weights(self.settings, self.data.train)
        self.weights = torch.from_numpy(weights).to(self.world.device)
        self.thresholds: list[float] = []

    def loss(self, module: nn.Module, batch: Batch, step: int, part: int) -> tuple[Tensor, Tensor]:
        """The loss of the logits for mixed targets."""
        images, targets = self.inputs(batch, step, part)
        with autocast(self.config.precision, self.world.device):
            logits = module(images)
        loss = multi_label_loss(logits, targets, self.settings, self.weights)
        return loss, sums_of(loss, len(targets), sum_of_f1(logits, targets))

    def evaluate(self, batch_size: int) -> dict[str, float]:
        """The metrics of `vision.evaluation.multi_label_metrics`, of the logits of all images."""
        world, val = self.world, self.data.val
        found = predict(
            self.model,
            self.validation_batches(batch_size),
            len(val),
            self.data.preprocess,
            len(self.classes),
            world.device,
            self.config.precision,
            activation=self.activation,
            flip_test=self.config.flip_test,
            channels_last=self.config.channels_last,
            reduce=world.sum,
        )
        labels = torch.from_numpy(val.labels)[found.ids]
        scores = sort_scores(found.logits, labels)
        self.thresholds = best_thresholds(scores).tolist()
        usual = overall_metrics(scores)
        if found.flipped is None:
            return usual
        return with_flips(usual, overall_metrics(sort_scores(found.flipped, labels)))

    def evaluated_record(self) -> dict[str, Any]:
        """The thresholds that are best on the validation images."""
        return {"thresholds": self.thresholds}

    def trial_batch(self, size: int) -> Batch:
        """Black images without labels."""
        batch = super().trial_batch(size)
        return batch._replace(labels=torch.zeros(size, len(self.classes), dtype=torch.int8))

    def caption(self, label: Tensor, logits: Tensor) -> str:
        """The classes of an image, and those that are predicted."""
        said = label_names((logits >= 0).to(torch.int8).cpu().numpy(), self.classes)
        own = label_names(label.cpu().numpy(), self.classes)
        return f"{own or 'none'} / {said or 'none'}"


def positive_weights(config: MultiLabelConfig, train: Source) -> NDArray[np.float32]:
    """The weight of every present class: (classes,)."""
    classes = len(train.classes)
    if isinstance(config.pos_weight, tuple):
        if len(config.pos_weight) != classes:
            raise ConfigError(
                f"task.pos_weight has {len(config.pos_weight)} numbers, but the data has {classes} "
                "classes; give one for each, or use none or balanced."
            )
        return np.array(config.pos_weight, dtype=np.float32)
    weights = np.ones(classes, dtype=np.float32)
    if config.pos_weight == "balanced":
        present = (train.labels == 1).sum(axis=0)
        absent = (train.labels == 0).sum(axis=0)
        usable = (present > 0) & (absent > 0)
        weights[usable] = absent[usable] / present[usable]
    return weights


def multi_label_loss(
    logits: Tensor, targets: Tensor, config: MultiLabelConfig, weights: Tensor
) -> Tensor:
    """The loss of logits (n, classes) in full precision, divided by n · classes.

    Targets are probabilities (n, classes), −1 where unknown, which costs nothing. A mixed target is
    the expectation of the losses for presence and absence.
    """
    logits = logits.float()
    known = targets >= 0
    targets = targets.clamp(min=0)
    if config.loss == "bce":
        present, absent = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    else:
        chance = logits.sigmoid()
        shifted = (1 - chance + config.clip).clamp(max=1)  # of absence, by the margin
        present = _focal(chance, config.gamma_positive)
        absent = _focal(shifted, config.gamma_negative)
    entries = weights * targets * present + (1 - targets) * absent
    return entries.where(known, 0.0).sum() / entries.numel()


def _focal(chance: Tensor, gamma: float) -> Tensor:
    """−(1 − p)^γ log p; where p is 1, gradients are finite also for γ below 1."""
    return -((1 - chance).clamp(min=EPSILON) ** gamma) * chance.clamp(min=EPSILON).log()


@torch.no_grad()
def sum_of_f1(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over images of F1 at a probability of 0.5; targets above 0.5 count as present."""
    said, actual = (logits >= 0) & (targets >= 0), targets > 0.5
    named = said.sum(1) + actual.sum(1)
    return (2 * (said & actual).sum(1) / named.clamp(min=1)).where(named > 0, 1.0).sum()
