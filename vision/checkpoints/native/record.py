"""The record of a checkpoint: everything beside its tensors, as JSON in a numbered format.

Floats keep every bit. Not-a-number and infinity are kept too, in the notation of Python's json
module: a metric that is not a number must not keep a run from being saved.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vision import __version__
from vision.checkpoints.errors import CheckpointError, NewerFormatError

Record = dict[str, Any]

FORMAT = 3
"""Number of the format that is written. Raise it with every change of a record that this version
or the one before could not read, and add an upgrade from the number before.
"""


def _add_vit_variants(record: Record) -> Record:
    """1 → 2: a ViT may have a distillation token and another MLP, which none had before."""
    model = record["config"]["model"]
    if model["kind"] == "vit":
        model = {**model, "distillation_token": False, "mlp": "gelu"}
    return {**record, "config": {**record["config"], "model": model}}


VIT_CHOICES = {
    "stem": "patch",
    "head_width": None,
    "rotary": "axial",
    "rotary_grid": None,
    "rotary_jitter": [0.0, 1.0, 1.0],
    "relative_bias": "none",
    "embedding_norm": False,
    "block_norm": "before",
    "qkv_bias": "qkv",
    "attention_norm": False,
    "mlp_norm": False,
    "pool_heads": None,
    "pool_mlp_ratio": None,
    "representation": None,
    "projection": None,
}
"""Settings of a ViT that format 3 added, with the values that every ViT had before."""


def _add_vit_choices(model: Record) -> Record:
    """The published variations of ViT are settings of their own."""
    if model["kind"] != "vit":
        return model
    gated = model["mlp"] == "swiglu"
    activated = {"mlp": "gated", "activation": "silu"} if gated else {"mlp": "plain"}
    return {"activation": "gelu", **VIT_CHOICES, **model, **activated}


def _add_swin_padding(model: Record) -> Record:
    """A Swin may let padding take part in attention; before, padding was always masked."""
    return model | {"padding": "mask"} if model["kind"] in ("swin", "swin_v2") else model


_MODEL_CHANGES_OF_3 = (_add_vit_choices, _add_swin_padding)


def _add_model_choices(record: Record) -> Record:
    """2 → 3: settings of models that were fixed before."""
    for change in _MODEL_CHANGES_OF_3:
        record = _with_model(record, change)
    return record


def _with_model(record: Record, change: Callable[[Record], Record]) -> Record:
    """The record with its model changed wherever it is written."""
    model = change(record["config"]["model"])
    record = {**record, "config": {**record["config"], "model": model}}
    return record | {"model": change(record["model"])} if "model" in record else record


UPGRADES: dict[int, Callable[[Record], Record]] = {1: _add_vit_variants, 2: _add_model_choices}
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
        raise CheckpointError(f"{place} has no valid format number, but {number!r:.100}.")
    if number > FORMAT:
        version = f"{record.get('version')!s:.40}"
        raise NewerFormatError(
            f"{place} is of format {number!s:.40}, written by version {version} of this project; "
            f"the installed version {__version__} reads formats up to {FORMAT}. Install version "
            f"{version} or a later one."
        )
    for older in range(number, FORMAT):
        try:
            record = {**UPGRADES[older](record), "format": older + 1}
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{place} is of format {older}, but its record lacks what every record of that "
                f"format has ({error!r:.200}). Use an older checkpoint of the run, or a copy of it."
            ) from error
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
