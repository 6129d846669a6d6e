"""What training minimises: the only part of a run that knows what a batch means.

A new task is one file with a subclass of `Task`, its settings in `configs.py` and a case of
`select_task`; loop, step and checkpoints do not change.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from PIL.Image import Image
from torch import Tensor, nn

from vision.checkpoints.load_report import LoadReport
from vision.checkpoints.open import OpenedModel
from vision.config import ConfigError
from vision.data.batches import (
    Batch,
    Loader,
    black_images,
    build_loader,
    evaluation_batches,
    training_batches,
)
from vision.data.configs import AugmentConfig
from vision.data.order import BatchOrder, check_sampling, evaluation_requests
from vision.data.preprocess import Preprocess, normalizer
from vision.data.sources.source import Source, Unlabelled
from vision.models.layers import Classifier
from vision.models.reconstruction import MaskedModel
from vision.training.configs import TrainConfig
from vision.training.elastic import virtual_ranks_of_each
from vision.training.run.distributed import World
from vision.training.run.log import Reporter
from vision.training.run.run_folder import Run
from vision.training.run.stop import StopRequest
from vision.training.tasks.configs import (
    ClassifyConfig,
    DistillConfig,
    MaskedConfig,
    MultiLabelConfig,
    TuneHeadConfig,
)
from vision.training.tasks.masked_model import load_decoder, masked_model


class Samples(Protocol):
    """A batch of any task."""

    @property
    def ids(self) -> Tensor:
        """int64 (n,): numbers of the samples in the training data."""


B = TypeVar("B", bound=Samples)


@dataclass(frozen=True)
class TrainingData:
    """The images of a run, and how pixels become the model's numbers."""

    train: Source
    val: Source
    preprocess: Preprocess


@dataclass(eq=False)
class Task(ABC, Generic[B]):
    """The batches of a run, their loss, and its evaluation."""

    measures: ClassVar[tuple[str, ...]]
    """Names of the means that are logged in training; see `loss`."""
    headline: ClassVar[tuple[str, ...]]
    """Names of the evaluated numbers that are shown on the terminal, if there are any."""

    drawn: ClassVar[str | None] = None
    """Folder in the run's folder for the sheets of predictions; None: for the tracker alone."""

    config: TrainConfig
    data: TrainingData
    model: Classifier
    """What the optimiser updates, EMA averages and checkpoints store."""
    run: Run
    world: World
    stop: StopRequest = field(default_factory=StopRequest)
    """A request that ends an evaluation between two batches; see `StopRequest.until`."""

    def __post_init__(self) -> None:
        """Set up the parts that no weights are needed for. A subclass may set `module`, which a
        training step calls, to a part of the model, or `model` to one with further parameters.
        """
        self.module: nn.Module = self.model
        self.parallel: Literal["ddp", "fsdp"] = self.config.parallel
        self.val_loader = self.image_loader(self.data.val)

    @property
    def shares(self) -> int:
        """Number of shares of the data that this process has: its virtual ranks, or one."""
        if self.config.elastic is None:
            return 1
        return virtual_ranks_of_each(self.config.elastic, self.world.size)

    def place(self, part: int) -> tuple[int, int]:
        """The (rank, part) that the random numbers of a part of a step are a function of: a virtual
        rank is a rank of its own.
        """
        if self.config.elastic is None:
            return self.world.rank, part
        return self.world.rank * self.shares + part, 0

    def prepare(self, batch_size: int, reporter: Reporter) -> None:
        """Called once, when the model has the weights that training starts or resumes from."""

    @abstractmethod
    def training_batches(self, order: BatchOrder, start: int, stop: int) -> Iterator[B]:
        """This process's batches from the sample number `start` of the run to `stop`."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: B, step: int, part: int) -> tuple[Tensor, Tensor]:
        """The mean loss of one part of a step, and sums over its samples.

        `module` is `self.module` or its wrapper. The sums, on the device, are one for each of
        `measures`, then the number of samples. Torch's global generator is seeded before each call;
        anything else that is random must be a function of (seed, step, *self.place(part)).
        """

    @abstractmethod
    def evaluate(self, batch_size: int) -> dict[str, float]:
        """Numbers on the validation data with the present weights, `checkpoint.best` among them.

        All processes call this together and get the same numbers. The batches come through
        `self.stop.until`, so that a run is stopped within one of them.
        """

    @abstractmethod
    def trial_batch(self, size: int) -> B | None:
        """A batch to measure the memory of a step with; None: every size fits."""

    def training_sheet(self, batch: B) -> Image | None:
        """The first batch as the model gets it, for the experiment tracker."""
        return None

    def prediction_sheet(self, batch_size: int, step: int) -> Image | None:
        """Predictions for the experiment tracker. All processes call this together."""
        return None

    def record(self) -> dict[str, Any]:
        """Fields of a checkpoint's record that opening the model needs."""
        preprocess = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self.data.preprocess).items()
        }
        return {
            "classes": list(self.data.train.classes),
            "channels": preprocess.pop("channels"),
            "preprocess": preprocess,
        }

    def evaluated_record(self) -> dict[str, Any]:
        """Further fields, of a checkpoint whose weights were just evaluated."""
        return {}

    def unreadable(self) -> Mapping[str, str]:
        """Names of the images that this process could not read so far, with the reasons."""
        return {f.name: f.reason for f in self.val_loader.failures.values()}

    def image_loader(
        self, source: Source, augment: AugmentConfig | None = None, *, keep: bool = True
    ) -> Loader:
        """A loader of images, augmented or as in evaluation; `keep` if they are read repeatedly."""
        return build_loader(
            source,
            self.data.preprocess,
            self.config.data,
            self.config.loader,
            augment=augment,
            seed=self.config.seed,
            processes=self.world.size,
            on_cpu=self.world.device.type == "cpu",
            keep=keep,
        )

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """This process's share of the validation images, until any process is asked to stop."""
        world = self.world
        batches = evaluation_batches(
            self.val_loader, batch_size, world.rank, world.size, self.shares
        )
        return self.stop.until(batches, world)

    def first_validation_images(self, batch_size: int) -> Batch:
        """The first batch of validation images of this process."""
        requests = evaluation_requests(
            len(self.data.val), batch_size, self.world.rank, self.world.size, self.shares
        )
        return next(self.val_loader.batches(islice(requests, 1)))


def sums_of(loss: Tensor, samples: int, *others: Tensor) -> Tensor:
    """The sums that `Task.loss` returns: of the loss of a batch, of further measures, and of its
    samples.
    """
    count = loss.new_full((), samples)  # new_tensor would make the host wait for the device
    return torch.stack([loss.detach() * count, *(sum.to(loss.dtype) for sum in others), count])


class ImageTask(Task[Batch]):
    """A task whose batches are augmented images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.train_loader = self.image_loader(self.data.train, self.config.augment)
        self.normalize = normalizer(self.data.preprocess, self.world.device)

    def training_batches(self, order: BatchOrder, start: int, stop: int) -> Iterator[Batch]:
        """Augmented images."""
        return training_batches(self.train_loader, order, start, stop)

    def images(self, pixels: Tensor) -> Tensor:
        """The pixels of a batch as the model gets them: on its device, normalised."""
        images = self.normalize(pixels.to(self.world.device, non_blocking=True))
        if self.config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images

    def trial_batch(self, size: int) -> Batch:
        """Black images."""
        return black_images(size, self.data.preprocess)

    def unreadable(self) -> Mapping[str, str]:
        """Training and validation images alike."""
        training = {f.name: f.reason for f in self.train_loader.failures.values()}
        return {**training, **super().unreadable()}


def select_task(
    config: TrainConfig,
    data: TrainingData,
    model: Classifier,
    run: Run,
    world: World,
    stop: StopRequest,
) -> Task[Any]:
    """The task that the settings name; classification is a probe on cached features where `tune`
    says so.
    """
    parts = (config, data, model, run, world, stop)
    check_labels(config, data.train)
    match config.task:
        case MultiLabelConfig():
            from vision.training.tasks.multi_label import MultiLabel

            return MultiLabel(*parts)
        case ClassifyConfig() if isinstance(config.tune, TuneHeadConfig) and config.tune.cache:
            from vision.training.tasks.probe import Probe

            return Probe(*parts)
        case ClassifyConfig():
            from vision.training.tasks.classification import Classification

            return Classification(*parts)
        case DistillConfig():
            from vision.training.tasks.distillation import Distillation

            return Distillation(*parts)
        case MaskedConfig():
            from vision.training.tasks.masked import Masked

            return Masked(*parts)


def check_labels(config: TrainConfig, train: Source) -> None:
    """Refuse a task whose images have other labels than the data."""
    several = isinstance(config.task, MultiLabelConfig)
    if several and not train.multi_label:
        raise ConfigError(
            f"task=multi_label: the images of data.kind={config.data.kind} have one class each; "
            "use task=classify, or data with several: a table with a column labels (a;b) or a "
            "column for each class, a data set with lists of labels, or data=shapes_two."
        )
    if train.multi_label and not several:
        raise ConfigError(
            f"task={config.task.kind}: the images of data.kind={config.data.kind} have several "
            "labels each; use task=multi_label."
        )
    check_sampling(train.labels, config.data.sampling)


def seen_by_task(config: TrainConfig, source: Source) -> Source:
    """The images as the task sees them: without labels where it needs none."""
    return Unlabelled(source) if isinstance(config.task, MaskedConfig) else source


def with_parts(config: TrainConfig, model: Classifier, preprocess: Preprocess) -> Classifier:
    """The model that the task trains: the given one, or one with further parts around it."""
    if not isinstance(config.task, MaskedConfig):
        return model
    size, channels = preprocess.image_size, preprocess.channels
    return masked_model(config.task, model, size, channels, config.seed)


def fill_parts(model: Classifier, opened: OpenedModel) -> LoadReport:
    """Put weights that a checkpoint has for these parts into them; the report names both."""
    if not isinstance(model, MaskedModel):
        return opened.report
    return load_decoder(model, opened.decoder, opened.report)
