"""Settings of `vision eval`. Without torch, so that mistakes are reported at once."""

from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from vision.checkpoints.configs import SizedConfig, WhichWeights
from vision.config import (
    Amount,
    Config,
    Count,
    FilePath,
    OutputFile,
    OutputFolder,
    Place,
    Probability,
    Seed,
    several,
)
from vision.data.configs import (
    DataConfig,
    EvalDataConfig,
    ImageNetFamilyConfig,
    LoaderConfig,
    PreprocessConfig,
    Split,
)

Augmentation = Literal["none", "flip", "five_crop", "ten_crop"]

Metric = Literal[
    "loss", "top1", "top5", "balanced_accuracy", "macro_f1", "map", "micro_f1", "sample_f1"
]
"""A metric on validation images."""
SHARES = frozenset(get_args(Metric)) - {"loss"}
"""Metrics between 0 and 1, shown as percentages."""
LOWER_IS_BETTER = frozenset({"loss", "loss_flipped", "brier"})

HUBS = ("timm:", "hf:")
"""Prefixes of the names of weights on a hub."""


class EvalConfig(SizedConfig):
    """Settings of `vision eval`."""

    checkpoint: Place | Annotated[tuple[Place, ...], Field(min_length=1)]
    """A run's folder (its best checkpoint), a checkpoint file, or weights of another project (a
    file, a folder, timm:NAME, hf:OWNER/NAME). Several as [a,b] are all compared with the first."""
    class_names: FilePath | None
    """A text file with the names of the model's classes, one per line in the order of the logits;
    null: those of the checkpoint."""
    data: EvalDataConfig | None
    """Other images than those of the run: data=folder data.root=…; the model must have their
    classes. They are preprocessed as the checkpoint specifies, whatever data.image_size is."""
    split: Split
    preprocess: PreprocessConfig
    """Preprocessing of the images; auto: as in training."""
    augmentation: Augmentation
    """Views of each image whose probabilities are averaged: the central crop, it and its mirror
    image, the central crop and the corners, or these and their mirror images."""
    flip_test: bool
    """Whether evaluation also reports the metrics of the mean probabilities of each image and its
    mirror image, as top1_flipped, loss_flipped, … beside the usual ones."""
    neighbours: Count
    """k of a k-NN classifier on the model's features, with the training images as memory; 20 is
    usual, 0 disables it."""
    bins: Amount
    """Number of confidence bins of the expected calibration error and the reliability diagram."""
    resamples: Count
    """Number of bootstrap draws for confidence intervals; 0: no intervals."""
    seed: Seed
    """Seed of the bootstrap and of the halves for temperature scaling."""
    batch_size: Amount
    """Images per device; does not affect the results."""
    precision: Literal["fp32", "bf16", "fp16"]
    device: Literal["auto", "cpu", "cuda", "mps"]
    loader: LoaderConfig
    output: OutputFolder | None
    """Folder of the files; null: evaluation/ in the run's folder or in the current one."""
    save: bool
    """Write report.json, report.html, confusion.png and the predictions; false: print only."""
    predictions: Literal["csv", "parquet", "none"]
    """Format of the table of predictions; parquet needs pyarrow."""
    probabilities: Literal["top5", "all"]
    """Probabilities in that table: of the five most probable classes, or of all."""
    gallery: Count
    """Number of the most confident mistakes that the page shows."""
    format: Literal["table", "json"]
    """Tables, or JSON for other programs."""

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The checkpoints as a tuple."""
        return (self.checkpoint,) if isinstance(self.checkpoint, str) else self.checkpoint

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.flip_test and self.augmentation != "none":
            raise ValueError(
                f"flip_test: augmentation={self.augmentation} averages several views already; use "
                "augmentation=none or flip_test=false."
            )
        if isinstance(self.data, ImageNetFamilyConfig):
            for name, given in (("neighbours", self.neighbours), ("flip_test", self.flip_test)):
                if given:
                    raise ValueError(f"{name}: not available for data=imagenet_family.")
        for place in self.checkpoints:
            if self.data is None and place.startswith(HUBS):
                raise ValueError(f"checkpoint={place} needs data=…: the images to evaluate it on.")
        return self


class AverageConfig(Config):
    """Settings of `vision average`: the mean of the weights of several runs."""

    runs: Annotated[tuple[Place, ...], BeforeValidator(several), Field(min_length=1)]
    """Runs' folders (their best checkpoints) or checkpoint files of one model; also without
    `runs=`."""
    output: OutputFile
    """A new checkpoint file."""
    method: Literal["uniform", "greedy", "wise"]
    """uniform: the mean of all; greedy: from the best one on, each one that does not make the mean
    worse (Wortsman et al., ICML 2022); wise: the weights that one run started from and its result
    (WiSE-FT, Wortsman et al., CVPR 2022)."""
    alpha: Probability
    """Share of the result with method=wise; 0: the weights that the run started from."""
    init: Place | None
    """The weights that the run started from, with method=wise; null: those of its own `init`."""
    metric: Literal["auto", Metric]
    """Metric that method=greedy goes by; auto: top1, or map for several labels per image."""
    weights: WhichWeights
    """The weights as trained, or their average; auto: the average if there is one."""
    data: DataConfig | None
    """Images to evaluate on; null: those of the runs."""
    split: Split
    batch_size: Amount
    """Images per forward pass; does not affect the results."""
    precision: Literal["fp32", "bf16", "fp16"]
    device: Literal["auto", "cpu", "cuda", "mps"]
    loader: LoaderConfig
    format: Literal["table", "json"]
    """A table, or JSON for other programs."""
