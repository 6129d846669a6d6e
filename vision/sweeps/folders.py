"""Folders of a sweep: outputs/<sweep>/<setting-value+…>/ is an ordinary run.

A sweep has no state of its own: the same command finds the same folders, skips the runs that are
finished and resumes the others.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vision.config import ConfigError
from vision.training.run.run_folder import Run, run_name

LONGEST_NAME = 150
"""Characters in a folder's name; file systems allow 255 bytes."""


def sweep_folder(
    output: str | Path,
    name: str,
    swept: Mapping[str, Any],
    base: Mapping[str, Any],
    base_choices: Mapping[str, str],
) -> Path:
    """The folder of a sweep over the settings `swept`.

    With `name=auto` the name follows from the settings with one value (`base`) and the choices of
    their groups, so that further values of a swept setting join the same sweep.
    """
    if "name" in swept:
        raise ConfigError("name: the name is the sweep's; give it one value.")
    if name == "auto":
        parts = [base_choices[group] for group in ("model", "data") if group not in swept]
        name = run_name(base, "-".join(["sweep", *parts]))
    folder = Path(output) / name
    if Run(folder).status():
        raise ConfigError(f"name: {folder} is a single run; choose another name.")
    return folder


def run_folders(sweep: Path, points: Sequence[Mapping[str, Any]]) -> list[Path]:
    """The folder of the run at every point of a sweep, given as the swept settings with the values
    there; refused if two of them are the same.

    A run that an older version made, in a folder named `seed=0,…`, is found there.
    """
    folders = []
    for swept in points:
        older = sweep / _joined(swept, "=", ",")
        folders.append(older if Run(older).status() else sweep / sweep_run_name(swept))
    twice = [str(folder) for folder, n in Counter(folders).items() if n > 1]
    if twice:
        raise ConfigError(f"two runs of the sweep are the same: {', '.join(twice)}.")
    return folders


def sweep_run_name(swept: Mapping[str, Any]) -> str:
    """`optimizer.learning_rate-0.001+seed-0`: the same for the same values in any order and
    notation, and different for different values. Every character may be typed as it is in a shell
    and in an override of Hydra; a value with others gets a digest.
    """
    return _joined(swept, "-", "+")


def _joined(swept: Mapping[str, Any], equals: str, comma: str) -> str:
    keys = sorted(swept)
    name = comma.join(f"{k.replace('/', '.')}{equals}{_shown(swept[k], comma)}" for k in keys)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 7]}-{_digest(name)}"


def _shown(value: Any, comma: str) -> str:
    text = json.dumps(value, separators=(",", ":"))
    if isinstance(value, str):
        try:
            json.loads(value)  # the text "3" must not be taken for the number 3
        except ValueError:
            text = value
    if comma not in text and re.fullmatch(r"[\w.+-]+", text, flags=re.ASCII):
        return text
    plain = re.sub(r"[^\w.-]+" if comma == "+" else r"[^\w.+-]+", "-", text, flags=re.ASCII)
    return "-".join(filter(None, [plain.strip("-"), _digest(text)]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
