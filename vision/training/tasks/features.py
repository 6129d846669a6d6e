"""A linear probe whose features are computed once: an epoch then costs what the head costs.

The features of all training and validation images, as an evaluation sees them, lie in the run's
folder as arrays that are read where they lie:

    features/train.npy, val.npy   float32 (images, width), in the order of the data
    features/index.json           what they are of; arrays that are of something else are made anew

A batch of features takes the place of a batch of images with one pixel and `width` channels, so
that order, steps, metrics and resuming are those of any other run.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vision.config import ConfigError
from vision.data.batches import evaluation_batches
from vision.data.loader import Batch, Failure, Loader
from vision.data.order import BatchRequest
from vision.data.preprocess import Preprocess, normalizer
from vision.data.sources.source import Source
from vision.evaluation.evaluate import evaluation_mode
from vision.models.layers import Classifier, static_bias
from vision.models.precision import autocast
from vision.randomness import generator
from vision.training.configs import TrainConfig, TuneHeadConfig
from vision.training.run.distributed import World
from vision.training.run.run_folder import RunFileError

if TYPE_CHECKING:
    from vision.training.job import Job

AS_IT_IS = Preprocess((1, 1), 1, (0.0,), (1 / 255,), "nearest", 1.0, {})
"""A preprocessing that leaves numbers as they are: features are no pixels."""


class HeadOnly(nn.Module):
    """The classifying layer of a model, given pooled features in place of images."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.heads = nn.ModuleList(model.heads())
        self._classify = model.classify

    def forward(self, features: Tensor) -> Tensor:
        """(b c 1 1) → logits (b classes)"""
        return self._classify(features.flatten(1))


class FeatureLoader(Loader):
    """Batches of stored features, for the same requests as batches of images."""

    def __init__(
        self, loader: Loader, features: NDArray[np.float32], unreadable: Iterable[int]
    ) -> None:
        # Not the initialisation of the base class: it would make ready to start workers.
        self.source, self.pipeline, self.config = loader.source, loader.pipeline, loader.config
        self.workers, self.max_error_share = 0, loader.max_error_share
        self.features = features
        reason = "could not be read when the features were computed"
        self.failures = {
            i: Failure(i, self.source.name(i), f"{self.source.name(i)}: {reason}")
            for i in unreadable
        }

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """One batch for each request, in order."""
        for request in requests:
            ids = request.indices.copy()
            if self.failures:
                uses = request.occurrences
                for row, index in enumerate(request.indices.tolist()):
                    ids[row] = self._readable(request.epoch, index, int(uses[row]))
            rows = self.features[np.maximum(ids, 0)]
            rows[ids < 0] = 0
            labels = np.where(ids >= 0, self.source.labels[ids], 0)
            images = torch.from_numpy(rows)[:, :, None, None]
            yield Batch(images, torch.from_numpy(labels), torch.from_numpy(ids), request.epoch, ())

    def _readable(self, epoch: int, index: int, use: int) -> int:
        """The image itself or, as without stored features, another one in its place."""
        if index not in self.failures:
            return index
        if self.pipeline.augment is None:
            return -1
        candidates = generator(
            self.pipeline.seed, "replacement", epoch=epoch, index=index, occurrence=use
        )
        while index in self.failures:
            index = int(candidates.integers(len(self.source)))
        return index


Counting = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows how far something is: what it is, of how many; what it gives is told of each step."""


def caches(config: TrainConfig) -> bool:
    """Whether a run works on stored features."""
    return isinstance(config.tune, TuneHeadConfig) and config.tune.cache


def use_features(job: "Job", counting: Counting) -> str:
    """Let the job work on features; those that the run's folder has are used if they fit.

    All processes must call it together, when the job has its weights. Returns what was done.
    """
    model, world = job.state.model, job.world
    assert isinstance(model, Classifier)
    folder = job.run.folder / "features"
    loaders = {"train": job.train_loader, "val": job.val_loader}
    trunk = _digest_weights(model)
    expected = {
        split: _fingerprint(trunk, job.config, job.preprocess, loader.source)
        for split, loader in loaders.items()
    }
    done = []
    for split, loader in loaders.items():
        entry = world.from_main(_stored(folder, split, expected[split]))
        if entry is None:
            count = len(loader.source)
            with counting(f"Features of {count:,} images ({split})", count) as advance:
                unreadable = _compute(job, model, loader, folder / f"{split}.npy", advance)
            entry = {"fingerprint": expected[split], "unreadable": unreadable}
            if world.main:
                _note(folder, split, entry)
            world.wait()
            done.append(f"{len(loader.source):,} computed for {split}")
        else:
            done.append(f"{len(loader.source):,} found for {split}")
        features = np.load(folder / f"{split}.npy", mmap_mode="r")
        loaders[split] = FeatureLoader(loader, features, entry["unreadable"])
    job.train_loader, job.val_loader = loaders["train"], loaders["val"]
    job.setup = replace(job.setup, normalize=normalizer(AS_IT_IS, world.device))
    return f"{', '.join(done)}, in {folder}"


def _compute(
    job: "Job", model: Classifier, loader: Loader, path: Path, advance: Callable[[int], None]
) -> list[int]:
    """Store the features of all images; returns the images that could not be read.

    Every process computes a share, the main one writes. `advance` is told of images done.
    """
    world, count = job.world, len(loader.source)
    plain = Loader(
        loader.source,
        replace(loader.pipeline, augment=None),
        loader.config,
        loader.workers,
        loader.max_error_share,
    )
    unreadable: list[int] = []
    with (
        _writer(path if world.main else None, count) as write,
        evaluation_mode(model),
        torch.no_grad(),
        static_bias(model),
    ):
        first = 0
        for batch in evaluation_batches(plain, job.micro_batch, world.rank, world.size):
            pooled = _pooled(job, model, batch, checks=first == 0)
            rows, readable = _all_rows(world, pooled, batch.ids)
            rows, readable = rows[: count - first], readable[: count - first]
            write(rows)
            unreadable += (first + np.flatnonzero(~readable)).tolist()
            first += len(rows)
            advance(len(rows))
    return unreadable


@contextmanager
def _writer(path: Path | None, count: int) -> Iterator[Callable[[NDArray[np.float32]], None]]:
    """Within, rows are appended to an array of so many; at the end it takes its name. Without a
    path nothing is written.

    Not by a memory map: on a full disk that would end the process without a word.
    """
    if path is None:
        yield lambda rows: None
        return
    part = path.with_suffix(".part")
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("wb")
    with file:

        def write(rows: NDArray[np.float32]) -> None:
            with _naming(path):
                if not file.tell():
                    shape = (count, rows.shape[1])
                    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                file.write(rows.astype("<f4").tobytes())
                file.flush()

        yield write
    with _naming(path):
        part.replace(path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error of writing names the file."""
    try:
        yield
    except OSError as error:
        raise RunFileError(path, error) from error


def _pooled(job: "Job", model: Classifier, batch: Batch, checks: bool) -> Tensor:
    """The features of a batch. With `checks` the head alone is tried on them."""
    images = job.setup.normalize(batch.images.to(job.world.device, non_blocking=True))
    if job.config.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    with autocast(job.config.precision, job.world.device):
        tokens = model.forward_features(images)
        pooled = model.pool(tokens)
        if checks:
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

    Process r has every `size`-th image from the r-th on, as evaluation shares them out.
    """
    count, width = pooled.shape
    rows = pooled.new_zeros(count, world.size, width + 1)
    rows[:, world.rank, :width] = pooled
    rows[:, world.rank, width] = (ids >= 0).to(rows)
    numbers = world.sum(rows).flatten(0, 1).cpu().numpy()
    return numbers[:, :width], numbers[:, width] > 0


def _digest_weights(model: Classifier) -> str:
    """Of everything that the features depend on, which is all but the head."""
    digest = hashlib.sha256()
    excluded = model.head_names()
    for name, tensor in model.state_dict().items():
        if name not in excluded:
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(memoryview(data.numpy()))
    return digest.hexdigest()


def _fingerprint(trunk: str, config: TrainConfig, preprocess: Preprocess, source: Source) -> str:
    """Of weights, images and what is done to the images."""
    values = {name: v for name, v in vars(preprocess).items() if name != "origin"}
    plain = [trunk, config.precision, values, config.data.model_dump(mode="json")]
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
    digest.update(source.labels.tobytes())
    for index in range(len(source)):
        digest.update(f"{source.name(index)}\n".encode())
    return digest.hexdigest()


def _stored(folder: Path, split: str, fingerprint: str) -> dict[str, Any] | None:
    """What is noted of a split's features, if they are there and of the same fingerprint."""
    entry = _index(folder).get(split)
    fits = isinstance(entry, dict) and entry.get("fingerprint") == fingerprint
    return entry if fits and (folder / f"{split}.npy").is_file() else None


def _index(folder: Path) -> dict[str, Any]:
    file = folder / "index.json"
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{file} is damaged: {error}. Remove it.") from error
    return values


def _note(folder: Path, split: str, entry: dict[str, Any]) -> None:
    """Write last what the arrays are of, in one instant."""
    part, file = folder / "index.part", folder / "index.json"
    text = json.dumps(_index(folder) | {split: entry}, indent=1) + "\n"
    with _naming(file):
        part.write_text(text, encoding="utf-8")
        part.replace(file)
