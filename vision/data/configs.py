"""Settings of data sets, augmentation and loading. Free of torch: mistakes are found at once."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from vision.config import (
    Amount,
    Config,
    Count,
    FilePath,
    PositiveInt,
    Probability,
    Rate,
    Seed,
    Size,
    Workers,
)
from vision.data.images.policy_text import parse_policy

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")

Share = Annotated[float, Field(gt=0, lt=1)]
"""Share of something, where neither the share nor the rest may be empty."""

Samples = Annotated[int, Field(ge=1, le=10**7)]

Text = Annotated[str, Field(min_length=1)]

Auto = Literal["auto"]

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]


class _AnyData(Config):
    """Settings of every data set."""

    seed: Seed
    """Seed of splits and subsets (of `shapes`: also of the images themselves).

    It differs from the run's seed: runs with different seeds are compared on the same images, and
    a run that starts from another run's weights must not validate on its training images.
    """
    samples_per_class: PositiveInt | None
    """Largest number of training images per class; a smaller number gives a subset."""
    train_fraction: Annotated[float, Field(gt=0, le=1)]
    """Share of each class to train on; a smaller share gives a subset."""
    sampling: Literal["uniform", "balanced"]
    """uniform: every image once per epoch; balanced: every class equally often."""
    on_error: Literal["raise", "skip"]
    """Treatment of an image that cannot be read."""
    max_error_share: Probability
    """Largest share of images that may be skipped before the run stops."""


class _StoredData(_AnyData):
    """Settings of every data set of images that are not generated."""

    image_size: Size | Auto
    """Size of the model's input. auto: the size that the weights were trained with; without
    weights, the size of the images for known sets of small images, otherwise 224.
    """
    val_fraction: Share | None
    """Share of the training images, class by class, that is held out for validation.

    null: validate on the set's own validation images, or on its test images if it has none.
    """


class ShapesConfig(_AnyData):
    """Settings of the embedded data sets: generated images of an object in clutter, or of two."""

    kind: Literal["shapes", "shapes_two"]
    image_size: Size
    """Size of the images and of the model's input."""
    train_samples: Samples
    val_samples: Samples
    test_samples: Samples


class FolderConfig(_StoredData):
    """Settings of image files: a folder per class, or a table that lists them."""

    kind: Literal["folder"]
    root: FilePath
    table: FilePath | None
    """CSV file with the columns path (relative to root) and label, optionally split and group; or a
    folder with train.csv, val.csv and test.csv. For several labels per image (task=multi_label) it
    has a column labels (a;b) or a column for each class (1, 0, empty: unknown) instead of label.

    Images of one group (a patient, a video) stay on one side of every split.
    """
    test_fraction: Share | None
    """Share of all images that is held out for testing; only for images not split yet."""
    channels: Literal[1, 3]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.val_fraction and self.test_fraction and self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"val_fraction + test_fraction = {self.val_fraction} + {self.test_fraction} "
                "leaves nothing to train on; their sum must be below 1."
            )
        return self


class TorchvisionConfig(_StoredData):
    """Settings of a classification data set of torchvision, by the name of its class."""

    kind: Literal["torchvision"]
    name: Text
    root: FilePath
    download: bool
    """Let torchvision download missing files."""
    options: dict[str, bool | int | str]
    """Further arguments of torchvision's class, such as {annotation_level: family}."""


class FashionMnistConfig(_StoredData):
    """Settings of Fashion-MNIST, read from its four *-ubyte.gz files."""

    kind: Literal["fashion_mnist"]
    root: FilePath


class ShardsConfig(_StoredData):
    """Settings of tar shards in WebDataset's naming, on local disks."""

    kind: Literal["shards"]
    root: FilePath
    train: Text
    """Pattern of the shards of a split, such as train-*.tar or train-{000000..000099}.tar."""
    val: Text | None
    test: Text | None
    label_field: Text
    """Field with the label in JSON members, for samples without a .cls member."""
    index_folder: FilePath | None
    """Folder of the shards' indices; null: beside the shards."""
    channels: Literal["auto", 1, 3]
    """auto: as `vision prepare` has recorded beside the shards, otherwise 3."""


class HuggingFaceConfig(_StoredData):
    """Settings of a data set of the Hugging Face hub, or a local one that `datasets` reads."""

    kind: Literal["huggingface"]
    path: Text
    """Name on the hub, or local folder: of `save_to_disk`, Parquet files, or images."""
    configuration: Text | None
    """Configuration of the data set, if it has several."""
    revision: Text | None
    """Version on the hub: a branch, a tag or a commit."""
    cache: FilePath | None
    """Folder of downloads; null: the library's default."""
    train: Text
    """The data set's name of its training split, like val and test of the others."""
    val: Text | None
    test: Text | None
    image_column: Text
    """Column of the images; auto: the only one of that type."""
    label_column: Text
    """Column of the labels; auto: the only one of that type."""
    channels: Literal[1, 3]


class PythonDataConfig(_StoredData):
    """Settings of images that a Python program gives: vision.train(…, dataset=…)."""

    kind: Literal["python"]
    label: Text
    """Word for these images in the name of the run; auto: the class of the data set."""
    fingerprint: Text
    """Digest of classes, labels and some of the images. auto: computed by vision.train. Another
    value must be that of the given images: a run is resumed with its own data alone.
    """
    channels: Literal[1, 3]


DataConfig = Annotated[
    ShapesConfig
    | FolderConfig
    | TorchvisionConfig
    | FashionMnistConfig
    | ShardsConfig
    | HuggingFaceConfig
    | PythonDataConfig,
    Field(discriminator="kind"),
]


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
AreaShare = Annotated[float, Field(gt=0, le=1)]
HueShift = Annotated[float, Field(ge=0, le=0.5)]


class PreprocessConfig(Config):
    """Settings of preprocessing. auto: as the weights were trained, else as suits the data set."""

    mean: Auto | tuple[Probability, ...]
    """Mean per channel, on a scale where white is 1."""
    std: Auto | tuple[Positive, ...]
    """Standard deviation per channel, on the same scale."""
    interpolation: Auto | Interpolation
    crop_ratio: Auto | Annotated[float, Field(gt=0, le=1)]
    """Share of the resized image that evaluation crops from its centre: the shorter side is
    resized to image_size / crop_ratio.
    """


def _check_policy(text: str) -> str:
    parse_policy(text)
    return text


class AugmentConfig(Config):
    """Settings of augmentation: crop, flip, policy, colours and erasing; mixing of batches."""

    crop: Literal["random_resized", "random", "center"]
    """random_resized: a random part, resized; random: a random position in the resized and padded
    image; center: as in evaluation.
    """
    crop_area: tuple[AreaShare, AreaShare]
    """Smallest and largest area of random_resized, as a share of the image."""
    crop_aspect: tuple[Positive, Positive]
    """Smallest and largest width / height of random_resized, drawn log-uniformly."""
    padding: Annotated[int, Field(ge=0, le=2**14)]
    """Pixels that `random` adds on each side before cropping."""
    padding_mode: Literal["black", "reflect"]
    interpolation: Literal["evaluation", "bilinear", "bicubic", "random"]
    """evaluation: as in evaluation; random: bilinear or bicubic with equal probability."""
    flip: Probability | Literal["alternate"]
    """Probability of a horizontal flip; alternate: each image in every second epoch, a random half
    of them in the first (Jordan, 2024, section 3.6). Copies of an image in an epoch alternate too.
    """
    vertical_flip: Probability
    """Probability of a vertical flip."""
    policy: Annotated[str, AfterValidator(_check_policy)]
    """none, auto_augment, trivial_augment, augmix, three_augment, or a form of RandAugment:
    timm:rand-m9-mstd0.5-inc1, torchvision:rand-m9-n2, big_vision:rand-m10-n2."""
    color_jitter: tuple[NotNegative, NotNegative, NotNegative, HueShift]
    """Largest change of brightness, contrast, saturation and hue."""
    color_jitter_probability: Probability
    erase: Probability
    """Probability of erasing a rectangle (Zhong et al., AAAI 2020)."""
    erase_area: tuple[AreaShare, AreaShare]
    """Smallest and largest erased area, as a share of the image."""
    erase_aspect: tuple[Positive, Positive]
    erase_fill: Literal["noise", "mean"]
    mixup: NotNegative
    """α of Mixup's Beta(α, α) (Zhang et al., ICLR 2018); 0: no Mixup."""
    cutmix: NotNegative
    """α of CutMix's Beta(α, α) (Yun et al., ICCV 2019); 0: no CutMix."""
    mix: Probability
    """Share of batches that are mixed."""
    cutmix_share: Probability
    """Share of CutMix among the mixed batches if Mixup is used as well."""
    label_smoothing: Rate
    repeats: Amount
    """Number of differently augmented copies of each image in an epoch (Hoffer et al., CVPR 2020).
    The length of an epoch is unchanged, so that it has fewer distinct images."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("crop_area", "crop_aspect", "erase_area", "erase_aspect"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(
                    f"{name} = [{low}, {high}]: the first number must not exceed the second."
                )
        return self


class LoaderConfig(Config):
    """Settings of data loading."""

    workers: Auto | Workers
    """Number of processes that decode and augment; 0: the main process; auto: by the cores."""
    prefetch: Amount
    """Number of batches that each worker prepares ahead."""
    start_method: Auto | Literal["fork", "spawn", "forkserver"]
    """Start method of workers; auto: Python's default on this system."""
    tail: Literal["drop", "pad"]
    """Treatment of the last images of an epoch if they do not fill a batch: drop them (different
    ones each epoch), or pad the batch with the epoch's first images, augmented differently."""
    memory: Count
    """MiB for pixels of small images (up to four times the model's input), which are decoded once
    and kept: training and validation images each, shared by all workers, divided equally among the
    processes of a run. 0: none."""
    max_pixels: Annotated[int, Field(ge=1, le=178_956_970)]
    """Largest number of pixels of an image; decoding takes 3 (JPEG) to 18 bytes for each."""
