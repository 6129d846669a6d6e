"""What an evaluation can be told. Free of torch, so that a typo is answered at once."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from vision.config import Config, Count, PositiveInt, Size
from vision.data.configs import AreaShare, Auto, DataConfig, LoaderConfig, Split, Text

Augmentation = Literal["none", "flip", "five_crop", "ten_crop"]


class EvalConfig(Config):
    """The evaluation of checkpoints, which know their model, classes and preprocessing."""

    checkpoint: Text | Annotated[tuple[Text, ...], Field(min_length=1)]
    """A run's folder (its best checkpoint is taken) or a checkpoint file; or several as [a,b]: all
    are then compared with the first."""
    data: DataConfig | None
    """Other pictures than those of the run: data=folder data.root=…; its classes must be known to
    the model. Pictures are prepared as the checkpoint says, whatever data.image_size is."""
    split: Split
    weights: Literal["auto", "raw", "ema"]
    """The weights as trained, or their average; auto: the average if there is one."""
    image_size: Size | None
    """Show the model pictures of another size; null: that of its training."""
    window: Size | None
    """Give a Swin another window; learned tables of positions are interpolated."""
    crop_ratio: Auto | AreaShare
    """The shorter side becomes image_size / crop_ratio, the middle is cut out; auto: as trained."""
    augmentation: Augmentation
    """Views of each picture whose probabilities are averaged: the middle, it and its mirror image,
    the middle and the corners, or these and their mirror images."""
    neighbours: Count
    """k of a k-NN classifier on the model's features, with the training pictures as its memory; 0:
    none; 20 is usual."""
    bins: PositiveInt
    """Of the confidence, for the expected calibration error and the reliability diagram."""
    resamples: Count
    """Of the bootstrap that gives confidence intervals; 0: none."""
    seed: Count
    """Of the bootstrap, and of the halves in which the temperature is fitted and reported."""
    batch_size: PositiveInt
    """Pictures per device; it does not change any number."""
    precision: Literal["fp32", "bf16", "fp16"]
    device: Literal["auto", "cpu", "cuda", "mps"]
    loader: LoaderConfig
    output: Path | None
    """Folder of the files; null: evaluation/ in the run's folder, or in the present one."""
    save: bool
    """Write report.json, report.html and the predictions; false: only print."""
    predictions: Literal["csv", "parquet", "none"]
    """How the answers for every picture are stored; parquet needs pyarrow."""
    probabilities: Literal["top5", "all"]
    """Of each picture: those of the five most probable classes, or of all."""
    gallery: Count
    """How many of the most confident mistakes the page shows."""
    format: Literal["table", "json"]
    """Tables for people, or JSON for programs."""

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """One or several."""
        return (self.checkpoint,) if isinstance(self.checkpoint, str) else self.checkpoint
