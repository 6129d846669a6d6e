"""Weights from a file, a folder, a name on a hub or memory, under this project's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from vision.checkpoints.containers import unwrap
from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.formats.recognise import Layout, convert_names, recognise
from vision.checkpoints.formats.rules import Converted
from vision.checkpoints.metadata import Metadata, read_metadata
from vision.checkpoints.reading import read_raw
from vision.checkpoints.remote import pretrained_config, resolve
from vision.models.lora import merge_tensors

WhichWeights = Literal["auto", "raw", "ema"]
AnySource = str | Path | Mapping[str, Tensor]


@dataclass(frozen=True)
class Source:
    """Weights with everything that is known of them."""

    name: str
    layout: Layout
    tensors: Mapping[str, Tensor]
    """By the names of the layout."""
    converted: Converted
    metadata: Metadata
    in_memory: bool
    """Whether the tensors belong to someone else, who must not see them change."""
    path_taken: tuple[str, ...] = ()
    left: Mapping[str, int] | None = None
    warnings: tuple[str, ...] = ()


def _beside(source: str | Path, extra: dict[str, Any]) -> dict[str, Any]:
    """What a file says of itself, and where it has nothing, what timm says of its own weights."""
    config = pretrained_config(source) if isinstance(source, str) else {}
    return {"config": config} | extra if config else extra


def open_source(source: AnySource, weights: WhichWeights = "auto") -> Source:
    """Read and recognise weights. The layout is told by names, never by that of the file."""
    if isinstance(source, Mapping):
        if not source:
            raise ValueError("expected tensors by name, found an empty mapping.")
        layout = recognise(source)
        metadata = read_metadata({}, layout, ours=False)
        return Source(
            "tensors in memory", layout, source, convert_names(layout, source), metadata, True
        )
    place = resolve(source) if isinstance(source, str) else source
    raw = read_raw(place)
    found = unwrap(raw, weights)
    ours = raw.container == "vision"
    tensors = _without_additions(found.tensors, raw.extra) if ours else found.tensors
    try:
        layout = "vision" if ours else recognise(tensors)
        converted = convert_names(layout, tensors)
        metadata = read_metadata(_beside(source, raw.extra), layout, ours)
    except CheckpointError as error:
        raise CheckpointError(f"{raw.path}: {error}") from error
    inert = f"{', '.join(raw.inert)}: kept as plain data, nothing was executed."
    return Source(
        name=str(raw.path),
        layout=layout,
        tensors=tensors,
        converted=converted,
        metadata=metadata,
        in_memory=False,
        path_taken=found.path_taken,
        left=found.left,
        warnings=(*raw.warnings, *((inert,) if raw.inert else ()), *metadata.notes),
    )


def _without_additions(
    tensors: Mapping[str, Tensor], record: Mapping[str, Any]
) -> Mapping[str, Tensor]:
    """The weights of a run of this project, LoRA's additions merged into them."""
    tune = record["config"].get("tune", {"kind": "all"})
    if tune["kind"] != "lora":
        return tensors
    return merge_tensors(tensors, tune["alpha"], tune["targets"])
