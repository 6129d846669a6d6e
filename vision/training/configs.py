"""Settings of a training run. Free of torch, so that a typo is reported at once."""

import re
from operator import attrgetter
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from vision.checkpoints.configs import Renaming
from vision.config import (
    Amount,
    Config,
    FolderName,
    NotNegative,
    Place,
    Positive,
    PositiveInt,
    Probability,
    Rate,
    Seed,
    shown,
)
from vision.data.configs import AugmentConfig, DataConfig, LoaderConfig, PreprocessConfig
from vision.evaluation.configs import Metric
from vision.models.configs import ModelChoice
from vision.training.tasks.configs import LossConfig, TaskConfig, TuneConfig, TuneHeadConfig


def parse_length(text: str) -> tuple[float, str]:
    """Amount and unit (step, epoch or sample) of a length such as `0.5epochs` or `5e6samples`."""
    number = r"\d+(?:\.\d+)?(?:e\d+)?"
    match = re.fullmatch(rf"\s*({number})\s*(step|epoch|sample)s?\s*", text)
    if match is None:
        raise ValueError(f"'{text}' is not a duration; write 20epochs, 1000steps or 5e6samples.")
    return float(match[1]), match[2]


def _check_length(text: str) -> str:
    parse_length(text)
    return text


def _check_objective(name: str) -> str:
    split, _, metric = name.partition("/")
    if name != "auto" and (split not in ("val", "val_ema") or metric not in get_args(Metric)):
        raise ValueError(
            f"'{name}' is not a metric on validation images; write auto, val/top1 or val_ema/loss, "
            f"with one of {', '.join(get_args(Metric))}."
        )
    return name


Duration = Annotated[str, AfterValidator(_check_length)]
ObjectiveName = Annotated[str, AfterValidator(_check_objective)]


class OptimizerConfig(Config):
    """The optimiser, and gradient clipping."""

    name: str
    """muon, or timm's name of another one: adamw, lamb, lion, sgd, …"""
    learning_rate: Positive
    """Peak learning rate, for a global batch of `reference_batch` images."""
    rest_learning_rate: Positive | None
    """Peak learning rate of the parameters that muon leaves to AdamW: embedding, head, biases,
    norms, tokens and tables; null: as learning_rate. Scaled and scheduled alike."""
    reference_batch: PositiveInt | None
    """Batch for which learning_rate holds: it is multiplied by batch_size / reference_batch; null:
    not scaled."""
    weight_decay: NotNegative
    """Weight decay, except for biases, norms, tokens and position tables."""
    rest_weight_decay: NotNegative | None
    """Weight decay of embedding and head, with muon; null: as weight_decay."""
    betas: tuple[Rate, Rate] | None
    """Coefficients of the moments; null: the optimiser's own, as for eps and momentum. With muon,
    betas and eps are those of AdamW for the rest."""
    eps: Positive | None
    momentum: Rate | None
    layer_decay: Annotated[float, Field(gt=0, le=1)]
    """Factor of the learning rate from each layer to the one below it; 1: the same for all."""
    clip: Literal["none", "norm", "value", "agc"]
    clip_at: Positive
    """Largest norm of all gradients (norm), largest gradient (value), or largest ratio of a
    gradient to its weights (agc)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("rest_learning_rate", "rest_weight_decay"):
            if self.name != "muon" and (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name} = {value:g} is for optimizer.name=muon alone, which leaves some "
                    f"parameters to AdamW; with {self.name} use optimizer.{name}=null."
                )
        return self


class ScheduleConfig(Config):
    """The learning rate as a function of the step."""

    shape: Literal["cosine", "linear", "polynomial", "constant"]
    power: Positive
    """Exponent of shape=polynomial."""
    warmup: Duration
    """Length of the linear rise to the peak."""
    warmup_from: NotNegative
    """Learning rate of the first step."""
    end_at: NotNegative
    """Learning rate at the end of the decay."""
    scale_ends: bool
    """Whether warmup_from and end_at are scaled with the batch like optimizer.learning_rate."""
    cooldown: Duration
    """Length of further training at the last learning rate, after `duration`."""


class CheckpointConfig(Config):
    """Checkpoints of a run."""

    every: Duration
    keep: PositiveInt
    """Number of last checkpoints that are kept, beside the best one."""
    best: Metric
    """Metric on validation images that decides which checkpoint is the best."""


class LogConfig(Config):
    """Logging. `metrics.jsonl` in the run's folder always has all numbers."""

    every: Duration
    """Interval of the losses; at most an epoch."""
    wandb: Literal["disabled", "offline", "online"]
    project: str
    tensorboard: bool
    """Whether numbers, images and settings go to TensorBoard, in the run's folder."""
    curves: bool
    """Whether `curves.png` is drawn at every evaluation."""

    @property
    def images(self) -> bool:
        """Whether there is a tracker for images."""
        return self.wandb != "disabled" or self.tensorboard


class ProbeFirstConfig(Config):
    """A probe before fine-tuning: training of the head on cached features, so that an untrained
    head does not distort the features (Kumar et al., ICLR 2022).
    """

    duration: Duration
    learning_rate: Positive
    """Peak learning rate, not scaled with the batch."""


class PruneConfig(Config):
    """Pruning of a bad run; set by a search from the results of its earlier trials."""

    bounds: tuple[tuple[Probability, float], ...]
    """Pairs of a part of training (step / steps) and a value of checkpoint.best, in ascending order
    of the parts. A run stops after an evaluation if its best value so far is worse than the last
    bound up to there."""

    def bound_at(self, part: float) -> float | None:
        """The bound that holds at a part of training, if there is one yet."""
        return next((bound for start, bound in reversed(self.bounds) if start <= part), None)


class StopEarlyConfig(Config):
    """An early end of a run that does not improve any more."""

    patience: PositiveInt
    """Number of evaluations in a row without an improvement of checkpoint.best before the end."""
    min_delta: NotNegative
    """Gain over the last improvement that a value must exceed to be the next one."""


class TrainConfig(Config):
    """A training run."""

    name: FolderName
    """Name of the run and its folder; auto: model, data and a digest of the settings."""
    output: Place
    """Folder that contains the runs."""
    seed: Seed
    init: Place | None
    """Weights to start from: a run's folder, a checkpoint file of any known format, timm:NAME,
    hf:OWNER/NAME, or `pretrained` for those in the model's YAML file; null: drawn from the seed.
    """
    init_weights: Literal["auto", "raw", "ema"]
    """Raw weights or their average; auto: the average if there is one."""
    init_rename: Renaming
    """Rules "pattern -> replacement" for tensor names, applied before the layout is recognised."""
    init_positions: Literal[
        "auto", "bicubic_antialias", "bicubic", "bicubic_corners", "dino", "bilinear_corners"
    ]
    """Interpolation of position tables for another grid; auto: that of the project that wrote the
    weights."""
    init_windows: Literal["auto", "geometric", "bicubic", "bilinear"]
    """Interpolation of relative position tables for another window or grid; auto: as above."""
    model: ModelChoice
    tune: TuneConfig
    probe_first: ProbeFirstConfig | None
    data: DataConfig
    augment: AugmentConfig
    preprocess: PreprocessConfig
    loader: LoaderConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    task: TaskConfig
    loss: LossConfig
    duration: Duration
    """Length of warm-up and decay together; a cool-down is added."""
    batch_size: Amount
    """Images per step over all devices together."""
    max_batch_per_device: Amount | Literal["auto"] | None
    """Largest micro-batch; gradients are accumulated over equal parts. null: no limit; auto: the
    largest that fits by estimate, on a GPU also by trial, when the run starts."""
    elastic: PositiveInt | None
    """Number of virtual ranks, a power of two: a run that is resumed with any power of two of
    processes up to it ends in the very same bits; null: bits depend on the number of processes."""
    evaluate_every: Duration
    flip_test: bool
    """Whether evaluation also reports the metrics of the mean probabilities of each image and its
    mirror image, as top1_flipped, loss_flipped, … beside the usual ones."""
    attention_every: Duration | None
    """Interval of drawing attention maps of some validation images, and statistics of the heads,
    into the run's folder; a multiple of evaluate_every; null: never."""
    ema: Rate | None
    """Decay of a moving average of the weights, evaluated and stored beside them; null: none."""
    precision: Literal["fp32", "bf16", "fp16"]
    tf32: bool
    """Whether CUDA devices multiply fp32 matrices in TF32 (10 bits of mantissa)."""
    deterministic: bool
    """Whether only deterministic algorithms are used: reproducible to the bit, but slower."""
    device: Literal["auto", "cpu", "cuda", "mps"]
    parallel: Literal["ddp", "fsdp"]
    """Use of several processes: the whole model on each (ddp), or shards of it (fsdp)."""
    compile: bool
    channels_last: bool
    on_nonfinite: Literal["stop", "skip"]
    """Response to a loss that is not finite: end the run with a report, or skip the step."""
    on_existing: Literal["resume", "refuse"]
    """Response to an existing run of this name."""
    allow_changes: bool
    """Whether a run is resumed although its stored settings differ."""
    checkpoint: CheckpointConfig
    objective: ObjectiveName | Annotated[tuple[ObjectiveName, ...], Field(min_length=1)]
    """Metric of the best checkpoint that a sweep optimises, such as val/top1, or a list of several;
    auto: that of checkpoint.best."""
    stop_early: StopEarlyConfig | None
    """{patience: 5, min_delta: 0.0} ends a run that does not improve any more; null: never."""
    prune: PruneConfig | None
    """Bounds below which the run is stopped; null: none."""
    log: LogConfig

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.elastic is not None:
            self._check_elastic(self.elastic)
        if isinstance(self.tune, TuneHeadConfig):
            self.tune.check_images(self.augment, self.flip_test)
        self._check_task()
        if self.probe_first is not None and isinstance(self.tune, TuneHeadConfig):
            raise ValueError("probe_first: a run with tune=head is a probe already; use null.")
        if self.data.sampling == "balanced":
            self.loss.check_sampling()
        if self.ema is None and "val_ema/" in str(self.objective):
            raise ValueError("objective: a run with ema=null has no val_ema; use val, or set ema.")
        return self

    def _check_elastic(self, elastic: int) -> None:
        """Refuse settings with which the number of processes would change the bits of a run."""
        if elastic & (elastic - 1):
            below = 1 << (elastic.bit_length() - 1)
            raise ValueError(
                f"elastic = {elastic} is not a power of two; choose elastic={below} or {2 * below}."
            )
        if self.batch_size % elastic:
            raise ValueError(
                f"elastic = {elastic} does not divide batch_size = {self.batch_size}; choose "
                f"elastic={self.batch_size & -self.batch_size} or a smaller power of two, or a "
                f"multiple of {elastic} for batch_size."
            )
        if self.parallel == "fsdp":
            raise ValueError(
                "elastic: parallel=fsdp sums gradients in an order of its own; use parallel=ddp, "
                "or elastic=null."
            )
        if self.compile:
            raise ValueError(
                "elastic: compile=true may compile other kernels in another start; use "
                "compile=false, or elastic=null."
            )
        if isinstance(self.max_batch_per_device, int):
            raise ValueError(
                f"max_batch_per_device = {self.max_batch_per_device}: with elastic the virtual "
                f"ranks are the micro-batches ({self.batch_size // elastic} images each); use "
                "max_batch_per_device=null, or a larger elastic for smaller ones."
            )

    def _check_task(self) -> None:
        """Refuse settings that mean nothing to the task, and metrics that it does not measure."""
        task = self.task
        for name, value in task.required.items():
            group, _, field = name.rpartition(".")
            found = getattr(attrgetter(group)(self) if group else self, field, value)
            if found != value:
                raise ValueError(
                    f"{name} = {shown(found)}: task={task.kind} {task.because}; use "
                    f"{name.removesuffix('.kind')}={shown(value)}."
                )
        names = (self.objective,) if isinstance(self.objective, str) else self.objective
        measured: dict[str, str] = {"checkpoint.best": self.checkpoint.best}
        measured |= {f"objective={n}": n.partition("/")[2] for n in names if n != "auto"}
        for setting, metric in measured.items():
            if metric not in task.metrics:
                raise ValueError(
                    f"{setting}: {metric} is a metric that task={task.kind} does not measure; "
                    f"choose one of {', '.join(task.metrics)}."
                )
