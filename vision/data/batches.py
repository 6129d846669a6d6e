"""From settings to batches: for training, evaluation, contact sheets and prediction alike."""

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
    """A loader of the images of a source, augmented for training or, without `augment`, as an
    evaluation sees them.

    `processes` share this machine; `on_cpu`: the model computes on the processor as well.
    """
    workers, _ = resolve_workers(config.workers, processes, on_cpu)
    pipeline = Pipeline(preprocess, augment, seed, config.max_pixels, data.on_error)
    return Loader(source, pipeline, config, workers, data.max_error_share)


def training_batches(
    loader: Loader, plan: BatchOrder, start: int = 0, stop: int | None = None
) -> Iterator[Batch]:
    """Batches from the state `start` (images consumed by all processes) on, epoch after epoch.

    After each global batch the state is larger by `plan.batch_size`. Workers prepare the next epoch
    while the last batches of an epoch are in use. Without `stop` there is no end.
    """
    return loader.batches(training_requests(loader.source.labels, plan, start, stop))


def evaluation_batches(
    loader: Loader, batch_size: int, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """Every image once over all processes; rows with the id −1 are not to be counted."""
    return loader.batches(evaluation_requests(len(loader.source), batch_size, rank, ranks))
