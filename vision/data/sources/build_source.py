"""From a data config to its images (`build_source`), or to their size and classes (`describe`).

Importing this module and calling `describe` do not load torch: a model can be sized before any
image is read.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vision.config import ConfigError, pair
from vision.data.configs import (
    SPLITS,
    DataConfig,
    FashionMnistConfig,
    FolderConfig,
    HuggingFaceConfig,
    PythonDataConfig,
    ShapesConfig,
    ShardsConfig,
    Share,
    Split,
    TorchvisionConfig,
)
from vision.data.sources.fashion_mnist import read_fashion_mnist
from vision.data.sources.folder import FolderSource, check_same_classes, list_images
from vision.data.sources.huggingface import read_classes, read_huggingface
from vision.data.sources.known_sets import known_set, torchvision_set
from vision.data.sources.packed import PackedStrings
from vision.data.sources.shapes import CLASSES, build_shapes
from vision.data.sources.shards import describe_shards, read_shards
from vision.data.sources.source import Source, take
from vision.data.sources.subsets import named_splits, nested_subset, split_by_fraction
from vision.data.sources.table import folder_classes, read_table
from vision.data.sources.wordnet import imagenet_synsets, readable_names

if TYPE_CHECKING:
    from vision.data.given import GivenImages


@dataclass(frozen=True)
class DataSpec:
    """Properties of the data that a model depends on."""

    image_size: tuple[int, int]
    """Height and width."""
    channels: int
    classes: tuple[str, ...] | None
    """None: unknown until the data is read."""
    number_of_classes: int


def describe(config: DataConfig) -> DataSpec:
    """Return what a model depends on; known sets need not be on the disk."""
    number = None
    classes: tuple[str, ...] | None
    match config:
        case ShapesConfig():
            channels, classes = 3, CLASSES
        case FolderConfig():
            channels, classes = config.channels, folder_classes(config)
        case ShardsConfig():
            channels, classes = describe_shards(config)
        case HuggingFaceConfig():
            channels, classes = config.channels, read_classes(config)
        case PythonDataConfig():
            raise ConfigError(_not_given(config))
        case TorchvisionConfig(name="ImageNet"):
            channels, classes = 3, readable_names(imagenet_synsets())
        case _:
            known = known_set(config)
            assert known is not None
            channels, classes, number = known.channels, known.classes, known.number_of_classes
            for value in getattr(config, "options", {}).values():
                number = known.by_option.get(str(value), number)
    if number is None:
        assert classes is not None
        number = len(classes)
    return DataSpec(image_size(config)[0], channels, classes, number)


def image_size(
    config: DataConfig, trained: tuple[int, int] | None = None
) -> tuple[tuple[int, int], str]:
    """Return height and width of the model's input, and their origin.

    `trained` is the size that the weights were trained with.
    """
    if config.image_size != "auto":
        return pair(config.image_size), "the config"
    if trained is not None:
        return trained, "the weights"
    known = known_set(config)
    if known is not None and known.image_size is not None:
        return pair(known.image_size), "the data set"
    return (224, 224), "default"


def build_source(config: DataConfig, split: Split, given: "GivenImages | None" = None) -> Source:
    """Return the images of a split; of train, those that train_fraction and samples_per_class
    leave. `given` are those of a Python program.
    """
    source = _build_whole(config, split, given)
    if split != "train":
        return source
    indices = nested_subset(
        source.labels, config.train_fraction, config.samples_per_class, config.seed
    )
    return take(source, indices)


def list_splits(config: DataConfig) -> tuple[Split, ...]:
    """Return the splits that the data has; test only if its images differ from those of val."""
    fraction = None
    available: Collection[Split]
    match config:
        case ShapesConfig():
            return SPLITS
        case FolderConfig():
            available = read_table(config).splits
        case _:
            available, fraction = _stored_splits(config)[0], config.val_fraction
    own = {split: _own_split(available, fraction, split) for split in SPLITS}
    if own["test"] == own["val"]:
        own["test"] = None
    return tuple(split for split in SPLITS if own[split] is not None)


def _stored_splits(
    config: FashionMnistConfig
    | TorchvisionConfig
    | ShardsConfig
    | HuggingFaceConfig
    | PythonDataConfig,
    given: "GivenImages | None" = None,
) -> tuple[Collection[Split], Callable[[Split], Source]]:
    """Return the splits that a data set is stored in, and the function that reads one of them."""
    match config:
        case FashionMnistConfig():
            return ("train", "test"), partial(read_fashion_mnist, config.root)
        case TorchvisionConfig():
            return torchvision_set(config.name).arguments, partial(_read_torchvision, config)
        case ShardsConfig():
            return named_splits(config), partial(read_shards, config)
        case HuggingFaceConfig():
            return named_splits(config), partial(read_huggingface, config)
        case PythonDataConfig():
            if given is None:
                raise ConfigError(_not_given(config))
            return given.splits, given.splits.__getitem__


def _not_given(config: PythonDataConfig) -> str:
    which = "the images" if config.label == "auto" else f"the images ({config.label})"
    return (
        f"data=python: {which} are those of a Python program, vision.train(…, dataset=…), and are "
        "not here. Give them as files: data=folder data.root=…, with a folder for each class."
    )


def _build_whole(config: DataConfig, split: Split, given: "GivenImages | None") -> Source:
    if isinstance(config, ShapesConfig):
        return build_shapes(config, split)
    if isinstance(config, FolderConfig):
        # Its table has the fractions taken out already.
        table = read_table(config, split)
        return table.source(_require_split(table.splits, None, split, config.root), config.channels)
    match config:
        case HuggingFaceConfig():
            place: Path | str = config.path
        case PythonDataConfig():
            place = config.label
        case _:
            place = config.root
    available, read = _stored_splits(config, given)
    own = _require_split(available, config.val_fraction, split, place)
    source = read(own)
    if config.val_fraction is None or own != "train":
        return source
    parts = split_by_fraction(source.labels, {"val": config.val_fraction}, config.seed)
    return take(source, parts[split])


def _own_split(
    available: Collection[Split], val_fraction: Share | None, split: Split
) -> Split | None:
    """Return the stored split that the images of a split are taken from, if there is one."""
    own = split
    if split == "val" and val_fraction is not None:
        own = "train"
    elif split == "val" and "val" not in available:
        own = "test"
    elif split == "test" and "test" not in available and val_fraction is not None:
        own = "val"  # validation images that are not used for validation make good test images
    return own if own in available else None


def _require_split(
    available: Collection[Split], val_fraction: Share | None, split: Split, place: Path | str
) -> Split:
    own = _own_split(available, val_fraction, split)
    if own is not None:
        return own
    advice = {
        "train": "",
        "val": " Set data.val_fraction, such as 0.1, to take them from the training images.",
        "test": " Use the validation images; data.val_fraction can take others for validation.",
    }
    raise ConfigError(
        f"data: {place} has no images for {split}; it has "
        f"{', '.join(available) or 'none'}.{advice[split]}"
    )


def _read_torchvision(config: TorchvisionConfig, own: Split) -> Source:
    """Read folders of images where a set may come as such, otherwise what torchvision reads."""
    match config.name:
        case "ImageNet":
            return _read_known_folders(config, own, imagenet_synsets())
        case "CIFAR10" | "CIFAR100" if (config.root / "train").is_dir():
            return _read_known_folders(config, own, torchvision_set(config.name).classes or ())
        case _:
            from vision.data.sources.torchvision_sets import read_torchvision

            return read_torchvision(config, own)


def _read_known_folders(
    config: TorchvisionConfig, own: Split, expected: tuple[str, ...]
) -> FolderSource:
    """Read folders of known classes; those are sorted, and so are the labels."""
    folder = config.root / own
    if own != "train" and not folder.is_dir():  # the only other split may be called either way
        folder = next(
            (f for f in (config.root / "val", config.root / "test") if f.is_dir()), folder
        )
    known = torchvision_set(config.name)
    place = f"Expected in {config.root}: {known.place}."
    if not folder.is_dir():
        raise ConfigError(f"data.root: the folder {folder} does not exist. {place}")
    folders, paths, labels, _ = list_images(folder)
    check_same_classes(
        f"data.root: the folders in {folder} are not the classes of {config.name}",
        ("missing", expected),
        ("unknown", folders),
        f"{place} For another set of classes use data=folder.",
    )
    classes = readable_names(folders)
    return FolderSource(labels, classes, known.channels, folder, PackedStrings(paths))
