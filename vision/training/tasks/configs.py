"""Settings of what a run minimises and is evaluated by. Free of torch."""

from typing import ClassVar, Literal

from vision.config import Config, Rate

Metric = Literal["loss", "top1", "top5", "balanced_accuracy", "macro_f1"]
"""A metric on validation images."""


class ClassifyConfig(Config):
    """Classification: every image has one class."""

    kind: Literal["classify"]
    metrics: ClassVar[tuple[str, ...]] = ("loss", "top1", "top5", "balanced_accuracy", "macro_f1")
    """Numbers on validation images that `checkpoint.best` may name."""


TaskConfig = ClassifyConfig


class LossConfig(Config):
    """The loss of a classifier."""

    kind: Literal["cross_entropy", "bce"]
    """Cross-entropy of the softmax, or of one sigmoid per class (DeiT-III)."""
    bce_threshold: Rate | None
    """Threshold above which mixed targets count as 1, others as 0; null: targets as they are."""
