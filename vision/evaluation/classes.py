"""Whether the classes of some data are those of a model, and which is which."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vision.config import ConfigError, suggest
from vision.data.sources.folder import shorten


def match_classes(
    model: tuple[str, ...], data: tuple[str, ...], checkpoint: str
) -> tuple[NDArray[np.int64], str | None]:
    """For every class of the data its number in the model, by name; and a note if they differ.

    The data may have its classes in another order, or only some of them. A class that the model
    does not know is an error.
    """
    if model == data:
        return np.arange(len(model)), None
    known = set(model)
    unknown = [name for name in data if name not in known]
    if unknown:
        raise ConfigError(
            f"{len(unknown)} of the {len(data)} classes of the data are unknown to the model of "
            f"{checkpoint}: {shorten(unknown)}. {_near(unknown, model)}It was trained for "
            f"{len(model)}: {shorten(model)}. Classes are matched by their names; "
            "class_names=names.txt gives the model's classes other ones, a line each."
        )
    for names, whose in ((data, "the data"), (model, f"the model of {checkpoint}")):
        times = Counter(names)
        twice = sorted(name for name in set(data) if times[name] > 1)
        if twice:
            raise ConfigError(
                f"{whose} has several classes of the name {shorten(twice)}, so that classes cannot "
                "be matched by their names."
            )
    number = {name: i for i, name in enumerate(model)}
    mapping = np.array([number[name] for name in data], dtype=np.int64)
    if len(data) < len(model):
        return mapping, (
            f"The data has {len(data)} of the {len(model)} classes of the model; an answer outside "
            "of them counts as wrong."
        )
    return mapping, "The data has the classes in another order; they were matched by their names."


def _near(unknown: Sequence[str], known: Sequence[str]) -> str:
    """What the first unknown class may be called in the model, if anything is near."""
    hint = suggest(unknown[0], known)
    return f"({unknown[0]}: {hint}) " if hint.startswith("Did you") else ""
