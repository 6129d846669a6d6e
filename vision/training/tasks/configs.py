"""Settings of what a run minimises and is evaluated by. Free of torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vision.checkpoints.configs import WhichWeights
from vision.config import Config, Place, Probability, Rate, Size

Metric = Literal["loss", "top1", "top5", "balanced_accuracy", "macro_f1"]
"""A metric on validation images."""


class ClassifyConfig(Config):
    """Classification: every image has one class."""

    kind: Literal["classify"]
    metrics: ClassVar[tuple[str, ...]] = ("loss", "top1", "top5", "balanced_accuracy", "macro_f1")
    """Numbers on validation images that `checkpoint.best` may name."""


class DistillConfig(Config):
    """Classification with a teacher (DeiT, Touvron et al., ICML 2021, section 4)."""

    kind: Literal["distill"]
    metrics: ClassVar[tuple[str, ...]] = ClassifyConfig.metrics
    teacher: Place
    """Weights of the teacher, which has the classes of the data: a run's folder, a checkpoint file
    of any known format, timm:NAME or hf:OWNER/NAME."""
    teacher_weights: WhichWeights
    """Raw weights or their average; auto: the average if there is one."""
    teacher_model: Annotated[str, Field(min_length=1)] | None
    """timm's name of the teacher's architecture, for a file of a model that this project does not
    have; null: the model that the weights belong to."""
    teacher_classes: Literal["by_name", "in_order"]
    """Whether the teacher's classes are matched to those of the data by name, if it has names, or
    taken to be the same in the same order."""
    teacher_image_size: Size | None
    """Size to which images are resized for the teacher; null: the one that it was trained with."""
    teacher_precision: Literal["fp32", "bf16", "fp16"]
    loss: Literal["soft", "hard"]
    """Divergence from the probabilities of the teacher, or cross-entropy with its most probable
    class."""
    temperature: Annotated[float, Field(gt=0)]
    """Divisor of the logits of teacher and student, for loss=soft."""
    alpha: Probability
    """Weight of the teacher's loss; that of the labels has 1 − alpha."""


TaskConfig = Annotated[ClassifyConfig | DistillConfig, Field(discriminator="kind")]


class LossConfig(Config):
    """The loss of a classifier."""

    kind: Literal["cross_entropy", "bce"]
    """Cross-entropy of the softmax, or of one sigmoid per class (DeiT-III)."""
    bce_threshold: Rate | None
    """Threshold above which mixed targets count as 1, others as 0; null: targets as they are."""
