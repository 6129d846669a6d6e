"""From a data config to images (`build_source`), or to what a model must know of them
(`describe`).

Importing this module, and `describe`, do not load torch: a model can be sized before any image is
read.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from vision.config import ConfigError, pair
from vision.data.configs import (
    DataConfig,
    FashionMnistConfig,
    FolderConfig,
    HuggingFaceConfig,
    ShapesConfig,
    ShardsConfig,
    Share,
    Split,
    TorchvisionConfig,
)
from vision.data.sources.class_names import FASHION_MNIST
from vision.data.sources.fashion_mnist import read_fashion_mnist
from vision.data.sources.folder import FolderSource, list_images, shorten
from vision.data.sources.known_sets import SMALL, facts
from vision.data.sources.packed import PackedStrings
from vision.data.sources.shapes import CLASSES, build_shapes
from vision.data.sources.shards import available_splits, describe_shards, read_shards
from vision.data.sources.source import Source
from vision.data.sources.subsets import nested_subset, split_by_fraction, take
from vision.data.sources.table import folder_classes, read_table
from vision.data.sources.wordnet import imagenet_synsets, readable_names


@dataclass(frozen=True)
class DataSpec:
    """What a model must know of its data."""

    image_size: tuple[int, int]
    """Height and width."""
    channels: int
    classes: tuple[str, ...] | None
    """None: only the data itself could tell."""
    number_of_classes: int


def describe(config: DataConfig) -> DataSpec:
    """What a model must know of the data; sets with a fixed number of classes need not be there."""
    classes: tuple[str, ...] | None
    number = None
    match config:
        case ShapesConfig():
            channels, classes = 3, CLASSES
        case FashionMnistConfig():
            channels, classes = 1, FASHION_MNIST
        case FolderConfig():
            channels, classes = config.channels, folder_classes(config)
        case TorchvisionConfig(name="ImageNet"):
            channels, classes = 3, readable_names(imagenet_synsets())
        case TorchvisionConfig():
            known = facts(config.name)
            channels, classes, number = known.channels, known.classes, known.number_of_classes
            for value in config.options.values():
                number = known.by_option.get(str(value), number)
        case ShardsConfig():
            channels, classes = describe_shards(config)
        case HuggingFaceConfig():
            from vision.data.sources.huggingface import read_classes

            channels, classes = config.channels, read_classes(config)
    if number is None:
        assert classes is not None
        number = len(classes)
    return DataSpec(image_size(config)[0], channels, classes, number)


def image_size(
    config: DataConfig, trained: tuple[int, int] | None = None
) -> tuple[tuple[int, int], str]:
    """Height and width of what the model sees, and who said so. `trained`: what its weights saw."""
    if config.image_size != "auto":
        return pair(config.image_size), "the config"
    if trained is not None:
        return trained, "the weights"
    match config:
        case FashionMnistConfig():
            return (28, 28), "the data set"
        case TorchvisionConfig(name=name) if name in SMALL:
            return (SMALL[name], SMALL[name]), "the data set"
        case _:
            return (224, 224), "default"


def build_source(config: DataConfig, split: Split) -> Source:
    """The images of a split; of train those that train_fraction and samples_per_class leave."""
    source = _build_whole(config, split)
    if split != "train":
        return source
    indices = nested_subset(
        source.labels, config.train_fraction, config.samples_per_class, config.seed
    )
    return take(source, indices)


def list_splits(config: DataConfig) -> tuple[Split, ...]:
    """The splits that the data has; test only if its images are others than those of val."""
    fraction: float | None = None
    available: Collection[Split]
    match config:
        case ShapesConfig():
            return ("train", "val", "test")
        case FolderConfig():
            available = read_table(config).splits
        case _:
            available, fraction = _stored_splits(config), config.val_fraction
    found: list[Split] = [split for split in ("train",) if split in available]
    if fraction is not None or "val" in available or "test" in available:
        found.append("val")
    if ("val" in available and "test" in available) or (
        fraction is not None and len(available) > 1
    ):
        found.append("test")
    return tuple(found)


def _stored_splits(
    config: FashionMnistConfig | TorchvisionConfig | ShardsConfig | HuggingFaceConfig,
) -> Collection[Split]:
    """The splits that a set has by its authors' will, or by what the config names."""
    match config:
        case FashionMnistConfig():
            return ("train", "test")
        case TorchvisionConfig():
            return tuple(facts(config.name).arguments)
        case ShardsConfig():
            return available_splits(config)
        case HuggingFaceConfig():
            from vision.data.sources.huggingface import huggingface_splits

            return huggingface_splits(config)


def _build_whole(config: DataConfig, split: Split) -> Source:
    if isinstance(config, ShapesConfig):
        return build_shapes(config, split)
    if isinstance(config, FolderConfig):
        # Its table has the fractions taken out already.
        table = read_table(config, split)
        return table.source(_own_split(table.splits, None, split, config.root), config.channels)
    place = config.path if isinstance(config, HuggingFaceConfig) else config.root
    own = _own_split(_stored_splits(config), config.val_fraction, split, place)
    source = _read_stored(config, own)
    if config.val_fraction is None or own != "train":
        return source
    parts = split_by_fraction(source.labels, {"val": config.val_fraction}, config.seed)
    return take(source, parts[split])


def _read_stored(
    config: FashionMnistConfig | TorchvisionConfig | ShardsConfig | HuggingFaceConfig, own: Split
) -> Source:
    match config:
        case FashionMnistConfig():
            return read_fashion_mnist(config.root, own)
        case TorchvisionConfig():
            return _read_torchvision(config, own)
        case ShardsConfig():
            return read_shards(config, own)
        case HuggingFaceConfig():
            from vision.data.sources.huggingface import read_huggingface

            return read_huggingface(config, own)


def _own_split(
    available: Collection[Split], val_fraction: Share | None, split: Split, place: Path | str
) -> Split:
    """Which of the set's own splits the images of a split are taken from."""
    match split:
        case "train":
            own: Split = "train"
        case "val" if val_fraction is not None:
            own = "train"
        case "val":
            own = "val" if "val" in available else "test"
        case "test":
            # Validation images that are not used for validation make good test images.
            own = "val" if "test" not in available and val_fraction is not None else "test"
    if own in available:
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
    """Folders of images where a set may come as such; otherwise what torchvision reads."""
    synsets = imagenet_synsets()
    match config.name:
        case "ImageNet":
            return _read_known_folders(config, own, synsets)
        case "CIFAR10" | "CIFAR100" if (config.root / "train").is_dir():
            classes = facts(config.name).classes
            assert classes is not None
            return _read_known_folders(config, own, classes)
        case _:
            from vision.data.sources.torchvision_sets import read_torchvision

            return read_torchvision(config, own)


def _read_known_folders(
    config: TorchvisionConfig, own: Split, expected: tuple[str, ...]
) -> FolderSource:
    """Folders of known classes; those are sorted, and so are the labels."""
    folder = config.root / own
    if own != "train" and not folder.is_dir():  # the only other split may be called either way
        folder = next(
            (f for f in (config.root / "val", config.root / "test") if f.is_dir()), folder
        )
    place = f"Expected in {config.root}: {facts(config.name).place}."
    if not folder.is_dir():
        raise ConfigError(f"data.root: there is no folder {folder}. {place}")
    listing = list_images(folder)
    if listing.classes != expected:
        missing = sorted(set(expected) - set(listing.classes))
        unknown = sorted(set(listing.classes) - set(expected))
        differences = [f"missing {shorten(missing)}"] * bool(missing)
        differences += [f"unknown {shorten(unknown)}"] * bool(unknown)
        raise ConfigError(
            f"data.root: the folders in {folder} are not the classes of {config.name}: "
            f"{'; '.join(differences)}. {place} For another set of classes use data=folder."
        )
    classes = readable_names(listing.classes)
    paths = PackedStrings(listing.paths)
    return FolderSource(folder, paths, listing.labels, classes, facts(config.name).channels)
