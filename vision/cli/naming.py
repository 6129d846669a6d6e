"""The name of a run that has none of its own: its weights or model, and its data."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vision.cli.commands import Choices

LONGEST = 40
"""Characters of either part."""
_DIGEST = re.compile(r"-[0-9a-f]{6}$")
_ENDINGS = ("_pretrain", "_pretrained", "_checkpoint")
"""Ends of the names of published files that say nothing."""


def run_label(values: Mapping[str, Any], chosen: Choices, without: Sequence[str] = ()) -> str:
    """What a run trains on what, such as `dinov2_vits14-flowers`; parts that depend on a setting in
    `without`, which differs between the runs of a sweep, are left out.
    """
    parts = []
    for group, named in (("model", _model(values, chosen)), ("data", _data(values, chosen))):
        setting, text = named
        if group not in without and setting not in without:
            parts.append(_slug(text))
    return "-".join(filter(None, parts))


def _model(values: Mapping[str, Any], chosen: Choices) -> tuple[str, str]:
    """The setting that names the model, and its name."""
    match chosen["model"]:
        case "auto" if values.get("init"):
            return "init", _weights(str(values["init"]))
        case "timm":
            return "model.name", str(values["model"]["name"])
        case choice:
            return "model", choice


def _weights(place: str) -> str:
    """The name of weights: of a run without its digest, of a file without its suffix."""
    kind, colon, name = place.partition(":")
    if colon and kind == "timm":
        return name.partition(".")[0]
    if colon and kind == "hf":
        return name.rpartition("/")[2]
    path = Path(place).expanduser()
    path = path.resolve() if path.exists() else path
    if path.parent.name == "checkpoints":  # a file of a run
        path = path.parent.parent
    stem = path.name if path.is_dir() or path.name == path.stem else path.stem
    stem = _DIGEST.sub("", stem)
    for ending in _ENDINGS:
        stem = stem.removesuffix(ending)
    return stem


def _data(values: Mapping[str, Any], chosen: Choices) -> tuple[str, str]:
    """The setting that names the data, and its name."""
    choice = chosen["data"]
    setting = {
        "folder": "root",
        "webdataset": "root",
        "huggingface": "path",
        "torchvision": "name",
        "python": "label",
    }.get(choice)
    value = str(values["data"].get(setting, "???")) if setting else "???"
    if value == "???":
        return "data", choice
    if setting not in ("name", "label"):
        value = Path(value).expanduser().resolve().name if setting == "root" else Path(value).name
    return f"data.{setting}", value or choice


def _slug(text: str) -> str:
    """The text with characters that every file system takes."""
    return re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII).strip("._-")[:LONGEST]
