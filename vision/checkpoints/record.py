"""What a checkpoint holds beside tensors: a plain record, as JSON can say it, in a numbered format.

Floats keep every bit. Not-a-number and infinity are kept too, in the notation of Python's json
module: a metric that is not a number must not keep a run from being saved.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vision import __version__
from vision.checkpoints.errors import CheckpointError, NewerFormatError

Record = dict[str, Any]

FORMAT = 2
"""Number of the format that is written. Raise it with every change of a record that this version
or the one before could not read, and add an upgrade from the number before.
"""


def _add_vit_variants(record: Record) -> Record:
    """1 → 2: a ViT may have a distillation token and another MLP, which none had before."""
    model = record["config"]["model"]
    if model["kind"] == "vit":
        model = {**model, "distillation_token": False, "mlp": "gelu"}
    return {**record, "config": {**record["config"], "model": model}}


UPGRADES: dict[int, Callable[[Record], Record]] = {1: _add_vit_variants}
"""From format n to format n + 1, for every n below FORMAT."""


def stamp(record: Mapping[str, Any]) -> Record:
    """The record with the number of its format and the version that writes it."""
    if record.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"The record is of format {record['format']}; only format {FORMAT} is written. "
            f"Upgrade it first."
        )
    return {**record, "format": FORMAT, "version": __version__}


def upgrade(record: Record, place: str = "The record") -> Record:
    """The record in today's format; `place` names it in an error."""
    number = record.get("format")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise CheckpointError(f"{place} has no valid format number, but {number!r}.")
    if number > FORMAT:
        raise NewerFormatError(
            f"{place} is of format {number}, written by version {record.get('version')} of this "
            f"project; the installed version {__version__} reads formats up to {FORMAT}. "
            f"Install version {record.get('version')} or a later one."
        )
    for older in range(number, FORMAT):
        record = {**UPGRADES[older](record), "format": older + 1}
    return record


def check_record(value: Any, place: str = "record") -> None:
    """Raise a TypeError if a value would not come back from JSON as it was."""
    match value:
        case None | bool() | int() | float() | str():
            return
        case dict():
            for key, inner in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"{place}: the key {key!r} is not a string.")
                check_record(inner, f"{place}.{key}")
        case list():
            for index, inner in enumerate(value):
                check_record(inner, f"{place}[{index}]")
        case _:
            raise TypeError(
                f"{place}: a {type(value).__name__} cannot be stored in a checkpoint's record; "
                f"give a dict, list, str, int, float, bool or None."
            )
