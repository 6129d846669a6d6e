"""Which settings make a run what it is: its name, and whether it may be resumed with others."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

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


def run_name(settings: Mapping[str, Any], label: str) -> str:
    """`label` and six digits of a digest of all settings that change what is learned."""
    fixed = {k: v for k, v in flat(settings).items() if not is_free(k) and v != BEFORE.get(k, ...)}
    digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
    return f"{label}-{digest[:6]}"


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
