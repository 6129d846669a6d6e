"""Settings of what a run minimises and is evaluated by. Free of torch."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vision.config import Config, Depth, Rate, Side, Width

Metric = Literal["loss", "top1", "top5", "balanced_accuracy", "macro_f1"]
"""A metric on validation images."""


class ClassifyConfig(Config):
    """Classification: every image has one class."""

    kind: Literal["classify"]
    metrics: ClassVar[tuple[str, ...]] = ("loss", "top1", "top5", "balanced_accuracy", "macro_f1")
    """Numbers on validation images that `checkpoint.best` may name."""


class DecoderConfig(Config):
    """Size of MAE's decoder, whose blocks are those of a plain ViT."""

    width: Width
    depth: Depth
    heads: Width

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.heads or self.width % 4:
            raise ValueError(
                f"width = {self.width} must be divisible by heads = {self.heads} and, for its "
                "positions, by 4."
            )
        return self


class MaskedConfig(Config):
    """Pretraining without labels: most of an image is hidden, and its pixels are predicted."""

    kind: Literal["masked"]
    method: Literal["auto", "mae", "simmim"]
    """mae (He et al., CVPR 2022): the encoder sees visible patches alone, for a ViT; simmim (Xie et
    al., CVPR 2022): it sees a token in place of hidden ones; auto: mae for a ViT, simmim for a
    Swin."""
    ratio: Annotated[float, Field(ge=0, le=1)] | Literal["auto"]
    """Hidden part of each image; auto: 0.75 with mae, 0.6 with simmim."""
    mask_size: Side | Literal["auto"]
    """Pixels along the squares that are hidden or visible as a whole; auto: a patch with mae, 32
    with simmim."""
    normalize_targets: bool | Literal["auto"]
    """Whether the pixels of each patch are normalised before they are predicted; auto: with mae."""
    decoder: DecoderConfig
    """The decoder of mae; simmim has none."""
    metrics: ClassVar[tuple[str, ...]] = ("loss",)


LABELLED: dict[str, object] = {
    "tune.kind": "all",
    "probe_first": None,
    "flip_test": False,
    "attention_every": None,
    "data.sampling": "uniform",
    "augment.mixup": 0.0,
    "augment.cutmix": 0.0,
    "augment.label_smoothing": 0.0,
}
"""Settings that only labels or a head give a meaning, and the value that a task without them has.
"""

TaskConfig = Annotated[ClassifyConfig | MaskedConfig, Field(discriminator="kind")]


class LossConfig(Config):
    """The loss of a classifier."""

    kind: Literal["cross_entropy", "bce"]
    """Cross-entropy of the softmax, or of one sigmoid per class (DeiT-III)."""
    bce_threshold: Rate | None
    """Threshold above which mixed targets count as 1, others as 0; null: targets as they are."""
