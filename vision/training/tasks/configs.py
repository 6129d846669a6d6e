"""Settings of what a run minimises and is evaluated by. Free of torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vision.config import Config, Rate

Metric = Literal[
    "loss", "top1", "top5", "balanced_accuracy", "macro_f1", "map", "micro_f1", "sample_f1"
]
"""A metric on validation images."""


class ClassifyConfig(Config):
    """Classification: every image has one class."""

    kind: Literal["classify"]
    metrics: ClassVar[tuple[str, ...]] = ("loss", "top1", "top5", "balanced_accuracy", "macro_f1")
    """Numbers on validation images that `checkpoint.best` may name."""


Focus = Annotated[float, Field(ge=0, le=100)]
Weight = Annotated[float, Field(gt=0)]


class MultiLabelConfig(Config):
    """Multi-label classification: every image has any number of classes, or unknown ones."""

    kind: Literal["multi_label"]
    loss: Literal["bce", "asymmetric"]
    """Binary cross-entropy of each class, or the asymmetric loss (Ridnik et al., ICCV 2021), which
    reduces the weight of easy negatives. Both are sums over known labels, divided by the number of
    images and of classes. Label smoothing moves targets towards 0.5."""
    pos_weight: Literal["none", "balanced"] | Annotated[tuple[Weight, ...], Field(min_length=1)]
    """Weight of present classes in the loss: 1; images without a class / images with it, counted on
    the training images; or a number for each class."""
    gamma_positive: Focus
    """γ₊ of the asymmetric loss: exponent of 1 − p for present classes."""
    gamma_negative: Focus
    """γ₋: exponent of p for absent classes."""
    clip: Rate
    """Probability margin of the asymmetric loss: absent classes with a smaller p cost nothing."""
    metrics: ClassVar[tuple[str, ...]] = ("loss", "map", "micro_f1", "macro_f1", "sample_f1")
    """Numbers on validation images that `checkpoint.best` may name."""


TaskConfig = Annotated[ClassifyConfig | MultiLabelConfig, Field(discriminator="kind")]


class LossConfig(Config):
    """The loss of a classifier with one class per image (task=classify)."""

    kind: Literal["cross_entropy", "bce"]
    """Cross-entropy of the softmax, or of one sigmoid per class (DeiT-III)."""
    bce_threshold: Rate | None
    """Threshold above which mixed targets count as 1, others as 0; null: targets as they are."""
