"""Weights from a place, under this project's names, with everything that is known about them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vision.checkpoints.configs import WhichWeights
from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files import renaming
from vision.checkpoints.files.containers import AVERAGED, unwrap
from vision.checkpoints.files.reading import read_raw
from vision.checkpoints.files.remote import pretrained_config, resolve
from vision.checkpoints.layouts.recognise import Layout, convert_names, recognise
from vision.checkpoints.layouts.rules import Converted
from vision.checkpoints.metadata import Metadata, architecture_of, read_metadata
from vision.checkpoints.native.run_record import LoraRecord, RunRecord, run_record
from vision.checkpoints.native.sizes import check_sizes
from vision.models.lora import merge_tensors

Place = str | Path | Mapping[str, Tensor]
"""A run's folder, a file or folder of any known format, timm:NAME, hf:OWNER/NAME, or tensors."""


BESIDE = {"config", "preprocessor", "open_clip", "arch"}
"""What other projects write beside weights, or with them, about the model and its images."""


_UNNAMED = re.compile(r"model\.name=…(?: \(timm's name[^)]*\))?")
"""The remedy of a refusal that does not know timm's name of the architecture."""


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of one model, and what is written beside them."""

    path: Path
    layout: Layout | None
    """None: only timm itself knows the names of these tensors."""
    tensors: Mapping[str, Tensor]
    """By the names of the layout."""
    converted: Converted
    metadata: Metadata
    record: RunRecord | None = None
    """Of a run of this project."""
    in_memory: bool = False
    """Whether the tensors belong to someone else, who must not see them change."""
    averaged: bool = False
    path_taken: tuple[str, ...] = ()
    left: Mapping[str, int] | None = None
    warnings: tuple[str, ...] = ()
    integrity: str = ""
    """Whether the file could be checked for damage."""


def read_weights(
    place: Place,
    weights: WhichWeights = "auto",
    rename: Sequence[tuple[str, str]] = (),
    setting: str = "checkpoint",
    timm: bool = False,
) -> StoredWeights:
    """Read and recognise weights. The layout is recognised by names, never by that of the file.

    `setting` is the setting that gave the place, for messages. With `timm` names are left to timm.
    """
    if isinstance(place, Mapping):
        return _from_memory(place, rename)
    path = Path(place).expanduser()
    if not path.exists():  # a name on a hub, or nothing
        path = resolve(str(place), setting)
    raw = read_raw(path)
    found = unwrap(raw, weights, rename)
    tensors: Mapping[str, Tensor] = found.tensors
    record = run_record(raw.extra, raw.path) if raw.container == "vision" else None
    if record is not None:
        check_sizes(record, {name: t.shape for name, t in tensors.items()}, raw.path)
        if isinstance(record.tune, LoraRecord):
            tensors = merge_tensors(tensors, record.tune.alpha, record.tune.targets)
    beside = raw.extra
    if str(place).startswith("timm:"):  # timm describes its own weights, where the file does not
        beside = pretrained_config(str(place)) | beside
    inert = f"{', '.join(raw.inert)}: kept as plain data, nothing was executed."
    layout: Layout | None = None
    try:
        if timm and record is None:
            converted = Converted(dict(tensors))
            metadata = read_metadata(beside, described=False)
        else:
            layout = "vision" if record is not None else recognise(tensors)
            converted = convert_names(layout, tensors)
            known = record is None and BESIDE & beside.keys()
            metadata = read_metadata(beside) if known else Metadata("")
    except CheckpointError as error:
        name = architecture_of(beside)
        text = _UNNAMED.sub(f"model.name={name}", str(error)) if name else str(error)
        raise CheckpointError(f"{raw.path}: {text}") from error
    return StoredWeights(
        path=raw.path,
        layout=layout,
        tensors=tensors,
        converted=converted,
        metadata=metadata,
        record=record,
        averaged=any(part in AVERAGED for part in found.path_taken),
        path_taken=found.path_taken,
        left=found.left,
        warnings=(*raw.warnings, *((inert,) if raw.inert else ()), *metadata.notes),
        integrity=raw.integrity,
    )


def _from_memory(tensors: Mapping[str, Tensor], rename: Sequence[tuple[str, str]]) -> StoredWeights:
    if not tensors:
        raise ValueError("expected tensors by name, found an empty mapping.")
    own, changes = renaming.rename(tensors, rename)
    layout = recognise(own)
    return StoredWeights(
        path=Path("tensors in memory"),
        layout=layout,
        tensors=own,
        converted=convert_names(layout, own),
        metadata=Metadata(""),
        in_memory=True,
        path_taken=tuple(changes),
    )
