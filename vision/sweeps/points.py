"""Names of the folders of a sweep's runs, after the settings that have several values."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONGEST_NAME = 150
"""Characters in a folder's name; file systems allow 255 bytes."""


def point_folder(sweep: Path, swept: Mapping[str, Any]) -> str:
    """Name of the folder of a point within the sweep's; that of an earlier version if it exists."""
    former = point_name(swept, between=",", equals="=")
    return former if (sweep / former).is_dir() else point_name(swept)


def point_name(swept: Mapping[str, Any], between: str = "__", equals: str = "-") -> str:
    """`optimizer.learning_rate-0.001__seed-0`: the same for the same values in any order and
    notation, and different for different values. A value with characters that are awkward in a
    file name gets a digest.
    """
    pairs = [
        f"{key.replace('/', '.')}{equals}{_shown(swept[key], between)}" for key in sorted(swept)
    ]
    name = between.join(pairs) or "run"
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 7]}-{_digest(name)}"


def _shown(value: Any, between: str) -> str:
    text = json.dumps(value, separators=(",", ":"))
    if isinstance(value, str):
        try:
            json.loads(value)  # the text "3" must not be taken for the number 3
        except ValueError:
            text = value
    if re.fullmatch(r"[\w.+-]+", text, flags=re.ASCII) and between not in text:
        return text
    plain = re.sub(r"[^\w.+-]+|__+", "-", text, flags=re.ASCII).strip("-")
    return "-".join(filter(None, [plain, _digest(text)]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
