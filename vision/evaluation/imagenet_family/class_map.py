"""From a model's classes to ImageNet's 1,000, by their synsets (WordNet)."""

from collections.abc import Sequence
from typing import Any

import timm.data
import torch
from torch import Tensor

from vision.config import ConfigError, shorten
from vision.data.sources.wordnet import imagenet_synsets, readable_names

UNKNOWN = -1
_TIMM: Any = timm.data  # without types


def imagenet_columns(
    classes: int, names: Sequence[str] | None, checkpoint: str
) -> tuple[Tensor, list[str]]:
    """The logit of each of ImageNet's 1,000 classes, −1 for a class that the model does not have;
    and notes for readers.

    Classes with names are matched by synset or by readable name; without, the number of classes
    says which set they are of: ImageNet-1k, or the 12k, 21k and 22k that timm knows.
    """
    synsets, notes = imagenet_synsets(), []
    subset = _TIMM.infer_imagenet_subset({"num_classes": classes})
    if names is not None:
        readable = dict(zip(readable_names(synsets), synsets, strict=True))
        own = [name if name in set(synsets) else readable.get(name, "") for name in names]
    else:
        own = []
    if not any(own):
        if subset is None:
            listed = f": {shorten(tuple(names))}" if names else ""
            raise ConfigError(
                f"data=imagenet_family: the {classes} classes of {checkpoint} are not ImageNet's"
                f"{listed}. Give their names with class_names=names.txt: synsets such as "
                "n01440764, one per line in the order of the logits."
            )
        own = list(_TIMM.ImageNetInfo(subset).label_names())
        words = "in the usual order" if classes == len(synsets) else "mapped to 1,000 by synset"
        notes.append(f"{classes:,} classes: assumed to be those of {subset}, {words}")
    place = {synset: column for column, synset in enumerate(own) if synset}
    columns = torch.tensor([place.get(synset, UNKNOWN) for synset in synsets])
    if missing := [s for s, column in zip(synsets, columns.tolist(), strict=True) if column < 0]:
        named = shorten(tuple(f"{s} {n}" for s, n in _named(missing)))
        notes.append(
            f"{len(missing)} of the 1,000 classes are unknown to the model, and its "
            f"answers for their images count as wrong: {named}"
        )
    return columns, notes


def _named(synsets: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(synsets, readable_names(tuple(synsets)), strict=True))


def imagenet_logits(
    logits: Tensor, columns: Tensor, classes: Sequence[int] | None = None
) -> Tensor:
    """Logits (n, classes of the model) → (n, 1000); −∞ for classes that the model does not have or
    that are not among `classes`.
    """
    found = logits[:, columns.clamp(min=0)]
    left_out = columns < 0
    if classes is not None:
        allowed = torch.zeros_like(left_out)
        allowed[list(classes)] = True
        left_out |= ~allowed
    return found.masked_fill(left_out, -torch.inf)
