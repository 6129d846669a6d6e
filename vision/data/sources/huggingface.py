"""Data sets of the Hugging Face hub, or local ones, through the optional `datasets` library."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from vision.config import ConfigError, shorten, suggest
from vision.data.configs import HuggingFaceConfig, Split
from vision.data.sources.source import Labels, Source
from vision.data.sources.subsets import named_splits
from vision.files import read_file

if TYPE_CHECKING:
    import datasets  # type: ignore[import-untyped]


@dataclass(eq=False, repr=False)
class HuggingFaceSource(Source):
    """A `Source` over one split; images stay encoded, in the memory-mapped table."""

    origin: str
    dataset: "datasets.Dataset"
    image_column: str

    def name(self, index: int) -> str:
        """Return the data set's name, the split and the row."""
        return f"{self.origin}[{index}]"

    def read(self, index: int) -> bytes:
        """Return the image as it is stored: in the table, or as a file that the table names."""
        stored = self.dataset[index][self.image_column]
        if stored is None:
            raise OSError(f"{self.name(index)} has no image.")
        if stored["bytes"] is not None:
            return bytes(stored["bytes"])
        return read_file(stored["path"])


def read_classes(config: HuggingFaceConfig) -> tuple[str, ...]:
    """Return the class names; a set that does not name them is read for its labels."""
    library = _library()
    if not _is_saved(config):
        with _explained(config):
            builder = library.load_dataset_builder(**_place(config))
        features = builder.info.features
        if features is not None:
            column = _column("label", config.label_column, features)
            names = _names(features[column])
            if names is not None:
                return tuple(names)
    return read_huggingface(config, "train").classes


def read_huggingface(config: HuggingFaceConfig, split: Split) -> HuggingFaceSource:
    """Read one split."""
    name = named_splits(config)[split]
    dataset = _load(config, split, name)
    image = _column("image", config.image_column, dataset.features)
    labels, classes = _labels(config, dataset, split)
    dataset = dataset.select_columns([image]).cast_column(image, _library().Image(decode=False))
    origin = f"{config.path}:{name}"
    return HuggingFaceSource(labels, classes, config.channels, origin, dataset, image)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "data.kind: huggingface needs the package datasets, which is not installed: pip "
            "install datasets"
        ) from error
    return datasets


@contextmanager
def _explained(config: HuggingFaceConfig) -> Iterator[None]:
    """Explain the library's error for a set that is missing, misspelt or out of reach."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"data.path: '{config.path}' cannot be read: {str(error).rstrip('.')}. Expected the "
            "name of a data set on huggingface.co/datasets, or a local folder (of `save_to_disk`, "
            "Parquet files, or images). Where the hub cannot be reached, copy the data set and "
            "give its folder."
        ) from error


def _is_saved(config: HuggingFaceConfig) -> bool:
    """Whether the path is a folder that `save_to_disk` wrote."""
    folder = Path(config.path)
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def _place(config: HuggingFaceConfig) -> dict[str, Any]:
    """The arguments by which the library finds a data set."""
    names = {"path": config.path, "name": config.configuration, "revision": config.revision}
    return {**names, "cache_dir": config.cache}


def _load(config: HuggingFaceConfig, split: Split, name: str) -> Any:
    library = _library()
    with _explained(config):
        if not _is_saved(config):
            return library.load_dataset(**_place(config), split=name)
        saved = library.load_from_disk(config.path)
    if not isinstance(saved, library.DatasetDict):
        saved = {"train": saved}
    if name not in saved:
        raise ConfigError(
            f"data.{split}: {config.path} has no split '{name}'. {suggest(name, map(str, saved))} "
            "Without validation images, set data.val=null and data.val_fraction=0.1."
        )
    return saved[name]


def _column(what: Literal["image", "label"], wanted: str, features: Any) -> str:
    """Return the column that the config names, or the only one of the right type."""
    kind = _library().Image if what == "image" else _library().ClassLabel
    if wanted != "auto":
        if wanted not in features:
            raise ConfigError(
                f"data.{what}_column: unknown column '{wanted}'. {suggest(wanted, features)}"
            )
        return wanted
    found = [name for name, feature in features.items() if isinstance(_inner(feature), kind)]
    if len(found) != 1:
        raise ConfigError(
            f"data.{what}_column: {len(found)} columns of the data set are possible "
            f"({', '.join(found or features)}); name one."
        )
    return str(found[0])


def _inner(feature: Any) -> Any:
    """Return the type of the elements of a sequence, and any other type itself."""
    return getattr(feature, "feature", feature)


def _names(feature: Any) -> list[str] | None:
    """Return the names of the classes of a column or of a sequence, if it has any."""
    return getattr(_inner(feature), "names", None)


def _labels(
    config: HuggingFaceConfig, dataset: Any, split: Split
) -> tuple[Labels, tuple[str, ...]]:
    """Return the labels as numbers, and the class names."""
    column = _column("label", config.label_column, dataset.features)
    if hasattr(dataset.features[column], "feature"):
        return _sequences(config, dataset, split, column)
    values = np.asarray(dataset.with_format("numpy")[column][:])
    names = getattr(dataset.features[column], "names", None)
    if names is not None:
        if len(values) and values.min() < 0:
            raise ConfigError(
                f"data.{split}: {int((values < 0).sum())} of {len(values)} images in "
                f"{config.path} have no label."
            )
        return values.astype(np.int64), tuple(names)
    # A column of plain numbers or words: the training split defines the classes.
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


def _sequences(
    config: HuggingFaceConfig, dataset: Any, split: Split, column: str
) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    """Return a column of lists of classes; an image without a list has unknown labels."""
    rows = dataset.with_format(None)[column][:]
    names = _names(dataset.features[column])
    if names is not None:
        classes = tuple(names)
        number: dict[Any, int] = {i: i for i in range(len(classes))}
    else:  # plain numbers or words: the training split defines the classes
        if split == "train":
            known = sorted({value for row in rows for value in row or ()})
            classes = tuple(map(str, known))
        else:
            classes = read_huggingface(config, "train").classes
        number = {name: i for i, name in enumerate(classes)}
        rows = [None if row is None else [str(value) for value in row] for row in rows]
    entries = np.zeros((len(rows), len(classes)), dtype=np.int8)
    for entry, row in zip(entries, rows, strict=True):
        if row is None:
            entry[:] = -1
            continue
        unknown = [value for value in row if value not in number]
        if unknown:
            raise ConfigError(
                f"data.{split}: the label '{unknown[0]}' in {config.path} is not among the "
                f"{len(classes)} classes ({shorten(classes)})."
            )
        entry[[number[value] for value in row]] = 1
    return entries, classes
