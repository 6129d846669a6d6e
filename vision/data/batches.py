"""From settings to batches: for training, evaluation and contact sheets alike."""

from collections.abc import Iterator

from vision.data.configs import AugmentConfig, DataConfig, LoaderConfig
from vision.data.loader import Batch, Loader, Pipeline, resolve_workers
from vision.data.order import BatchOrder, evaluation_requests, training_requests
from vision.data.preprocess import Preprocess
from vision.data.sources.source import Source


def build_loader(
    source: Source,
    preprocess: Preprocess,
    data: DataConfig,
    config: LoaderConfig,
    *,
    augment: AugmentConfig | None = None,
    seed: int = 0,
    processes: int = 1,
    on_cpu: bool = True,
) -> Loader:
    """Return a loader of a source's images: augmented or, without `augment`, as in evaluation.

    `processes` share this machine. With `on_cpu` the model runs on the CPU as well.
    """
    workers = resolve_workers(config.workers, processes, on_cpu)
    pipeline = Pipeline(preprocess, augment, seed, config.max_pixels, data.on_error)
    return Loader(source, pipeline, config, workers, data.max_error_share)


def training_batches(
    loader: Loader, plan: BatchOrder, start: int = 0, stop: int | None = None
) -> Iterator[Batch]:
    """Yield batches, epoch after epoch, from `start` to `stop` (images consumed by all processes).

    Each global batch consumes `plan.batch_size` images. Workers prepare the next epoch while the
    last batches of an epoch are in use. Without `stop` the iterator is infinite.
    """
    return loader.batches(training_requests(loader.source.labels, plan, start, stop))


def evaluation_batches(
    loader: Loader, batch_size: int, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """Yield every image once over all processes; rows with the id −1 are padding."""
    return loader.batches(evaluation_requests(len(loader.source), batch_size, rank, ranks))
