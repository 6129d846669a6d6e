"""What a training run can be told. Free of torch, so that a typo is answered at once."""

import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from vision.checkpoints.configs import Renaming
from vision.config import Config, Count, PositiveInt, Rate
from vision.data.configs import AugmentConfig, DataConfig, LoaderConfig, PreprocessConfig
from vision.models.configs import ModelChoice

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
    """The peak, for a global batch of `reference_batch` images."""
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
    """The metric on validation images that decides what is best."""


class LogConfig(Config):
    """Where numbers go. `metrics.jsonl` in the run's folder always gets them."""

    every: Duration
    wandb: Literal["disabled", "offline", "online"]
    project: str


class TuneAllConfig(Config):
    """Every parameter is trained."""

    kind: Literal["all"]


class TuneHeadConfig(Config):
    """Only the classifying layer is trained, on the features of a model that stays as it is."""

    kind: Literal["head"]
    cache: bool
    """Compute the features of every image once and keep them in the run's folder. Needs images
    without augmentation."""


class TunePartialConfig(Config):
    """The last blocks, named parts and the head are trained; the rest stays as it is."""

    kind: Literal["partial"]
    blocks: Count
    """So many blocks from the end, and the norm after them."""
    parts: tuple[str, ...]
    """Further parameters or modules by name; * stands for anything: patch_embed, blocks.*.attn."""


LoraTarget = Literal["q", "k", "v", "proj", "fc1", "fc2"]


class TuneLoraConfig(Config):
    """Low-rank additions to the layers of every block, and the head, are trained (Hu et al., ICLR
    2022).
    """

    kind: Literal["lora"]
    rank: PositiveInt
    alpha: Positive
    """The addition is multiplied by alpha / rank."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)]
    """Queries, keys, values and output of the attention; first and second layer of the MLP."""
    dropout: Rate
    """Of what the additions are given."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets = {list(self.targets)}: name each one once.")
        return self


class TuneBitfitConfig(Config):
    """Only biases and the head are trained (Ben Zaken et al., ACL 2022)."""

    kind: Literal["bitfit"]


TuneConfig = Annotated[
    TuneAllConfig | TuneHeadConfig | TunePartialConfig | TuneLoraConfig | TuneBitfitConfig,
    Field(discriminator="kind"),
]


PLAIN_PICTURES = {
    "crop": "center",
    "interpolation": "evaluation",
    "flip": 0.0,
    "vertical_flip": 0.0,
    "policy": "none",
    "color_jitter": (0.0, 0.0, 0.0, 0.0),
    "erase": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
}
"""Settings of an augmentation with which training images are those of an evaluation."""


class ProbeFirstConfig(Config):
    """Before a fine-tuning: the head alone, on cached features of images as in evaluation, so
    that a head that knows nothing does not spoil the features (Kumar et al., ICLR 2022).
    """

    duration: Duration
    learning_rate: Positive
    """The peak, as it is: not scaled with the batch."""


class TrainConfig(Config):
    """A whole training run."""

    name: str
    """Of the run and its folder; auto: model, data and a digest of the settings."""
    output: str
    """Folder that holds the runs."""
    seed: Count
    init: str | None
    """Weights to start from: a run's folder, a checkpoint file of any known format, timm:NAME,
    hf:OWNER/NAME, or `pretrained` for those that the model's YAML names; null: drawn from the seed.
    """
    init_weights: Literal["auto", "raw", "ema"]
    """The weights as trained, or their average; auto: the average if there is one."""
    init_rename: Renaming
    """Rules "pattern -> replacement" for the names of tensors, applied before the layout is
    recognised."""
    init_positions: Literal[
        "auto", "bicubic_antialias", "bicubic", "bicubic_corners", "dino", "bilinear_corners"
    ]
    """How a table of positions is fitted to another grid; auto: as the project that wrote the
    weights does."""
    init_windows: Literal["auto", "geometric", "bicubic", "bilinear"]
    """How a table of relative positions is fitted to another window or grid; auto: as above."""
    model: ModelChoice
    tune: TuneConfig
    probe_first: ProbeFirstConfig | None
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
    """Images per step over all devices together, whatever their number."""
    max_batch_per_device: PositiveInt | Literal["auto"] | None
    """Gradients are accumulated over equal parts of at most this size; null: no limit; auto: the
    largest that fits, found by trying before the first step."""
    evaluate_every: Duration
    attention_every: Duration | None
    """Draw where the model looks in some validation images, and how its heads attend, into the
    run's folder, at evaluations so far apart; null: never.
    """
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

    @model_validator(mode="after")
    def _check_tuning(self) -> Self:
        caches = isinstance(self.tune, TuneHeadConfig) and self.tune.cache
        if caches and (changed := _augmented(self.augment)):
            raise ValueError(
                f"tune.cache=true computes the features of every image once, but {changed} "
                "changes images each time; use augment=none or tune.cache=false."
            )
        if self.probe_first is not None and isinstance(self.tune, TuneHeadConfig):
            raise ValueError("probe_first: a run that trains the head alone is a probe already.")
        return self


def _augmented(augment: AugmentConfig) -> str:
    """The first setting that makes a training image another one than in evaluation, if any."""
    for name, value in PLAIN_PICTURES.items():
        if (found := getattr(augment, name)) != value:
            return f"augment.{name}={found}"
    return ""


class CompareConfig(Config):
    """What `vision compare` shows: runs that differ only in their seed make one row."""

    runs: tuple[str, ...]
    """Folders of runs, folders that hold some, or patterns with *; also as words without a name."""
    metric: str
    """loss, top1, top5, balanced_accuracy, macro_f1: a number that evaluations have."""
    split: Literal["auto", "val", "val_ema"]
    """The weights as trained, or their average; auto: the average if there is one."""
    select: Literal["best", "last"]
    """The evaluation that best.safetensors comes from, or the last one."""
    format: Literal["table", "csv", "latex", "json"]
    output: Path | None
    """File to write instead of printing."""
