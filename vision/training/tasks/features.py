"""Pooled features of all images of a run, computed once and kept in its folder:

features/train.npy, val.npy   float32 (images, width), in the order of the data, memory-mapped
features/index.json           fingerprints of what each array was computed from, and the images
                              that could not be read

An array with another fingerprint is computed again.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vision.config import ConfigError
from vision.data.batches import evaluation_batches
from vision.data.preprocess import Preprocess, normalizer
from vision.data.sources.source import Source
from vision.evaluation.evaluate import evaluation_mode
from vision.files import replacing, write_all
from vision.models.layers import Classifier, static_bias
from vision.models.precision import autocast
from vision.training.configs import TrainConfig
from vision.training.run.distributed import World
from vision.training.run.messages import Reporter
from vision.training.run.run_folder import read_json, write_json, writing
from vision.training.tasks.task import Task


@dataclass(frozen=True)
class Features:
    """The features of a split, in the order of its images."""

    rows: NDArray[np.float32]
    unreadable: list[int]
    """Numbers of the images that could not be read."""


def load_features(task: Task[Any], batch_size: int, reporter: Reporter) -> dict[str, Features]:
    """The features of both splits; those in the run's folder are used if they fit.

    All processes must call this together, when the model has its weights.
    """
    world, folder = task.world, task.run.folder / "features"
    weights = _digest_weights(task.model)
    found, done = {}, []
    for split, source in (("train", task.data.train), ("val", task.data.val)):
        path, index = folder / f"{split}.npy", folder / "index.json"
        fingerprint = _fingerprint(weights, task.config, task.data.preprocess, source)
        entry = read_json(index).get(split)
        fits = isinstance(entry, dict) and entry.get("fingerprint") == fingerprint
        entry = world.from_main(entry if fits and path.is_file() else None)
        done.append(f"{len(source):,} {'computed' if entry is None else 'found'} for {split}")
        if entry is None:
            title = f"Features of {len(source):,} images ({split})"
            with reporter.progress_bar(title, len(source)) as advance:
                unreadable = _compute(task, source, path, batch_size, advance)
            entry = {"fingerprint": fingerprint, "unreadable": unreadable}
            if world.main:  # last, so that a fingerprint in the index is that of a whole array
                write_json(index, {**read_json(index), split: entry})
            world.wait()
        found[split] = Features(np.load(path, mmap_mode="r"), entry["unreadable"])
    reporter.say(f"Features: {', '.join(done)}, in {folder}.")
    return found


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
        loader, normalize = (
            task.image_loader(source),
            normalizer(task.data.preprocess, world.device),
        )
        for batch in evaluation_batches(loader, batch_size, world.rank, world.size):
            images = normalize(batch.images.to(world.device, non_blocking=True))
            pooled = _pooled(task, images, check=first == 0)
            rows, readable = _all_rows(world, pooled, batch.ids)
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
    world: World, pooled: Tensor, ids: Tensor
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The features of all processes in the order of the data, and which images were readable.

    Process r has every `size`-th image from the r-th on, as `evaluation_requests` shares them out.
    """
    count, width = pooled.shape
    rows = pooled.new_zeros(count, world.size, width + 1)
    rows[:, world.rank, :width] = pooled
    rows[:, world.rank, width] = (ids >= 0).to(rows)
    numbers = world.sum(rows).flatten(0, 1).cpu().numpy()
    return numbers[:, :width], numbers[:, width] > 0


def _digest_weights(model: Classifier) -> str:
    """A digest of all weights that the features depend on: all but the head's."""
    digest = hashlib.sha256()
    excluded = model.head_names()
    for name, tensor in model.state_dict().items():
        if name not in excluded:
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(memoryview(data.numpy()))
    return digest.hexdigest()


def _fingerprint(weights: str, config: TrainConfig, preprocess: Preprocess, source: Source) -> str:
    """A digest of weights, images and preprocessing."""
    values = {name: v for name, v in vars(preprocess).items() if name != "origin"}
    plain = [weights, config.precision, values, config.data.model_dump(mode="json")]
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
    digest.update(source.labels.tobytes())
    for index in range(len(source)):
        digest.update(f"{source.name(index)}\n".encode())
    return digest.hexdigest()
