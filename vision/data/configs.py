"""What each data set can be told. Free of torch, so that a typo is answered at once."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from vision.config import Config, Count, PositiveInt, Probability, Rate, Size
from vision.data.images.policy import parse_policy

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")

Share = Annotated[float, Field(gt=0, lt=1)]
"""A part of something of which both the part and the rest must not be empty."""

Text = Annotated[str, Field(min_length=1)]


Auto = Literal["auto"]

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]


class _Shared(Config):
    """What every data set has."""

    seed: Count
    """Decides which images a split or a subset holds (for `shapes`: also how they look).

    It is not the run's seed: runs with different seeds are to be compared on the same images, and
    a run that goes on from another one's weights must not validate on what those weights were
    trained with.
    """
    samples_per_class: PositiveInt | None
    """Train on at most so many images of each class; fewer are a subset of more."""
    train_fraction: Annotated[float, Field(gt=0, le=1)]
    """Train on this share of each class; a smaller share is a subset of a larger one."""
    sampling: Literal["uniform", "balanced"]
    """Every image once per epoch, or every class equally often."""
    on_error: Literal["raise", "skip"]
    """What to do with an image that cannot be read."""
    max_error_share: Probability
    """Stop when more than this share of the images had to be skipped."""


class _Stored(_Shared):
    """What every data set on a disk has."""

    image_size: Size | Auto
    """Size of the images that the model sees. auto: the one that the weights were trained with;
    without weights 224, or that of the images where a known set has small ones.
    """
    val_fraction: Share | None
    """Validate on this share of the training images, taken away from them class by class.

    null: on the set's own validation images, or on its test images where it has no others.
    """


class ShapesConfig(_Shared):
    """Images made on the fly: in clutter an object, told by shape, texture and colour."""

    kind: Literal["shapes"]
    image_size: Size
    """Size of the images, and of what the model sees."""
    train_samples: PositiveInt
    val_samples: PositiveInt
    test_samples: PositiveInt


class FolderConfig(_Stored):
    """Image files: a folder per class (split already or not), or a table that lists them."""

    kind: Literal["folder"]
    root: Path
    table: Path | None
    """A CSV file with the columns path (relative to root) and label, and if you like split and
    group.

    Images of one group (a patient, a video) stay on one side of every split.
    """
    test_fraction: Share | None
    """Set this share of all images apart for testing; only where they are not yet split."""
    channels: Literal[1, 3]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.val_fraction and self.test_fraction and self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"val_fraction + test_fraction = {self.val_fraction} + {self.test_fraction} "
                "leaves nothing to train on; their sum must be below 1."
            )
        return self


class TorchvisionConfig(_Stored):
    """Any classification data set of torchvision, by the name of its class."""

    kind: Literal["torchvision"]
    name: Text
    root: Path
    download: bool
    """Let torchvision download what is not there."""
    options: dict[str, bool | int | str]
    """Further arguments of torchvision's class, such as {annotation_level: family}."""


class FashionMnistConfig(_Stored):
    """Fashion-MNIST from its four *-ubyte.gz files as distributed."""

    kind: Literal["fashion_mnist"]
    root: Path


class ShardsConfig(_Stored):
    """Tar shards in WebDataset's naming, on local disks: indexed once, read by seek."""

    kind: Literal["shards"]
    root: Path
    train: Text
    """Shards of a split below root, such as train-*.tar or train-{000000..000099}.tar."""
    val: Text | None
    test: Text | None
    label_field: Text
    """Where a sample has a JSON member in place of a .cls member: the field with its label."""
    index_folder: Path | None
    """Where the indices of the shards are kept; null: beside the shards."""
    channels: Literal["auto", 1, 3]
    """auto: what `vision prepare` noted beside the shards; 3 where it did not write them."""


class HuggingFaceConfig(_Stored):
    """A data set of the Hugging Face hub, or a local one that `datasets` can read."""

    kind: Literal["huggingface"]
    path: Text
    """A name on the hub, or a local folder: of `save_to_disk`, Parquet files, or images."""
    configuration: Text | None
    """Which of the set's configurations, where it has several."""
    revision: Text | None
    """Which version on the hub: a branch, a tag or a commit."""
    cache: Path | None
    """Where downloads are kept; null: the library's own place."""
    train: Text
    """The set's name of its training split; so with val and test."""
    val: Text | None
    test: Text | None
    image_column: Text
    """auto: the only column of images."""
    label_column: Text
    """auto: the only column of class labels."""
    channels: Literal[1, 3]


def named_splits(config: ShardsConfig | HuggingFaceConfig) -> dict[Split, str]:
    """Return the name or pattern that the config gives to each split that it has."""
    names = {split: getattr(config, split) for split in SPLITS}
    return {split: name for split, name in names.items() if name is not None}


DataConfig = Annotated[
    ShapesConfig
    | FolderConfig
    | TorchvisionConfig
    | FashionMnistConfig
    | ShardsConfig
    | HuggingFaceConfig,
    Field(discriminator="kind"),
]


class PrepareConfig(Config):
    """Writing a data set as tar shards of images that are no larger than training needs."""

    data: DataConfig
    output: Path
    short_side: PositiveInt | None
    """Images with a longer short side are shrunk to it; null: every file as it is."""
    image_format: Literal["jpeg", "webp", "png"]
    """What shrunk images, and those that were never files, are stored as."""
    quality: Annotated[int, Field(ge=1, le=100)]
    """Of JPEG and WebP."""
    shard_size: Annotated[int, Field(ge=1)]
    """Megabytes (10⁶ bytes) after which a new shard begins."""
    workers: Count
    """Processes that read and encode; 0: this one."""


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
AreaShare = Annotated[float, Field(gt=0, le=1)]
HueShift = Annotated[float, Field(ge=0, le=0.5)]


def _check_policy(text: str) -> str:
    parse_policy(text)
    return text


class PreprocessConfig(Config):
    """How pixels become numbers; auto: as the weights were trained, else as the data set says."""

    mean: Auto | tuple[Probability, ...]
    """One number per channel, on a scale where white is 1; so with std."""
    std: Auto | tuple[Positive, ...]
    interpolation: Auto | Interpolation
    crop_ratio: Auto | Annotated[float, Field(gt=0, le=1)]
    """Evaluation: the shorter side becomes image_size / crop_ratio; the middle of that is cut out.
    """


class AugmentConfig(Config):
    """What happens to images: crop, flip, policy, colours, erasing; and to batches: mixing."""

    crop: Literal["random_resized", "random", "center"]
    """A random part, resized; a random place in the resized, padded image; or as in evaluation.
    """
    crop_area: tuple[AreaShare, AreaShare]
    """random_resized: smallest and largest area, as a share of the image's."""
    crop_aspect: tuple[Positive, Positive]
    """random_resized: smallest and largest width / height, drawn uniformly in the logarithm."""
    padding: Count
    """random: pixels added on each side before cropping."""
    padding_mode: Literal["black", "reflect"]
    interpolation: Literal["evaluation", "bilinear", "bicubic", "random"]
    """evaluation: the same as there; random: bilinear and bicubic, half each."""
    flip: Probability
    """Of mirroring left and right."""
    vertical_flip: Probability
    policy: Annotated[str, AfterValidator(_check_policy)]
    """none, auto_augment, trivial_augment, augmix, three_augment, or a RandAugment by its flavour:
    timm:rand-m9-mstd0.5-inc1, torchvision:rand-m9-n2, big_vision:rand-m10-n2."""
    color_jitter: tuple[NotNegative, NotNegative, NotNegative, HueShift]
    """Largest change of brightness, contrast, saturation and hue."""
    color_jitter_probability: Probability
    erase: Probability
    """Of erasing a rectangle (Zhong et al., AAAI 2020)."""
    erase_area: tuple[AreaShare, AreaShare]
    """Smallest and largest erased area, as a share of the image's."""
    erase_aspect: tuple[Positive, Positive]
    erase_fill: Literal["noise", "mean"]
    mixup: NotNegative
    """α of Mixup's Beta(α, α) (Zhang et al., ICLR 2018); 0: no Mixup."""
    cutmix: NotNegative
    """α of CutMix's Beta(α, α) (Yun et al., ICCV 2019); 0: no CutMix."""
    mix: Probability
    """Share of the batches that are mixed."""
    cutmix_share: Probability
    """Share of CutMix among the mixed batches, where both are on."""
    label_smoothing: Rate
    repeats: PositiveInt
    """Repeated augmentation (Hoffer et al., CVPR 2020): every image of an epoch comes this often,
    in different forms; an epoch is as long as ever, so that it holds fewer images."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("crop_area", "crop_aspect", "erase_area", "erase_aspect"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} = [{low}, {high}]: the first number must not be larger.")
        return self


class LoaderConfig(Config):
    """How batches are made."""

    workers: Auto | Count
    """Processes that decode and augment; 0: the training process itself; auto: by the machine."""
    prefetch: PositiveInt
    """Batches that each worker has ready or under way."""
    start_method: Auto | Literal["fork", "spawn", "forkserver"]
    """How workers are started; auto: as Python does on this system."""
    tail: Literal["drop", "pad"]
    """Images left over at an epoch's end that do not fill a batch: leave them out (others each
    epoch), or fill the batch with images from the epoch's beginning, augmented anew."""
    max_pixels: Annotated[int, Field(ge=1, le=178_956_970)]
    """Refuse images with more pixels; decoding takes 3 (JPEG) to 18 bytes of memory for each."""


class LookConfig(Config):
    """What `vision data` shows: training images as the model gets them, or a check of all."""

    data: DataConfig
    augment: AugmentConfig
    preprocess: PreprocessConfig
    loader: LoaderConfig
    seed: Count
    count: PositiveInt
    output: Path
    """The image that is written."""
    check: bool
    """Instead, read every image once: counts, sizes, what is unreadable, what comes twice."""
    format: Literal["table", "json"]
    """Of the check."""
