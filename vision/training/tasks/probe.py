"""A linear probe on features that are computed once: an epoch then costs what the head costs.

The pooled features of all images are kept beside the runs that use them, in `.features/` of their
common folder, by a fingerprint of what they were computed from: weights, images, preprocessing.

train-<fingerprint>.npy   float32 (images, width), in the order of the data, memory-mapped
train-<fingerprint>.json  the numbers of the images that could not be read; written last

A run with the same fingerprint uses them, whichever run computed them.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vision.checkpoints.fingerprint import digest_weights
from vision.config import ConfigError, parse
from vision.data.batches import evaluation_batches
from vision.data.images.mixing import Mix, soft_targets
from vision.data.order import BatchOrder, BatchRequest, evaluation_requests, training_requests
from vision.data.preprocess import Preprocess, normalizer
from vision.data.sources.source import Source
from vision.evaluation.evaluate import evaluation_mode
from vision.evaluation.metrics import add_batch, empty_sums, results
from vision.files import file_version, replacing, write_all, write_text
from vision.models.build import autocast
from vision.models.layers import Classifier, static_bias
from vision.randomness import generator
from vision.training.configs import TrainConfig
from vision.training.run.distributed import World
from vision.training.run.lock import LOCK
from vision.training.run.log import Reporter
from vision.training.run.run_folder import Run, writing
from vision.training.tasks.classification import checked_balance, loss_and_sums
from vision.training.tasks.configs import PLAIN_IMAGES
from vision.training.tasks.task import Task

_SELECTION = {"sampling", "samples_per_class", "train_fraction", "max_error_share", "val_fraction"}
"""Settings of the data that select images, whose names are in the fingerprint themselves."""


@dataclass(frozen=True)
class Features:
    """The features of a split, in the order of its images."""

    rows: NDArray[np.float32]
    unreadable: list[int]
    """Numbers of the images that could not be read."""


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
    headline = ("loss", "top1", "top5", "balanced_accuracy", "macro_f1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classes = len(self.data.train.classes)
        self.balance = checked_balance(self)
        self.module = _Head(self.model)
        self.parallel = "ddp"  # a head is small enough to be whole on every device
        self.sources = {"train": self.data.train, "val": self.data.val}
        self.features: dict[str, Features] = {}

    def prepare(self, batch_size: int, reporter: Reporter) -> None:
        """Compute the features, or find those that a run beside this one has computed."""
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
        return loss_and_sums(logits, targets, self.config.loss, self.balance)

    def evaluate(self, batch_size: int) -> dict[str, float]:
        """The metrics of `vision.evaluation.metrics`."""
        device, world = self.world.device, self.world
        sums = empty_sums(self.classes, device)
        requests = evaluation_requests(
            len(self.data.val), batch_size, world.rank, world.size, self.shares
        )
        with evaluation_mode(self.module), torch.no_grad():
            for request in self.stop.until(requests, world):
                batch = self._batch("val", request)
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
        names = (
            self.sources[split].name(index)
            for split, features in self.features.items()
            for index in features.unreadable
        )
        return {name: f"{name}: {reason}" for name in names}

    def _batch(self, split: Literal["train", "val"], request: BatchRequest) -> FeatureBatch:
        features = self.features[split]
        ids = request.indices.copy()
        for row in np.flatnonzero(np.isin(ids, features.unreadable)):
            ids[row] = -1 if split == "val" else self._replacement(request, int(row))
        rows = features.rows[np.maximum(ids, 0)]
        rows[ids < 0] = 0
        labels = np.where(ids >= 0, self.sources[split].labels[ids], 0)
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


def load_features(task: Task[Any], batch_size: int, reporter: Reporter) -> dict[str, Features]:
    """The features of both splits, computed unless they are there.

    All processes must call this together, when the model has its weights.
    """
    world, folder = task.world, features_folder(task.run)
    weights = digest_weights(task.model, excluded=task.model.head_names())  # features need no head
    found, done = {}, []
    for split, source in (("train", task.data.train), ("val", task.data.val)):
        fingerprint = _fingerprint(weights, task.config, task.data.preprocess, source)
        path, index = (folder / f"{split}-{fingerprint}.{kind}" for kind in ("npy", "json"))
        unreadable = world.from_main(_unreadable(path, index) if world.main else None)
        done.append(f"{len(source):,} {'computed' if unreadable is None else 'found'} for {split}")
        if unreadable is None:
            title = f"Features of {len(source):,} images ({split})"
            with reporter.progress_bar(title, len(source)) as advance:
                unreadable = _compute(task, source, path, batch_size, advance)
            if world.main:
                with writing(index):
                    write_text(index, json.dumps(unreadable) + "\n")
            world.wait()
        found[split] = Features(np.load(path, mmap_mode="r"), unreadable)
    reporter.say(f"Features: {', '.join(done)}, in {folder}.")
    return found


def features_folder(run: Run) -> Path:
    """The folder of cached features of all runs beside this one, or beside the run it serves."""
    parent = run.folder.parent
    return (parent.parent if (parent / LOCK).exists() else parent) / ".features"


def _unreadable(path: Path, index: Path) -> list[int] | None:
    """The images without features; None where there are no features."""
    try:
        numbers = json.loads(index.read_text(encoding="utf-8")) if path.is_file() else None
    except (FileNotFoundError, ValueError):  # a damaged file is written again
        return None
    return numbers if isinstance(numbers, list) else None


def _compute(
    task: Task[Any], source: Source, path: Path, batch_size: int, advance: Callable[[int], None]
) -> list[int]:
    """Store the features of all images; returns the numbers of those that could not be read.

    Every process computes a share, the main one writes: not through a memory map, which would end
    the process without a message on a full disk.
    """
    world, model, count = task.world, task.model, len(source)
    unreadable: list[int] = []
    first = 0
    with (
        evaluation_mode(model),
        torch.no_grad(),
        static_bias(model),
        writing(path),
        ExitStack() as stack,
    ):
        if world.main:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(replacing(path))
        normalize = normalizer(task.data.preprocess, world.device)
        loader = task.image_loader(source, keep=False)
        batches = evaluation_batches(loader, batch_size, world.rank, world.size, task.shares)
        shares: list[tuple[Tensor, Tensor]] = []
        for batch in task.stop.until(batches, world):
            images = normalize(batch.images.to(world.device, non_blocking=True))
            shares.append((_pooled(task, images, check=first == 0), batch.ids))
            if len(shares) < task.shares:
                continue
            rows, readable = _all_rows(world, shares)
            shares.clear()
            rows, readable = rows[: count - first], readable[: count - first]
            if world.main:
                if first == 0:
                    shape = (count, rows.shape[1])
                    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                write_all(file, rows.astype("<f4").tobytes())
            unreadable += (first + np.flatnonzero(~readable)).tolist()
            first += len(rows)
            advance(len(rows))
    return unreadable


def _pooled(task: Task[Any], images: Tensor, check: bool) -> Tensor:
    """The features of images. With `check`, the head alone must give the logits of the model."""
    model = task.model
    if task.config.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    with autocast(task.config.precision, task.world.device):
        tokens = model.forward_features(images)
        pooled = model.pool(tokens)
        if check:
            whole, parts = model.forward_head(tokens), model.classify(pooled)
            if pooled.ndim != 2 or not torch.allclose(whole, parts, rtol=1e-3, atol=1e-4):
                raise ConfigError(
                    "tune.cache: the head of this model is more than a layer on pooled features; "
                    "use tune.cache=false."
                )
    return pooled.float()


def _all_rows(
    world: World, shares: list[tuple[Tensor, Tensor]]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The features of all processes in the order of the data, and which images were readable.

    Each process gives features and image numbers of its shares, which have every n-th image, as
    `evaluation_requests` shares them out.
    """
    pooled = torch.stack([rows for rows, _ in shares], dim=1)
    count, here, width = pooled.shape
    rows = pooled.new_zeros(count, world.size, here, width + 1)
    rows[:, world.rank, :, :width] = pooled
    rows[:, world.rank, :, width] = torch.stack([ids >= 0 for _, ids in shares], dim=1).to(rows)
    numbers = world.sum(rows).flatten(0, 2).cpu().numpy()
    return numbers[:, :width], numbers[:, width] > 0


def _fingerprint(weights: str, config: TrainConfig, preprocess: Preprocess, source: Source) -> str:
    """A digest of weights, images and preprocessing; not of classes and what is learned."""
    values = {name: v for name, v in vars(preprocess).items() if name != "origin"}
    data = config.data.model_dump(mode="json", exclude=_SELECTION)
    plain = [weights, config.precision, values, data]
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
    digest.update(source.labels.tobytes())
    for index in range(len(source)):
        name = source.name(index)
        digest.update(f"{name} {file_version(name)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


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
        "stop_early": None,
        "duration": config.probe_first.duration,
        "ema": None,
        "flip_test": False,
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
        "rest_learning_rate": None,
        "reference_batch": None,
        "layer_decay": 1.0,
        "weight_decay": 0.0,
        "rest_weight_decay": None,
    }
    return parse(TrainConfig, values)
