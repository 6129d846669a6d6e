"""Settings of what a run trains, minimises and is evaluated by. Free of torch."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vision.checkpoints.configs import WhichWeights
from vision.config import (
    Config,
    Count,
    Depth,
    NotNegative,
    Place,
    Positive,
    Probability,
    Rate,
    Side,
    Size,
    Width,
)
from vision.data.configs import AugmentConfig

Focus = Annotated[float, Field(ge=0, le=100)]


class AnyTaskConfig(Config):
    """What the settings of every task say about the others of a run."""

    metrics: ClassVar[tuple[str, ...]]
    """Numbers on validation images that `checkpoint.best` and `objective` may name."""
    required: ClassVar[Mapping[str, object]] = {}
    """Settings of a run, where it has them, with the only value that the task allows."""
    because: ClassVar[str] = ""
    """The reason, for messages."""


class ClassifyConfig(AnyTaskConfig):
    """Classification: every image has one class."""

    metrics = ("loss", "top1", "top5", "balanced_accuracy", "macro_f1")
    kind: Literal["classify"]


class DistillConfig(AnyTaskConfig):
    """Classification with a teacher (DeiT, Touvron et al., ICML 2021, section 4)."""

    metrics = ClassifyConfig.metrics
    required: ClassVar[Mapping[str, object]] = {"tune.cache": False, "probe_first": None}
    because = "shows every image to a teacher, where stored features have none"
    kind: Literal["distill"]
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
    temperature: Positive
    """Divisor of the logits of teacher and student, for loss=soft."""
    alpha: Probability
    """Weight of the teacher's loss; that of the labels has 1 − alpha."""


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


class MaskedConfig(AnyTaskConfig):
    """Pretraining without labels: most of an image is hidden, and its pixels are predicted."""

    metrics = ("loss",)
    required: ClassVar[Mapping[str, object]] = {
        "tune.kind": "all",
        "probe_first": None,
        "flip_test": False,
        "attention_every": None,
        "data.sampling": "uniform",
        "augment.mixup": 0.0,
        "augment.cutmix": 0.0,
        "augment.label_smoothing": 0.0,
        "loss.class_weights": "none",
        "loss.logit_adjustment": 0.0,
    }
    because = "trains all weights without labels"
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


class MultiLabelConfig(AnyTaskConfig):
    """Multi-label classification: every image has any number of classes, or unknown ones."""

    metrics = ("loss", "map", "micro_f1", "macro_f1", "sample_f1")
    required: ClassVar[Mapping[str, object]] = {
        "tune.cache": False,
        "probe_first": None,
        "loss.class_weights": "none",
        "loss.logit_adjustment": 0.0,
    }
    because = "has a loss of its own, of every class by itself (task.loss, task.pos_weight)"
    kind: Literal["multi_label"]
    loss: Literal["bce", "asymmetric"]
    """Binary cross-entropy of each class, or the asymmetric loss (Ridnik et al., ICCV 2021), which
    reduces the weight of easy negatives. Both are sums over known labels, divided by the number of
    images and of classes. Label smoothing moves targets towards 0.5."""
    pos_weight: Literal["none", "balanced"] | Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Weight of present classes in the loss: 1; images without a class / images with it, counted on
    the training images; or a number for each class."""
    gamma_positive: Focus
    """γ₊ of the asymmetric loss: exponent of 1 − p for present classes."""
    gamma_negative: Focus
    """γ₋: exponent of p for absent classes."""
    clip: Rate
    """Probability margin of the asymmetric loss: absent classes with a smaller p cost nothing."""


TaskConfig = Annotated[
    ClassifyConfig | DistillConfig | MaskedConfig | MultiLabelConfig, Field(discriminator="kind")
]


class LossConfig(Config):
    """The loss of a classifier with one class per image (task=classify)."""

    kind: Literal["cross_entropy", "bce", "focal"]
    """Cross-entropy of the softmax, or of one sigmoid per class (DeiT-III); or the focal loss of
    the softmax (Lin et al., ICCV 2017)."""
    bce_threshold: Rate | None
    """Threshold above which mixed targets count as 1, others as 0; null: targets as they are."""
    focal_gamma: NotNegative
    """Exponent of kind=focal: images that are classified with probability p count (1 − p)^gamma."""
    class_weights: Literal["none", "balanced", "effective"] | tuple[NotNegative, ...]
    """Weight of every class in the loss, for unequal classes: none; balanced, in proportion to
    1 / number of its images; effective, to 1 / effective number of its images (Cui et al., CVPR
    2019); or a list in the order of the classes. Only ratios matter: the mean over the training
    images is made 1."""
    effective_beta: Rate
    """β of class_weights=effective: n images count as (1 − βⁿ) / (1 − β); 0: all classes alike."""
    logit_adjustment: NotNegative
    """τ of logit adjustment (Menon et al., ICLR 2021): in training τ · log(share of the class) is
    added to its logit; 1 is usual, 0 disables it. Evaluation takes the logits as they are."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.logit_adjustment and self.kind == "bce":
            raise ValueError(
                f"logit_adjustment = {self.logit_adjustment:g} shifts the logits of a softmax, but "
                "kind = bce has one sigmoid per class; use kind=cross_entropy or focal, or 0."
            )
        if not isinstance(self.class_weights, str) and not any(self.class_weights):
            raise ValueError(
                f"class_weights = {list(self.class_weights)}: expected at least one weight above 0."
            )
        return self

    def check_sampling(self) -> None:
        """Refuse weights that would favour rare classes again, which are drawn as often already."""
        if self.class_weights in ("balanced", "effective"):
            raise ValueError(
                f"loss.class_weights = {self.class_weights} and data.sampling = balanced favour "
                "rare classes twice; use loss.class_weights=none or data.sampling=uniform."
            )


PLAIN_IMAGES = {
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
"""Settings of an augmentation that leaves training images as they are in evaluation."""


class TuneAllConfig(Config):
    """Training of all parameters."""

    kind: Literal["all"]


class TuneHeadConfig(Config):
    """Training of the classifying layer alone (linear probe)."""

    kind: Literal["head"]
    cache: bool
    """Whether the features of every image are computed once and kept in the run's folder. Needs
    images without augmentation."""

    def check_images(self, augment: AugmentConfig, flip_test: bool) -> None:
        """Refuse images that cached features cannot be of."""
        if not self.cache:
            return
        for name, plain in PLAIN_IMAGES.items():
            if (found := getattr(augment, name)) != plain:
                raise ValueError(
                    f"tune.cache=true computes the features of every image once, but augment."
                    f"{name}={found} changes images each time; use augment=none or "
                    "tune.cache=false."
                )
        if flip_test:
            raise ValueError(
                "flip_test: tune.cache=true stores no features of mirror images; use "
                "flip_test=false or tune.cache=false."
            )


class TunePartialConfig(Config):
    """Training of the last blocks, named parts and the head."""

    kind: Literal["partial"]
    blocks: Count
    """Number of blocks from the end, trained with the norm after them."""
    parts: tuple[str, ...]
    """Names of further parameters or modules; * matches anything: patch_embed, blocks.*.attn."""


LoraTarget = Literal["q", "k", "v", "proj", "fc1", "fc2"]


class TuneLoraConfig(Config):
    """Training of low-rank additions to the layers of every block, and of the head (Hu et al., ICLR
    2022).
    """

    kind: Literal["lora"]
    rank: Width
    alpha: Positive
    """Scale of the additions, which are multiplied by alpha / rank."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)]
    """Queries, keys, values and output of the attention; first and second layer of the MLP."""
    dropout: Rate
    """Dropout rate of the inputs of the additions."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets = {list(self.targets)}: name each one once.")
        return self


class TuneBitfitConfig(Config):
    """Training of biases and the head (Ben Zaken et al., ACL 2022)."""

    kind: Literal["bitfit"]


TuneConfig = Annotated[
    TuneAllConfig | TuneHeadConfig | TunePartialConfig | TuneLoraConfig | TuneBitfitConfig,
    Field(discriminator="kind"),
]
