"""Classification data sets of torchvision: what is known of them without importing torchvision.

A model can be sized before any download.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vision.config import ConfigError, suggest
from vision.data.configs import DataConfig, FashionMnistConfig, Split, TorchvisionConfig

FASHION_MNIST = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

CIFAR10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)

CIFAR100 = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse
    mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
    porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
    snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
    tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905
)

DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class KnownSet:
    """One data set of torchvision."""

    arguments: Mapping[Split, Mapping[str, Any]]
    """Arguments of torchvision's class for each split; train alone: the set is not split."""
    number_of_classes: int
    place: str
    """Files that torchvision expects below root."""
    channels: int = 3
    classes: tuple[str, ...] | None = None
    """Class names, where they are needed before the data is there."""
    by_option: Mapping[str, int] = field(default_factory=dict)
    """Number of classes for values of an option that change it."""
    image_size: int | None = None
    """Height and width of the images of a set whose images are small; they are used whole."""
    mean: tuple[float, ...] | None = None
    """Mean of the training images of such a set, per channel."""
    std: tuple[float, ...] | None = None


_TRAIN: Mapping[str, Any] = {"split": "train"}
_VAL: Mapping[str, Any] = {"split": "val"}
_TEST: Mapping[str, Any] = {"split": "test"}
_TRAIN_OR_NOT: dict[Split, dict[str, Any]] = {"train": {"train": True}, "test": {"train": False}}
_UNSPLIT: dict[Split, dict[str, Any]] = {"train": {}}
_TRAIN_TEST: Mapping[Split, Mapping[str, Any]] = {"train": _TRAIN, "test": _TEST}
_TRAIN_VAL: Mapping[Split, Mapping[str, Any]] = {"train": _TRAIN, "val": _VAL}
_TRAIN_VAL_TEST: Mapping[Split, Mapping[str, Any]] = {**_TRAIN_VAL, "test": _TEST}

SETS: dict[str, KnownSet] = {
    "CIFAR10": KnownSet(
        _TRAIN_OR_NOT,
        10,
        "cifar-10-batches-py/ (unpacked from cifar-10-python.tar.gz of "
        "www.cs.toronto.edu/~kriz/cifar.html), or train/ and val/ with a folder of images per "
        "class",
        classes=CIFAR10,
        image_size=32,
        mean=(0.491, 0.482, 0.447),
        std=(0.247, 0.243, 0.262),
    ),
    "CIFAR100": KnownSet(
        _TRAIN_OR_NOT,
        100,
        "cifar-100-python/ (unpacked from cifar-100-python.tar.gz of "
        "www.cs.toronto.edu/~kriz/cifar.html), or train/ and val/ with a folder of images per "
        "class",
        classes=CIFAR100,
        image_size=32,
        mean=(0.507, 0.487, 0.441),
        std=(0.267, 0.256, 0.276),
    ),
    "Caltech101": KnownSet(
        _UNSPLIT, 101, "caltech101/101_ObjectCategories/ and caltech101/Annotations/"
    ),
    "Caltech256": KnownSet(_UNSPLIT, 257, "caltech256/256_ObjectCategories/"),
    "CLEVRClassification": KnownSet(_TRAIN_VAL, 8, "clevr/CLEVR_v1.0/"),
    "Country211": KnownSet({**_TRAIN_VAL_TEST, "val": {"split": "valid"}}, 211, "country211/"),
    "DTD": KnownSet(_TRAIN_VAL_TEST, 47, "dtd/dtd/ (images/, labels/)"),
    "EMNIST": KnownSet(
        _TRAIN_OR_NOT,
        47,
        "EMNIST/raw/emnist-*-ubyte (and data.options={split: balanced}, or another of its splits)",
        1,
        by_option={"byclass": 62, "letters": 37, "digits": 10, "mnist": 10},
        image_size=28,
    ),
    "EuroSAT": KnownSet(_UNSPLIT, 10, "eurosat/2750/"),
    "FashionMNIST": KnownSet(
        _TRAIN_OR_NOT,
        10,
        "FashionMNIST/raw/*-ubyte",
        1,
        FASHION_MNIST,
        image_size=28,
        mean=(0.286,),
        std=(0.353,),
    ),
    "FER2013": KnownSet(_TRAIN_TEST, 7, "fer2013/fer2013.csv (from Kaggle)", 1),
    "FGVCAircraft": KnownSet(
        _TRAIN_VAL_TEST,
        100,
        "fgvc-aircraft-2013b/data/",
        by_option={"family": 70, "manufacturer": 41},
    ),
    "Flowers102": KnownSet(_TRAIN_VAL_TEST, 102, "flowers-102/ (jpg/, imagelabels.mat, setid.mat)"),
    "Food101": KnownSet(_TRAIN_TEST, 101, "food-101/ (images/, meta/)"),
    "GTSRB": KnownSet(
        _TRAIN_TEST, 43, "gtsrb/ (GTSRB/Training/, GTSRB/Final_Test/, GT-final_test.csv)"
    ),
    "ImageNet": KnownSet(
        _TRAIN_VAL,
        1000,
        "train/ and val/, each with the 1,000 folders n01440764/ … n15075141/ (ILSVRC 2012 of "
        "www.image-net.org; its validation images come in one folder and must be moved to "
        "folders by their labels)",
    ),
    "Imagenette": KnownSet(_TRAIN_VAL, 10, "imagenette2/"),
    "INaturalist": KnownSet(
        {"train": {"version": "2021_train"}, "val": {"version": "2021_valid"}},
        10_000,
        "2021_train/ and 2021_valid/",
    ),
    "KMNIST": KnownSet(_TRAIN_OR_NOT, 10, "KMNIST/raw/*-ubyte", 1, image_size=28),
    "MNIST": KnownSet(
        _TRAIN_OR_NOT,
        10,
        "MNIST/raw/*-ubyte",
        1,
        DIGITS,
        image_size=28,
        mean=(0.131,),
        std=(0.308,),
    ),
    "OxfordIIITPet": KnownSet(
        {"train": {"split": "trainval"}, "test": _TEST},
        37,
        "oxford-iiit-pet/ (images/, annotations/)",
    ),
    "PCAM": KnownSet(_TRAIN_VAL_TEST, 2, "pcam/*.h5 (needs the package h5py)"),
    "Places365": KnownSet(
        {"train": {"split": "train-standard"}, "val": {"split": "val"}},
        365,
        "data_large_standard/, val_large/ and the lists places365_*.txt",
    ),
    "QMNIST": KnownSet(_TRAIN_OR_NOT, 10, "QMNIST/raw/qmnist-*", 1, DIGITS, image_size=28),
    "RenderedSST2": KnownSet(_TRAIN_VAL_TEST, 2, "rendered-sst2/"),
    "SEMEION": KnownSet(_UNSPLIT, 10, "semeion.data", 1, DIGITS),
    "StanfordCars": KnownSet(_TRAIN_TEST, 196, "stanford_cars/ (devkit/, cars_train/, cars_test/)"),
    "STL10": KnownSet(_TRAIN_TEST, 10, "stl10_binary/"),
    "SUN397": KnownSet(_UNSPLIT, 397, "SUN397/"),
    "SVHN": KnownSet(
        _TRAIN_TEST, 10, "train_32x32.mat and test_32x32.mat", classes=DIGITS, image_size=32
    ),
    "USPS": KnownSet(_TRAIN_OR_NOT, 10, "usps.bz2 and usps.t.bz2", 1, DIGITS, image_size=16),
}


def torchvision_set(name: str) -> KnownSet:
    """Return what is known of a data set; ConfigError if torchvision does not have it."""
    if name not in SETS:
        raise ConfigError(
            f"data.name: '{name}' is not a classification data set of torchvision. "
            f"{suggest(name, SETS)}"
        )
    return SETS[name]


def known_set(config: DataConfig) -> KnownSet | None:
    """Return what is known of the data set of a config; None for users' own data."""
    match config:
        case FashionMnistConfig():
            return SETS["FashionMNIST"]
        case TorchvisionConfig():
            return torchvision_set(config.name)
        case _:
            return None
