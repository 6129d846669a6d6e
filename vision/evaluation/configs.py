"""What an evaluation can be told. Free of torch, so that a typo is answered at once."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vision.checkpoints.configs import SizedConfig
from vision.config import Count, PositiveInt
from vision.data.configs import DataConfig, LoaderConfig, PreprocessConfig, Split, Text

Augmentation = Literal["none", "flip", "five_crop", "ten_crop"]

HUBS = ("timm:", "hf:")
"""What the names of weights on a hub begin with."""


class EvalConfig(SizedConfig):
    """The evaluation of checkpoints, which know their model, classes and preprocessing."""

    checkpoint: Text | Annotated[tuple[Text, ...], Field(min_length=1)]
    """A run's folder (its best checkpoint is taken), a checkpoint file, or weights of another
    project (a file, a folder, timm:NAME, hf:OWNER/NAME); or several as [a,b]: all are then compared
    with the first."""
    class_names: Path | None
    """A text file with the names of the model's classes, one in a line, in the order of its logits;
    null: as the checkpoint says."""
    data: DataConfig | None
    """Other images than those of the run: data=folder data.root=…; its classes must be known to
    the model. Images are prepared as the checkpoint says, whatever data.image_size is."""
    split: Split
    preprocess: PreprocessConfig
    """How pixels become numbers; auto: as in the training of the model."""
    augmentation: Augmentation
    """Views of each image whose probabilities are averaged: the middle, it and its mirror image,
    the middle and the corners, or these and their mirror images."""
    neighbours: Count
    """k of a k-NN classifier on the model's features, with the training images as its memory; 0:
    none; 20 is usual."""
    bins: PositiveInt
    """Of the confidence, for the expected calibration error and the reliability diagram."""
    resamples: Count
    """Of the bootstrap that gives confidence intervals; 0: none."""
    seed: Count
    """Of the bootstrap, and of the halves in which the temperature is fitted and reported."""
    batch_size: PositiveInt
    """Images per device; it does not change any number."""
    precision: Literal["fp32", "bf16", "fp16"]
    device: Literal["auto", "cpu", "cuda", "mps"]
    loader: LoaderConfig
    output: Path | None
    """Folder of the files; null: evaluation/ in the run's folder, or in the present one."""
    save: bool
    """Write report.json, report.html and the predictions; false: only print."""
    predictions: Literal["csv", "parquet", "none"]
    """How the answers for every image are stored; parquet needs pyarrow."""
    probabilities: Literal["top5", "all"]
    """Of each image: those of the five most probable classes, or of all."""
    gallery: Count
    """How many of the most confident mistakes the page shows."""
    format: Literal["table", "json"]
    """Tables for people, or JSON for programs."""

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """One or several."""
        return (self.checkpoint,) if isinstance(self.checkpoint, str) else self.checkpoint

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data is not None:
            return self
        for place in self.checkpoints:
            if place.startswith(HUBS):
                raise ValueError(f"checkpoint={place} needs data=…: the images to evaluate it on.")
        return self
