"""The test sets below a folder, by the names of the folders that they are unpacked to.

Labels are indices of ImageNet's 1,000 classes. References: ReaL, Beyer et al., 2020; V2, Recht et
al., ICML 2019; A, Hendrycks et al., CVPR 2021; R, Hendrycks et al., ICCV 2021; Sketch, Wang et al.,
NeurIPS 2019; C, Hendrycks and Dietterich, ICLR 2019.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vision.config import ConfigError, shorten
from vision.data.sources.folder import FolderSource, list_images, require_folder
from vision.data.sources.packed import PackedStrings
from vision.data.sources.wordnet import imagenet_synsets
from vision.files import read_file

Accepted = tuple[tuple[int, ...], ...]
"""The labels of each image that count as right."""

V2 = {
    "v2_matched_frequency": "ImageNet-V2, matched frequency",
    "v2_threshold": "ImageNet-V2, threshold 0.7",
    "v2_top_images": "ImageNet-V2, top images",
}
TITLES = {
    "val": "ImageNet, validation",
    "real": "ImageNet-ReaL",
    **V2,
    "a": "ImageNet-A",
    "r": "ImageNet-R",
    "sketch": "ImageNet-Sketch",
    "c": "ImageNet-C",
}
"""The sets by their names in family.json."""
FOLDERS = {
    "val": ("val", "imagenet/val", "imagenet-val"),
    "v2_matched_frequency": (
        *("imagenetv2-matched-frequency-format-val", "imagenetv2-matched-frequency"),
    ),
    "v2_threshold": ("imagenetv2-threshold0.7-format-val", "imagenetv2-threshold0.7"),
    "v2_top_images": (
        *("imagenetv2-top-images-format-val", "imagenetv2-top-images", "imagenetv2-topimages"),
    ),
    "a": ("imagenet-a",),
    "r": ("imagenet-r",),
    "sketch": ("sketch", "imagenet-sketch"),
    "c": ("imagenet-c",),
}
"""Folders in which a set is looked for, the one that it is published in first."""
RESTRICTED = ("a", "r")
"""Sets whose authors compare the logits of their own 200 classes only."""
STRUCTURE = """
  val/n01440764/….JPEG                              ImageNet's validation images
  real.json                                         their ReaL labels, beside or in val/
  imagenetv2-matched-frequency-format-val/0/….jpeg  ImageNet-V2, classes 0 to 999; likewise
                                                    imagenetv2-threshold0.7-… and -top-images-…
  imagenet-a/n01498041/….jpg                        ImageNet-A
  imagenet-r/n01443537/….jpg                        ImageNet-R
  sketch/n01440764/….JPEG                           ImageNet-Sketch (or imagenet-sketch/)
  imagenet-c/gaussian_noise/1/n01440764/….JPEG      ImageNet-C, severities 1 to 5 (also in the
                                                    folders noise/, blur/, weather/, digital/)"""
CORRUPTIONS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
"""The corruptions of ImageNet-C with AlexNet's error, the mean of five severities, by which its
authors divide (github.com/hendrycks/robustness; compared with the copies in three other projects).
"""
SEVERITIES = range(1, 6)


@dataclass(frozen=True)
class FamilySet:
    """Images that are evaluated together."""

    name: str
    source: FolderSource
    accepted: Accepted | None = None
    """Right answers of each image, perhaps none; None: the label alone."""
    corruption: str | None = None
    severity: int = 0

    @property
    def classes(self) -> tuple[int, ...] | None:
        """The classes whose logits are compared; None: all 1,000."""
        if self.name not in RESTRICTED:
            return None
        return tuple(np.unique(self.source.labels).tolist())


def find_sets(root: Path) -> tuple[list[FamilySet], list[str]]:
    """The sets below a folder, and the names of those that are not there."""
    require_folder(root)
    found: list[FamilySet] = []
    for name, folders in FOLDERS.items():
        folder = next((root / f for f in folders if (root / f).is_dir()), None)
        if folder is not None:
            found += _corrupted(folder) if name == "c" else [FamilySet(name, _read(folder, name))]
        if name == "val" and found:
            assert folder is not None
            found += _reassessed(found[0].source, (folder.parent, folder, root))
    if not found:
        raise ConfigError(
            f"data.root: none of ImageNet's test sets is in {root}. Expected any of:{STRUCTURE}"
        )
    there = {one.name for one in found}
    return found, [name for name in TITLES if name not in there]


def _read(folder: Path, name: str) -> FolderSource:
    """The images of a set, with labels of ImageNet."""
    synsets = imagenet_synsets()
    known = [str(i) for i in range(len(synsets))] if name in V2 else list(synsets)
    folders, paths, labels, _ = list_images(folder)
    if unknown := sorted(set(folders) - set(known)):
        kind = "numbers 0 to 999" if name in V2 else "synsets of ImageNet such as n01440764"
        raise ConfigError(
            f"data.root: {folder} has folders that are not classes of {TITLES[name]}: "
            f"{shorten(unknown)}. Expected {kind}."
        )
    index = np.array([known.index(f) for f in folders], dtype=np.int64)
    return FolderSource(index[labels], synsets, 3, folder, PackedStrings(paths))


def _reassessed(source: FolderSource, places: Sequence[Path]) -> Iterator[FamilySet]:
    """The validation images with the labels of ReaL: those of real.json, in the order of the names
    of the files; for all 50,000 images also timm's copy.
    """
    names = [Path(source.paths[i]).name for i in range(len(source))]
    file = next((place / "real.json" for place in places if (place / "real.json").is_file()), None)
    if file is None:
        if len(names) != 50_000:
            return
        import timm.data  # slow to load

        library: Any = timm.data
        real = library.RealLabelsImagenet(names).real_labels
        yield FamilySet("real", source, tuple(tuple(real[name]) for name in names))
        return
    try:
        values = json.loads(read_file(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.root: {file} cannot be read: {error}.") from error
    if not _are_labels(values):
        raise ConfigError(
            f"data.root: {file} is not ReaL's: expected a list of labels, 0 to 999, per image."
        )
    if len(values) != len(names):
        raise ConfigError(
            f"data.root: {file} has labels of {len(values)} images, but {source.root} has "
            f"{len(names)}."
        )
    accepted: list[tuple[int, ...]] = [()] * len(names)
    for labels, place in zip(values, np.argsort(names, kind="stable").tolist(), strict=True):
        accepted[place] = tuple(labels)
    yield FamilySet("real", source, tuple(accepted))


def _are_labels(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(labels, list)
        and all(type(label) is int and 0 <= label < 1000 for label in labels)
        for labels in values
    )


def _corrupted(folder: Path) -> Iterator[FamilySet]:
    """Every corruption and severity of ImageNet-C; perhaps in folders of four kinds."""
    for corruption in CORRUPTIONS:
        places = [folder / corruption, *sorted(folder.glob(f"*/{corruption}"))]
        place = next((p for p in places if p.is_dir()), None)
        for severity in SEVERITIES if place is not None else ():
            assert place is not None
            if (images := place / str(severity)).is_dir():
                yield FamilySet("c", _read(images, "c"), None, corruption, severity)
