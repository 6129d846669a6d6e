"""A linear probe on features that are computed once: an epoch then costs what the head costs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vision.config import parse
from vision.data.images.mixing import Mix, soft_targets
from vision.data.order import BatchOrder, BatchRequest, evaluation_requests, training_requests
from vision.evaluation.evaluate import evaluation_mode
from vision.evaluation.metrics import add_batch, empty_sums, results
from vision.models.layers import Classifier
from vision.models.precision import autocast
from vision.randomness import generator
from vision.training.configs import PLAIN_IMAGES, TrainConfig
from vision.training.run.messages import Reporter
from vision.training.tasks.features import Features, load_features
from vision.training.tasks.loss import check_loss, loss_and_sums
from vision.training.tasks.task import Task


class FeatureBatch(NamedTuple):
    """Pooled features of some images."""

    features: Tensor
    """float32 (n, width)"""
    labels: Tensor
    """int64 (n,)"""
    ids: Tensor
    """int64 (n,): number of the image in its source; −1: a filling row, not to be counted."""


class Probe(Task[FeatureBatch]):
    """The loss of the head on stored features of images as in evaluation."""

    measures = ("loss", "top1")
    headline = ("loss", "top1", "top5")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classes = len(self.data.train.classes)
        check_loss(self.config.loss, self.config.augment.label_smoothing, self.classes)
        self.module = _Head(self.model)
        self.parallel = "ddp"  # a head is small enough to be whole on every device
        self.features: dict[str, Features] = {}

    def prepare(self, batch_size: int, reporter: Reporter) -> None:
        """Compute the features, or find them in the run's folder."""
        self.features = load_features(self, batch_size, reporter)

    def training_batches(self, order: BatchOrder, start: int, stop: int) -> Iterator[FeatureBatch]:
        """Batches of the same images as those of a run on images."""
        for request in training_requests(self.data.train.labels, order, start, stop):
            yield self._batch("train", request)

    def loss(
        self, module: nn.Module, batch: FeatureBatch, step: int, part: int
    ) -> tuple[Tensor, Tensor]:
        """The loss of the logits for smoothed targets."""
        device, smoothing = self.world.device, self.config.augment.label_smoothing
        targets = soft_targets(batch.labels.to(device), self.classes, Mix(), smoothing)
        with autocast(self.config.precision, device):
            logits = module(batch.features.to(device))
        return loss_and_sums(logits, targets, self.config.loss)

    def evaluate(self, batch_size: int) -> dict[str, float]:
        """The metrics of `vision.evaluation.metrics`."""
        device, world = self.world.device, self.world
        sums = empty_sums(self.classes, device)
        requests = evaluation_requests(len(self.data.val), batch_size, world.rank, world.size)
        with evaluation_mode(self.module), torch.no_grad():
            for batch in (self._batch("val", request) for request in requests):
                with autocast(self.config.precision, device):
                    logits = self.module(batch.features.to(device))
                valid = batch.ids.to(device) >= 0
                sums = add_batch(sums, logits, batch.labels.to(device), valid)
        return results(world.sum(sums))

    def trial_batch(self, size: int) -> None:
        """None: a head needs hardly any memory."""

    def unreadable(self) -> Mapping[str, str]:
        """Images without features."""
        reason = "could not be read when the features were computed"
        sources = {"train": self.data.train, "val": self.data.val}
        names = (
            sources[split].name(index)
            for split, features in self.features.items()
            for index in features.unreadable
        )
        return {name: f"{name}: {reason}" for name in names}

    def _batch(self, split: Literal["train", "val"], request: BatchRequest) -> FeatureBatch:
        features = self.features[split]
        source = self.data.train if split == "train" else self.data.val
        ids = request.indices.copy()
        for row in np.flatnonzero(np.isin(ids, features.unreadable)):
            ids[row] = -1 if split == "val" else self._replacement(request, int(row))
        rows = features.rows[np.maximum(ids, 0)]
        rows[ids < 0] = 0
        labels = np.where(ids >= 0, source.labels[ids], 0)
        return FeatureBatch(*map(torch.from_numpy, (rows, labels, ids)))

    def _replacement(self, request: BatchRequest, row: int) -> int:
        """The image that a loader of images takes in place of an unreadable one."""
        index = int(request.indices[row])
        candidates = generator(
            self.config.seed,
            "replacement",
            epoch=request.epoch,
            index=index,
            occurrence=int(request.occurrences[row]),
        )
        while index in self.features["train"].unreadable:
            index = int(candidates.integers(len(self.data.train)))
        return index


class _Head(nn.Module):
    """The classifying layers of a model, as a module of their own."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.heads = nn.ModuleList(model.heads())
        self._classify = model.classify

    def forward(self, features: Tensor) -> Tensor:
        """(b c) → logits (b classes)"""
        return self._classify(features)


def probe_config(config: TrainConfig, folder: Path) -> TrainConfig:
    """The settings of the probe that `probe_first` puts before a fine-tuning, in its folder.

    It has the data, batches and loss of the run that it serves. Its learning rate falls to 0 from
    the start, and its weights are not averaged.
    """
    assert config.probe_first is not None
    values: dict[str, Any] = config.model_dump(mode="json")
    values |= {
        "name": "probe",
        "output": str(folder),
        "tune": {"kind": "head", "cache": True},
        "probe_first": None,
        "duration": config.probe_first.duration,
        "ema": None,
        "augment": values["augment"] | PLAIN_IMAGES,
    }
    values["schedule"] |= {
        "shape": "cosine",
        "warmup": "0steps",
        "warmup_from": 0.0,
        "end_at": 0.0,
        "cooldown": "0steps",
    }
    values["optimizer"] |= {
        "learning_rate": config.probe_first.learning_rate,
        "reference_batch": None,
        "layer_decay": 1.0,
        "weight_decay": 0.0,
    }
    return parse(TrainConfig, values)
