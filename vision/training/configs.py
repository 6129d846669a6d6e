"""What a training run can be told. Free of torch, so that a typo is answered at once."""

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from vision.config import Config, Count, PositiveInt, Rate
from vision.data.configs import AugmentConfig, DataConfig, LoaderConfig, PreprocessConfig
from vision.models.configs import ModelConfig

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class Length(NamedTuple):
    """How long something lasts or how often it happens: so many steps, epochs or samples."""

    amount: float
    unit: Literal["step", "epoch", "sample"]


def parse_length(text: str) -> Length:
    """`20epochs`, `0.5epochs`, `1000steps` or `5e6samples`."""
    number = r"\d+(?:\.\d+)?(?:e\d+)?"
    match = re.fullmatch(rf"\s*({number})\s*(step|epoch|sample)s?\s*", text)
    if match is None:
        raise ValueError(f"'{text}' is not a duration; write 20epochs, 1000steps or 5e6samples.")
    unit = match[2]
    assert unit in ("step", "epoch", "sample")
    return Length(float(match[1]), unit)  # type: ignore[arg-type]


def _check_length(text: str) -> str:
    parse_length(text)
    return text


Duration = Annotated[str, AfterValidator(_check_length)]


class OptimizerConfig(Config):
    """How weights follow gradients. The optimiser itself comes from timm's factory."""

    name: str
    """timm's name: adamw, lamb, lion, muon, sgd, …"""
    learning_rate: Positive
    """The peak, for a global batch of `reference_batch` pictures."""
    reference_batch: PositiveInt | None
    """The learning rate grows in proportion to batch_size / reference_batch; null: it is used as it
    is.
    """
    weight_decay: NotNegative
    """Not applied to biases, norms, tokens and position tables; see the model's no_weight_decay."""
    betas: tuple[Rate, Rate] | None
    """null: the optimiser's own, as with eps and momentum."""
    eps: Positive | None
    momentum: Rate | None
    layer_decay: Annotated[float, Field(gt=0, le=1)]
    """Factor of the learning rate from each layer to the one below it; 1: all alike."""
    clip: Literal["none", "norm", "value", "agc"]
    clip_at: Positive
    """Largest norm of all gradients, largest gradient, or largest share of a weight's norm (agc).
    """


class ScheduleConfig(Config):
    """The learning rate as a function of the step."""

    shape: Literal["cosine", "linear", "polynomial", "constant"]
    power: Positive
    """Of a polynomial."""
    warmup: Duration
    warmup_from: NotNegative
    """Learning rate of the first step, as it is: not scaled with the batch."""
    end_at: NotNegative
    """Learning rate that the decay ends at, as it is: not scaled with the batch."""
    cooldown: Duration
    """Further training at the last learning rate, after the run's duration."""


class LossConfig(Config):
    """What is minimised."""

    kind: Literal["cross_entropy", "bce"]
    """Of the softmax, or of one sigmoid per class (DeiT-III)."""
    bce_threshold: Rate | None
    """Targets above it count as 1, others as 0; null: targets as they are."""


class CheckpointConfig(Config):
    """What is stored of a run, and when."""

    every: Duration
    keep: PositiveInt
    """The last so many are kept, beside the best one."""
    best: Literal["loss", "top1", "top5", "balanced_accuracy", "macro_f1"]
    """The metric on validation pictures that decides what is best."""


class LogConfig(Config):
    """Where numbers go. `metrics.jsonl` in the run's folder always gets them."""

    every: Duration
    wandb: Literal["disabled", "offline", "online"]
    project: str


class TrainConfig(Config):
    """A whole training run."""

    name: str
    """Of the run and its folder; auto: model, data and a digest of the settings."""
    output: str
    """Folder that holds the runs."""
    seed: Count
    model: ModelConfig
    data: DataConfig
    augment: AugmentConfig
    preprocess: PreprocessConfig
    loader: LoaderConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig
    duration: Duration
    """Of warm-up and decay together; a cool-down comes on top."""
    batch_size: PositiveInt
    """Pictures per step over all devices together, whatever their number."""
    max_batch_per_device: PositiveInt | Literal["auto"] | None
    """Gradients are accumulated over equal parts of at most this size; null: no limit; auto: the
    largest that fits, found by trying before the first step."""
    evaluate_every: Duration
    ema: Rate | None
    """Decay of an average of the weights that is evaluated and stored too; null: none."""
    precision: Literal["fp32", "bf16", "fp16"]
    tf32: bool
    """Let CUDA devices multiply fp32 matrices with 10 bits of mantissa."""
    deterministic: bool
    """Only algorithms whose result does not depend on timing: the same bits again, but slower."""
    device: Literal["auto", "cpu", "cuda", "mps"]
    parallel: Literal["ddp", "fsdp"]
    """With several processes: the whole model on each, or shares of it."""
    compile: bool
    channels_last: bool
    on_nonfinite: Literal["stop", "skip"]
    """A loss that is not a number ends the run with a report, or the step is left out."""
    on_existing: Literal["resume", "refuse"]
    """What to do if there is a run of this name."""
    allow_changes: bool
    """Resume a run even though its stored settings differ."""
    checkpoint: CheckpointConfig
    log: LogConfig
