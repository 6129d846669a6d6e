"""Which settings make a run what it is: its name, and whether it may be resumed with others."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vision.checkpoints.native.checkpoint_folder import run_of

FREE = (
    "name",
    "output",
    "device",
    "parallel",
    "max_batch_per_device",
    "on_existing",
    "allow_changes",
    "loader.workers",
    "loader.prefetch",
    "loader.start_method",
    "loader.memory",
    "flip_test",
    "checkpoint.keep",
    "objective",
    "prune",
    "log",
)
"""Settings that may differ when a run is resumed: they do not change what is learned."""

BEFORE = {
    "task.kind": "classify",
    "loss.focal_gamma": 2.0,
    "loss.class_weights": "none",
    "loss.effective_beta": 0.999,
    "loss.logit_adjustment": 0.0,
    "schedule.scale_ends": False,
    "stop_early": None,
    "elastic": None,
}
"""Settings that runs of earlier versions do not have, with the value that those runs acted by."""

LONGEST = 40
"""Characters of either part of a label."""
_DIGEST = re.compile(r"-[0-9a-f]{6}$")
_ENDINGS = ("_pretrain", "_pretrained", "_checkpoint")
"""Ends of the names of published files that say nothing."""


def auto_folder(
    output: Path,
    settings: Mapping[str, Any],
    chosen: Mapping[str, str],
    swept: Sequence[str] | None = None,
) -> Path:
    """The folder of a run or, with the settings that it varies, of a sweep that has no name of its
    own; that of an earlier version, which knew the choices of model and data alone, if it exists.
    """
    varied = swept or ()
    former = "-".join(chosen[group] for group in ("model", "data") if group not in varied)
    kind = "" if swept is None else "sweep"
    labels = (_label(settings, chosen, varied), former)
    names = ["-".join(filter(None, [kind, label])) for label in labels]
    folders = [output / run_name(settings, name) for name in names]
    return next((folder for folder in folders if folder.exists()), folders[0])


def run_name(settings: Mapping[str, Any], label: str) -> str:
    """`label` and six digits of a digest of all settings that change what is learned."""
    fixed = {k: v for k, v in flat(settings).items() if not is_free(k) and v != BEFORE.get(k, ...)}
    digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
    return f"{label}-{digest[:6]}"


def _label(values: Mapping[str, Any], chosen: Mapping[str, str], without: Sequence[str]) -> str:
    """What a run trains on what, such as `dinov2_vits14-flowers`; parts that depend on a setting in
    `without`, which differs between the runs of a sweep, are left out.
    """
    parts = []
    for group, named in (("model", _model(values, chosen)), ("data", _data(values, chosen))):
        setting, text = named
        if group not in without and setting not in without:
            parts.append(_slug(text))
    return "-".join(filter(None, parts))


def _model(values: Mapping[str, Any], chosen: Mapping[str, str]) -> tuple[str, str]:
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
    path = run_of(path) or path
    stem = path.name if path.is_dir() or path.name == path.stem else path.stem
    stem = _DIGEST.sub("", stem)
    for ending in _ENDINGS:
        stem = stem.removesuffix(ending)
    return stem


def _data(values: Mapping[str, Any], chosen: Mapping[str, str]) -> tuple[str, str]:
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


def is_free(key: str) -> bool:
    """Whether a setting, by its dotted name, may differ when a run is resumed; see FREE."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings that differ and change what is learned, one line each."""
    before, after = BEFORE | flat(old), BEFORE | flat(new)
    keys = sorted(k for k in before.keys() | after.keys() if not is_free(k))
    return [
        f"{key}: {_shown(before, key)} → {_shown(after, key)}"
        for key in keys
        if before.get(key, ...) != after.get(key, ...)
    ]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "(missing)"
