"""From settings to batches of images: uint8 pixels, labels and image numbers, made by workers.

Workers get complete requests and have no state, so that any number of them makes the same batches,
and the position in an epoch is known without asking them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from vision.data.configs import AugmentConfig, EvalDataConfig, LoaderConfig
from vision.data.images.augment import alternating_flip, training_pixels
from vision.data.images.decode import OpenImage, Pixels, UnreadableImageError, open_image
from vision.data.images.kept import KeptImages
from vision.data.images.policies import import_policy
from vision.data.order import BatchOrder, BatchRequest, evaluation_requests, training_requests
from vision.data.preprocess import Preprocess, evaluation_pixels
from vision.data.sources.source import Source
from vision.data.workers import (
    dead_worker,
    kill_workers,
    noted_workers,
    resolve_start_method,
    resolve_workers,
    start_worker,
)
from vision.randomness import generator


class Failure(NamedTuple):
    """An image that could not be read."""

    sample: int
    name: str
    reason: str


class Batch(NamedTuple):
    """Images and labels, before normalisation."""

    images: Tensor
    """uint8 (n, channels, height, width), in memory (n, height, width, channels)."""
    labels: Tensor
    """int64 (n,); int8 (n, classes) where images have any number of classes (`Source.labels`)."""
    ids: Tensor
    """int64 (n,): index of the image in its source; −1: a padding row, not to be counted."""
    occurrences: Tensor
    """int64 (n,): number of earlier uses of each image in this epoch."""
    epoch: int
    failures: tuple[Failure, ...]
    """Unreadable images: replaced by others in training, by padding rows in evaluation."""


def black_images(number: int, preprocess: Preprocess) -> Batch:
    """A batch of images without content, to try a step with."""
    nothing = torch.zeros(number, dtype=torch.int64)
    shape = (number, preprocess.channels, *preprocess.image_size)
    images = torch.zeros(shape, dtype=torch.uint8)
    return Batch(images, nothing, nothing, nothing, epoch=0, failures=())


@dataclass(frozen=True, eq=False)
class Pipeline(Dataset[Batch]):
    """Makes a batch of a source's images from a request, in the workers."""

    source: Source
    preprocess: Preprocess
    augment: AugmentConfig | None
    """None: as in evaluation."""
    seed: int
    max_pixels: int
    on_error: Literal["raise", "skip"]
    kept: KeptImages | None = None
    """Images that need not be read and decoded again."""

    def __getitem__(self, request: BatchRequest) -> Batch:
        size, channels = self.preprocess.image_size, self.preprocess.channels
        rows = torch.empty((len(request.indices), *size, channels), dtype=torch.uint8)
        if get_worker_info() is not None:
            rows = rows.share_memory_()  # so that it is passed on without a copy
        pixels = rows.numpy()
        ids = request.indices.copy()
        failures: list[Failure] = []
        for row, (index, use) in enumerate(
            zip(request.indices.tolist(), request.occurrences.tolist(), strict=True)
        ):
            if index >= 0:
                ids[row] = self._fill(pixels[row], request.epoch, index, use, failures)
            if ids[row] < 0:
                pixels[row] = 0
            if failures and self.on_error == "raise":
                break
        labels = self.source.labels[ids]
        labels[ids < 0] = 0
        return Batch(
            rows.permute(0, 3, 1, 2),
            torch.from_numpy(labels),
            torch.from_numpy(ids),
            torch.from_numpy(request.occurrences.copy()),
            request.epoch,
            tuple(failures),
        )

    def _fill(self, row: Pixels, epoch: int, index: int, use: int, failures: list[Failure]) -> int:
        """Write the image or a replacement into its row; return its index, −1 if there is none."""
        wanted, candidates = index, None
        for _ in range(100):
            try:
                row[:] = self._pixels(epoch, index, use)
                return index
            except OSError as error:  # UnreadableImageError, or from reading the file
                failures.append(self._failure(index, error))
            if self.augment is None or self.on_error == "raise":
                return -1
            candidates = candidates or generator(
                self.seed, "replacement", epoch=epoch, index=wanted, occurrence=use
            )
            index = int(candidates.integers(len(self.source)))
        raise RuntimeError(f"100 images in a row cannot be read; the last: {failures[-1].reason}")

    def _failure(self, index: int, error: OSError) -> Failure:
        name, reason = self.source.name(index), str(error)
        return Failure(index, name, reason if name in reason else f"{name}: {reason}")

    def _open(self, index: int) -> OpenImage:
        name, channels = self.source.name(index), self.preprocess.channels
        if self.kept is None:
            return open_image(self.source.read(index), channels, name, self.max_pixels)
        pixels = self.kept.get(index)
        if pixels is not None:
            return open_image(pixels, channels, name)
        keep = partial(self.kept.put, index)
        return open_image(self.source.read(index), channels, name, self.max_pixels, keep)

    def _pixels(self, epoch: int, index: int, use: int) -> Pixels:
        image = self._open(index)
        if self.augment is None:
            return evaluation_pixels(image, self.preprocess)
        random = generator(self.seed, "augment", epoch=epoch, index=index, occurrence=use)
        turn = self.augment.flip == "alternate" and alternating_flip(self.seed, epoch, index, use)
        return training_pixels(image, self.preprocess, self.augment, random, turn)


@dataclass
class Loader:
    """Worker processes that live as long as this object, and images that they failed to read."""

    pipeline: Pipeline
    config: LoaderConfig
    workers: int
    max_error_share: float = 0.0
    failures: dict[int, Failure] = field(default_factory=dict)
    """Images skipped so far in this process, by index."""

    def __post_init__(self) -> None:
        self._requests = _Requests()
        self._run = 0
        self._processes: list[BaseProcess] = []
        if self.pipeline.augment is not None and self.workers:
            import_policy(self.pipeline.augment.policy)
        method = resolve_start_method(self.config.start_method)
        self._loader: DataLoader[Batch] = DataLoader(
            self.pipeline,
            batch_size=None,
            sampler=self._requests,
            num_workers=self.workers,
            collate_fn=_unchanged,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=start_worker,
            multiprocessing_context=method if self.workers else None,
            generator=torch.Generator(),  # the default draws from the global one
            prefetch_factor=self.config.prefetch if self.workers else None,
            persistent_workers=self.workers > 0,
        )

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield one batch for each request, in order. A further call ends the previous one."""
        self._run += 1
        run = self._run
        self._requests.current = requests
        try:
            with noted_workers() as started:
                batches = iter(self._loader)
            self._processes += started
            for batch in batches:
                self._note(batch.failures)
                yield batch
                if run != self._run:
                    raise RuntimeError("these batches ended when others were requested.")
        except (RuntimeError, EOFError, ConnectionError) as error:
            if self.workers and (dead := dead_worker(error, self.workers)):
                kill_workers(self._processes)
                raise dead from error
            raise

    def _note(self, failures: tuple[Failure, ...]) -> None:
        for failure in failures:
            if self.pipeline.on_error == "raise":
                raise UnreadableImageError(
                    f"{failure.reason}\nTo skip images that cannot be read: data.on_error=skip."
                )
            self.failures[failure.sample] = failure
        total = len(self.pipeline.source)
        if failures and len(self.failures) > self.max_error_share * total:
            some = "\n".join(f"  {failure.reason}" for failure in list(self.failures.values())[:5])
            raise UnreadableImageError(
                f"{len(self.failures)} of {total} images could not be read, more than "
                f"data.max_error_share = {self.max_error_share} allows. The first:\n{some}"
            )


def build_loader(
    source: Source,
    preprocess: Preprocess,
    data: EvalDataConfig,
    config: LoaderConfig,
    *,
    augment: AugmentConfig | None = None,
    seed: int = 0,
    processes: int = 1,
    on_cpu: bool = True,
    keep: bool = False,
) -> Loader:
    """Return a loader of a source's images: augmented or, without `augment`, as in evaluation.

    `processes` share this machine. With `on_cpu` the model runs on the CPU as well. `keep`: small
    images are kept in memory, for images that are read more than once.
    """
    workers = resolve_workers(config.workers, processes, on_cpu)
    kept = None
    if keep and not source.in_memory:
        height, width = preprocess.image_size
        kept = KeptImages(
            len(source),
            memory=config.memory * 2**20 // processes,
            largest=4 * height * width * preprocess.channels,
            channels=preprocess.channels,
            forked=not workers or resolve_start_method(config.start_method) == "fork",
        )
    pipeline = Pipeline(source, preprocess, augment, seed, config.max_pixels, data.on_error, kept)
    return Loader(pipeline, config, workers, data.max_error_share)


def training_batches(
    loader: Loader, plan: BatchOrder, start: int = 0, stop: int | None = None
) -> Iterator[Batch]:
    """Yield batches, epoch after epoch, from `start` to `stop` (images consumed by all processes).

    Each global batch consumes `plan.batch_size` images. Workers prepare the next epoch while the
    last batches of an epoch are in use. Without `stop` the iterator is infinite.
    """
    return loader.batches(training_requests(loader.pipeline.source.labels, plan, start, stop))


def evaluation_batches(
    loader: Loader, batch_size: int, rank: int = 0, ranks: int = 1, shares: int = 1
) -> Iterator[Batch]:
    """Yield every image once over all processes; rows with the id −1 are padding. See
    `evaluation_requests`.
    """
    samples = len(loader.pipeline.source)
    return loader.batches(evaluation_requests(samples, batch_size, rank, ranks, shares))


class _Requests(Sampler[BatchRequest]):
    """The requests that `DataLoader` iterates over, replaced for each run."""

    current: Iterable[BatchRequest] = ()

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self.current)


def _unchanged(batch: Any) -> Any:
    return batch
