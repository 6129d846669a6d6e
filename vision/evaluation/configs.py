"""What an evaluation can be told. Free of torch, so that a typo is answered at once."""

from typing import Literal

from vision.config import Config, PositiveInt
from vision.data.configs import LoaderConfig, Split


class EvalConfig(Config):
    """The evaluation of a checkpoint, which itself knows its model, classes and preprocessing."""

    checkpoint: str
    """A run's folder (its best checkpoint is taken) or a checkpoint file."""
    split: Split
    weights: Literal["auto", "raw", "ema"]
    """The weights as trained, or their average; auto: the average if there is one."""
    batch_size: PositiveInt
    """Pictures per device; it does not change any number."""
    precision: Literal["fp32", "bf16", "fp16"]
    device: Literal["auto", "cpu", "cuda", "mps"]
    loader: LoaderConfig
    format: Literal["table", "json"]
    """A table for people, or JSON for programs."""
