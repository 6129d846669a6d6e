"""Data sets of the Hugging Face hub, or local ones, through the optional `datasets` library."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vision.config import ConfigError, suggest
from vision.data.configs import HuggingFaceConfig, Split
from vision.data.sources.source import StoredImage

if TYPE_CHECKING:
    import datasets  # type: ignore[import-untyped]


@dataclass(eq=False, repr=False)
class HuggingFaceSource:
    """A `Source` over one split; images stay encoded, in the memory-mapped table."""

    origin: str
    dataset: "datasets.Dataset"
    image_column: str
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    channels: int

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """The data set's name, the split and the row."""
        return f"{self.origin}[{index}]"

    def read(self, index: int) -> StoredImage:
        """The image as it is stored: in the table, or as a file that the table names."""
        stored = self.dataset[index][self.image_column]
        if stored is None:
            raise OSError(f"{self.name(index)} has no image.")
        if stored["bytes"] is not None:
            return bytes(stored["bytes"])
        return Path(stored["path"]).read_bytes()


def huggingface_splits(config: HuggingFaceConfig) -> tuple[Split, ...]:
    """The splits that the config names."""
    named: dict[Split, str | None] = {"train": config.train, "val": config.val, "test": config.test}
    return tuple(split for split, name in named.items() if name is not None)


def read_classes(config: HuggingFaceConfig) -> tuple[str, ...]:
    """The class names; a set that does not name them is read for its labels."""
    library = _library()
    features = None
    if not _is_saved(config):
        try:
            builder = library.load_dataset_builder(
                config.path, config.configuration, revision=config.revision, cache_dir=config.cache
            )
        except _unreadable() as error:
            raise _failure(config, error) from error
        features = builder.info.features
    if features is not None:
        names = getattr(features.get(_label_column(config, features)), "names", None)
        if names is not None:
            return tuple(names)
    return read_huggingface(config, "train").classes


def read_huggingface(config: HuggingFaceConfig, split: Split) -> HuggingFaceSource:
    """One split."""
    names: dict[Split, str | None] = {"train": config.train, "val": config.val, "test": config.test}
    name = names[split]
    assert name is not None
    library = _library()
    dataset = _load(config, split, name)
    image, label = _image_column(config, dataset.features), _label_column(config, dataset.features)
    labels, classes = _labels(config, dataset, label, split)
    dataset = dataset.select_columns([image]).cast_column(image, library.Image(decode=False))
    return HuggingFaceSource(
        f"{config.path}:{name}", dataset, image, labels, classes, config.channels
    )


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "data.kind: huggingface needs the package datasets, which is not installed: pip "
            "install datasets"
        ) from error
    return datasets


def _unreadable() -> tuple[type[Exception], ...]:
    """What the library raises for a set that is not there, misspelt, or not to be reached."""
    return (OSError, ValueError, RuntimeError)


def _failure(config: HuggingFaceConfig, error: Exception) -> ConfigError:
    return ConfigError(
        f"data.path: '{config.path}' cannot be read: {str(error).rstrip('.')}. Expected the name "
        "of a data set on huggingface.co/datasets, or a local folder (of `save_to_disk`, Parquet "
        "files, or images). Where the hub cannot be reached, copy the data set and give its "
        "folder."
    )


def _is_saved(config: HuggingFaceConfig) -> bool:
    """Whether the path is a folder that `save_to_disk` wrote."""
    folder = Path(config.path)
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def _load(config: HuggingFaceConfig, split: Split, name: str) -> Any:
    library = _library()
    try:
        if not _is_saved(config):
            return library.load_dataset(
                config.path,
                config.configuration,
                split=name,
                revision=config.revision,
                cache_dir=config.cache,
            )
        saved = library.load_from_disk(config.path)
    except _unreadable() as error:
        raise _failure(config, error) from error
    if not isinstance(saved, library.DatasetDict):
        saved = {"train": saved}
    if name not in saved:
        raise ConfigError(
            f"data.{split}: {config.path} has no split '{name}'. {suggest(name, map(str, saved))} "
            "Without validation images, set data.val=null and data.val_fraction=0.1."
        )
    return saved[name]


def _image_column(config: HuggingFaceConfig, features: Any) -> str:
    kind = _library().Image
    return _column(
        "image", config.image_column, features, lambda feature: isinstance(feature, kind)
    )


def _label_column(config: HuggingFaceConfig, features: Any) -> str:
    kind = _library().ClassLabel
    return _column(
        "label", config.label_column, features, lambda feature: isinstance(feature, kind)
    )


def _column(what: str, wanted: str, features: Any, fits: Any) -> str:
    """The column that the config names, or the only one that fits."""
    if wanted != "auto":
        if wanted not in features:
            raise ConfigError(
                f"data.{what}_column: there is no column '{wanted}'. {suggest(wanted, features)}"
            )
        return wanted
    found = [name for name, feature in features.items() if fits(feature)]
    if len(found) != 1:
        raise ConfigError(
            f"data.{what}_column: {len(found)} columns of the data set could be meant "
            f"({', '.join(found or features)}); name one."
        )
    return str(found[0])


def _labels(
    config: HuggingFaceConfig, dataset: Any, column: str, split: Split
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels as numbers, and the class names."""
    values = np.asarray(dataset.with_format("numpy")[column][:])
    names = getattr(dataset.features[column], "names", None)
    if names is not None:
        if len(values) and values.min() < 0:
            raise ConfigError(
                f"data.{split}: {int((values < 0).sum())} of {len(values)} images in "
                f"{config.path} have no label."
            )
        return values.astype(np.int64), tuple(names)
    # A column of plain numbers or words: the training split says which classes there are.
    if split == "train":
        known, labels = np.unique(values, return_inverse=True)
        return labels.astype(np.int64), tuple(map(str, known.tolist()))
    classes = read_huggingface(config, "train").classes
    number = {name: i for i, name in enumerate(classes)}
    unknown = sorted({str(value) for value in values.tolist()} - set(classes))
    if unknown:
        raise ConfigError(
            f"data.{split}: the label '{unknown[0]}' is not among the training labels."
        )
    return np.array([number[str(v)] for v in values.tolist()], dtype=np.int64), classes
