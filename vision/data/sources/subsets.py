"""The images of a split or a subset: seeded, class by class, with groups kept together."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vision.config import ConfigError
from vision.data.configs import HuggingFaceConfig, ShardsConfig, Split
from vision.data.sources.source import Labels, class_sizes

Indices = NDArray[np.int64]

UNEQUAL = 5
"""Ratio of the largest class to the smallest above which users are warned."""
CHOICES = (
    "data.sampling=balanced draws them equally often, loss.class_weights=balanced weighs them, "
    "loss.logit_adjustment=1 shifts their logits (docs/finetune.md)"
)
"""What can be done about unequal classes."""

# Keys of the random draws: different uses of one seed must not draw the same permutation.
_SUBSET_KEY, _SPLIT_KEY, _GROUP_KEY = 1, 2, 3


def named_splits(config: ShardsConfig | HuggingFaceConfig) -> dict[Split, str]:
    """Return the name or pattern that the config gives to each split that it has."""
    names: dict[Split, str | None] = {"train": config.train, "val": config.val, "test": config.test}
    return {split: name for split, name in names.items() if name is not None}


def nested_subset(
    labels: Labels, fraction: float, samples_per_class: int | None, seed: int
) -> Indices:
    """Return ascending indices of a share of each class, at most `samples_per_class` of each.

    For one seed, a smaller fraction or number gives a subset of what a larger one gives. Every
    class that has images keeps at least one. Images with any number of classes are drawn at random.
    """
    if fraction == 1 and samples_per_class is None:
        return np.arange(len(labels))
    if labels.ndim == 2:
        if samples_per_class is not None:
            raise ConfigError(
                f"data.samples_per_class = {samples_per_class}: images with several labels cannot "
                "be counted class by class; use data.train_fraction, such as 0.1, and null here."
            )
        order = np.random.default_rng([seed, _SUBSET_KEY]).permutation(len(labels))
        return np.sort(order[: max(1, round(fraction * len(labels)))])
    chosen = []
    for label, indices in enumerate(_by_class(labels)):
        if len(indices) == 0:
            continue
        number = max(1, round(fraction * len(indices)))
        if samples_per_class is not None:
            number = min(number, samples_per_class)
        order = np.random.default_rng([seed, _SUBSET_KEY, label]).permutation(len(indices))
        chosen.append(indices[order[:number]])
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, dtype=np.int64)


def split_by_fraction(
    labels: Labels,
    fractions: Mapping[str, float],
    seed: int,
    groups: NDArray[np.int64] | None = None,
) -> dict[str, Indices]:
    """Return ascending indices of each named part and, as "train", of the rest, class by class.

    A class of two images or more has at least one in the first part and one in "train". With
    groups (a number per image) no group is in two parts, and the shares are as near as whole
    groups allow. So are those of images with any number of classes.
    """
    parts = list(fractions)
    assert "train" not in parts
    assert sum(fractions.values()) < 1
    if groups is None and labels.ndim == 1:
        assignment = _assign_images(labels, list(fractions.values()), seed)
    else:
        kept = np.arange(len(labels)) if groups is None else groups
        assignment = _assign_groups(labels, list(fractions.values()), seed, kept)
    result = {part: np.flatnonzero(assignment == i) for i, part in enumerate(parts)}
    result["train"] = np.flatnonzero(assignment == len(parts))
    for part, indices in result.items():
        if len(indices) == 0:
            within = "" if groups is None else f" in {len(np.unique(groups))} groups"
            raise ValueError(
                f"{len(labels)} images{within} cannot be split: none is left for {part}. Change "
                "the fractions, or split the images yourself."
            )
    return result


def imbalance(labels: Labels, classes: tuple[str, ...], chosen: Sequence[str] = ()) -> str | None:
    """Return a warning if classes are empty or more unequal than 5 : 1, otherwise None. It names
    what can be done, or the settings that were `chosen` for that.
    """
    counts = class_sizes(labels, len(classes))
    if len(labels) == 0:
        return None
    smallest, largest = int(counts.argmin()), int(counts.argmax())
    if counts[smallest] == 0:
        empty = int((counts == 0).sum())
        return (
            f"{empty} of {len(classes)} classes have no images, '{classes[smallest]}' among them."
        )
    ratio = counts[largest] / counts[smallest]
    if ratio <= UNEQUAL:
        return None
    choices = CHOICES if labels.ndim == 1 else "task.pos_weight=balanced weighs them"
    remedy = f"this run has {' and '.join(chosen)}" if chosen else choices
    return (
        f"classes are unequal, {ratio:.0f} : 1 ('{classes[largest]}' has {counts[largest]} "
        f"images, '{classes[smallest]}' {counts[smallest]}); {remedy}."
    )


def _by_class(labels: Labels) -> list[Indices]:
    """Return the ascending indices of every class, in one pass over the labels."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    return np.split(order, np.cumsum(counts)[:-1]) if len(labels) else []


def _assign_images(labels: Labels, shares: list[float], seed: int) -> NDArray[np.int8]:
    """Return the part of each image: 0, 1, … for the shares, then the rest."""
    assignment = np.full(len(labels), len(shares), dtype=np.int8)
    for label, indices in enumerate(_by_class(labels)):
        order = np.random.default_rng([seed, _SPLIT_KEY, label]).permutation(len(indices))
        taken = 0
        for part, share in enumerate(shares):
            # At least one image if the class can spare it; the rest is never empty.
            number = min(max(round(share * len(indices)), 1), max(len(indices) - 1 - taken, 0))
            assignment[indices[order[taken : taken + number]]] = part
            taken += number
    return assignment


def _assign_groups(
    labels: Labels, shares: list[float], seed: int, groups: NDArray[np.int64]
) -> NDArray[np.int8]:
    """Assign whole groups, large ones first, each to the part that lacks it most."""
    if labels.ndim == 2:  # having any label or none is one more class, which all images have
        labels = np.c_[labels == 1, np.ones(len(labels), dtype=bool)]
        totals = labels.sum(axis=0, dtype=np.float64)
    else:
        totals = np.bincount(labels).astype(np.float64)
    targets = np.outer([*shares, 1 - sum(shares)], totals)  # (part, class)
    have = np.zeros_like(targets)
    assignment = np.empty(len(labels), dtype=np.int8)
    members = _by_class(np.unique(groups, return_inverse=True)[1].astype(np.int64))
    order = np.random.default_rng([seed, _GROUP_KEY]).permutation(len(members))
    for group in sorted(order, key=lambda g: -len(members[g])):
        classes, counts = _counted(labels[members[group]])
        missing = targets[:, classes] - have[:, classes]
        # Growth of the squared distance from the target, relative to it as in χ².
        growth = ((missing - counts) ** 2 - missing**2) / targets[:, classes]
        part = int(growth.sum(axis=1).argmin())
        have[part, classes] += counts
        assignment[members[group]] = part
    return assignment


def _counted(labels: Labels) -> tuple[Indices, Indices]:
    """Return the classes that occur, and the number of images of each."""
    if labels.ndim == 1:
        return np.unique(labels, return_counts=True)
    counts = labels.sum(axis=0, dtype=np.int64)
    classes = np.flatnonzero(counts)
    return classes, counts[classes]
