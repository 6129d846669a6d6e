"""What torchvision's classification sets are like, known without importing torchvision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vision.config import ConfigError, suggest
from vision.data.configs import Split
from vision.data.sources.class_names import CIFAR10, CIFAR100, DIGITS, FASHION_MNIST


@dataclass(frozen=True)
class Facts:
    """One data set of torchvision."""

    arguments: Mapping[Split, Mapping[str, Any]]
    """What torchvision's class is called with for each split; train alone: the set is not split."""
    number_of_classes: int
    place: str
    """What torchvision looks for below root."""
    channels: int = 3
    classes: tuple[str, ...] | None = None
    """The class names, where they are needed before the data is there."""
    by_option: Mapping[str, int] = field(default_factory=dict)
    """Numbers of classes that an option's value brings about."""


SMALL = {"CIFAR10": 32, "CIFAR100": 32, "SVHN": 32, "USPS": 16} | dict.fromkeys(
    ("EMNIST", "FashionMNIST", "KMNIST", "MNIST", "QMNIST"), 28
)
"""The side of the images of sets that have small ones."""


def _named(*names: str) -> dict[Split, dict[str, Any]]:
    """Splits that are chosen by split=…, in the order train, val, test or train, test."""
    splits: tuple[Split, ...] = ("train", "val", "test") if len(names) == 3 else ("train", "test")
    return {split: {"split": name} for split, name in zip(splits, names, strict=True)}


_TRAIN_OR_NOT: dict[Split, dict[str, Any]] = {"train": {"train": True}, "test": {"train": False}}
_UNSPLIT: dict[Split, dict[str, Any]] = {"train": {}}
_TRAIN_TEST = _named("train", "test")
_TRAIN_VAL_TEST = _named("train", "val", "test")
_TRAIN_VAL: dict[Split, dict[str, Any]] = {"train": {"split": "train"}, "val": {"split": "val"}}

SETS: dict[str, Facts] = {
    "CIFAR10": Facts(
        _TRAIN_OR_NOT,
        10,
        "cifar-10-batches-py/ (unpacked from cifar-10-python.tar.gz of "
        "www.cs.toronto.edu/~kriz/cifar.html), or train/ and val/ with a folder of images per "
        "class",
        classes=CIFAR10,
    ),
    "CIFAR100": Facts(
        _TRAIN_OR_NOT,
        100,
        "cifar-100-python/ (unpacked from cifar-100-python.tar.gz of "
        "www.cs.toronto.edu/~kriz/cifar.html), or train/ and val/ with a folder of images per "
        "class",
        classes=CIFAR100,
    ),
    "Caltech101": Facts(
        _UNSPLIT, 101, "caltech101/101_ObjectCategories/ and caltech101/Annotations/"
    ),
    "Caltech256": Facts(_UNSPLIT, 257, "caltech256/256_ObjectCategories/"),
    "CLEVRClassification": Facts(_TRAIN_VAL, 8, "clevr/CLEVR_v1.0/"),
    "Country211": Facts(_named("train", "valid", "test"), 211, "country211/"),
    "DTD": Facts(_TRAIN_VAL_TEST, 47, "dtd/dtd/ (images/, labels/)"),
    "EMNIST": Facts(
        _TRAIN_OR_NOT,
        47,
        "EMNIST/raw/emnist-*-ubyte (and data.options={split: balanced}, or another of its splits)",
        1,
        by_option={"byclass": 62, "letters": 37, "digits": 10, "mnist": 10},
    ),
    "EuroSAT": Facts(_UNSPLIT, 10, "eurosat/2750/"),
    "FashionMNIST": Facts(_TRAIN_OR_NOT, 10, "FashionMNIST/raw/*-ubyte", 1, FASHION_MNIST),
    "FER2013": Facts(_TRAIN_TEST, 7, "fer2013/fer2013.csv (from Kaggle)", 1),
    "FGVCAircraft": Facts(
        _TRAIN_VAL_TEST,
        100,
        "fgvc-aircraft-2013b/data/",
        by_option={"family": 70, "manufacturer": 41},
    ),
    "Flowers102": Facts(_TRAIN_VAL_TEST, 102, "flowers-102/ (jpg/, imagelabels.mat, setid.mat)"),
    "Food101": Facts(_TRAIN_TEST, 101, "food-101/ (images/, meta/)"),
    "GTSRB": Facts(
        _TRAIN_TEST, 43, "gtsrb/ (GTSRB/Training/, GTSRB/Final_Test/, GT-final_test.csv)"
    ),
    "ImageNet": Facts(
        _TRAIN_VAL,
        1000,
        "train/ and val/, each with the 1,000 folders n01440764/ … n15075141/ (ILSVRC 2012 of "
        "www.image-net.org; its validation images come in one folder and must be moved to "
        "folders by their labels)",
    ),
    "Imagenette": Facts(_TRAIN_VAL, 10, "imagenette2/"),
    "INaturalist": Facts(
        {"train": {"version": "2021_train"}, "val": {"version": "2021_valid"}},
        10_000,
        "2021_train/ and 2021_valid/",
    ),
    "KMNIST": Facts(_TRAIN_OR_NOT, 10, "KMNIST/raw/*-ubyte", 1),
    "MNIST": Facts(_TRAIN_OR_NOT, 10, "MNIST/raw/*-ubyte", 1, DIGITS),
    "OxfordIIITPet": Facts(
        _named("trainval", "test"), 37, "oxford-iiit-pet/ (images/, annotations/)"
    ),
    "PCAM": Facts(_TRAIN_VAL_TEST, 2, "pcam/*.h5 (needs the package h5py)"),
    "Places365": Facts(
        {"train": {"split": "train-standard"}, "val": {"split": "val"}},
        365,
        "data_large_standard/, val_large/ and the lists places365_*.txt",
    ),
    "QMNIST": Facts(_TRAIN_OR_NOT, 10, "QMNIST/raw/qmnist-*", 1, DIGITS),
    "RenderedSST2": Facts(_TRAIN_VAL_TEST, 2, "rendered-sst2/"),
    "SEMEION": Facts(_UNSPLIT, 10, "semeion.data", 1, DIGITS),
    "StanfordCars": Facts(_TRAIN_TEST, 196, "stanford_cars/ (devkit/, cars_train/, cars_test/)"),
    "STL10": Facts(_TRAIN_TEST, 10, "stl10_binary/"),
    "SUN397": Facts(_UNSPLIT, 397, "SUN397/"),
    "SVHN": Facts(_TRAIN_TEST, 10, "train_32x32.mat and test_32x32.mat", classes=DIGITS),
    "USPS": Facts(_TRAIN_OR_NOT, 10, "usps.bz2 and usps.t.bz2", 1, DIGITS),
}


def facts(name: str) -> Facts:
    """What is known about a data set; ConfigError if torchvision has no such one."""
    if name not in SETS:
        raise ConfigError(
            f"data.name: '{name}' is no classification data set of torchvision. "
            f"{suggest(name, SETS)}"
        )
    return SETS[name]
