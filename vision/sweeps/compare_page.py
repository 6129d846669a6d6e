"""A comparison of runs as one self-contained HTML page: history, importance of each setting,
parallel coordinates and the command of the best run.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from vision.config import ConfigError
from vision.evaluation.configs import LOWER_IS_BETTER, SHARES
from vision.inspection.explorer.self_contained import self_contained
from vision.sweeps.compare import Comparison, RunGroup
from vision.sweeps.compare_report import caption, setting_text
from vision.sweeps.configs import Direction
from vision.sweeps.search import REWRITTEN, SUMMARY
from vision.sweeps.search_space import Choices, Interval, Space
from vision.sweeps.search_study import FEWEST, importances
from vision.training.run.run_folder import read_json

WIDE = 50
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
OF_A_SWEEP = ("name=", "output=", "prune=", "hydra.", "hydra/", "search=")
"""Words that the command of a single run is without."""


def comparison_page(comparison: Comparison) -> str:
    """The page of a comparison."""
    borrowed = files("vision.evaluation.report") / "static"
    own = files("vision.sweeps") / "static"
    html, style, script = (
        (own / name).read_text(encoding="utf-8")
        for name in ("compare.html", "compare.css", "compare.js")
    )
    style = (borrowed / "report.css").read_text(encoding="utf-8") + style
    helpers = (borrowed / "draw.js").read_text(encoding="utf-8")
    return self_contained(html, style, [helpers, script], page_data(comparison))


def page_data(comparison: Comparison) -> dict[str, Any]:
    """The numbers of the page."""
    study = _study(comparison)
    numbers = {t["folder"]: t["number"] for t in study.get("trials", ()) if t["same_as"] is None}
    ordered = sorted(comparison.groups, key=lambda group: _order(group, numbers))
    keys = list(comparison.columns)
    axes = [_axis(key, ordered, study) for key in keys]
    direction: Direction = "minimize" if comparison.metric in LOWER_IS_BETTER else "maximize"
    shares, reason = _importances(ordered, axes, direction)
    rows = [_row(group, n, keys, numbers) for n, group in enumerate(ordered)]
    ranked = [g for g in comparison.groups if g.complete and g.mean is not None]
    folders = {run.folder.parent for group in ordered for run in group.runs}
    return {
        "title": str(folders.pop()) if len(folders) == 1 else f"{len(ordered)} rows of runs",
        "study": bool(study),
        "metric": comparison.metric,
        "percent": comparison.metric in SHARES,
        "minimize": direction == "minimize",
        "about": caption(comparison),
        "axes": axes,
        "rows": rows,
        "best": ordered.index(ranked[0]) if ranked else None,
        "front": [ordered.index(g) for g in _front(ordered, numbers, study)],
        "importances": shares,
        "importances_missing": reason,
        "notes": list(comparison.notes),
    }


def _study(comparison: Comparison) -> Mapping[str, Any]:
    """The summary of the search that all runs belong to; empty if there is none."""
    folders = {run.folder.parent for group in comparison.groups for run in group.runs}
    return read_json(folders.pop() / SUMMARY, REWRITTEN) if len(folders) == 1 else {}


def _order(group: RunGroup, numbers: Mapping[str, int]) -> tuple[float, float, str]:
    """By the number of the trial, else by the start of the first run."""
    first = min(numbers.get(run.folder.name, math.inf) for run in group.runs)
    began = min((run.folder / "config.json").stat().st_mtime for run in group.runs)
    return first, began, str(group.runs[0].folder)


def _front(
    groups: Sequence[RunGroup], numbers: Mapping[str, int], study: Mapping[str, Any]
) -> list[RunGroup]:
    """The best trials of a search with several objectives."""
    best = set(study.get("best", ()))
    if len(best) < 2:
        return []
    return [g for g in groups if best & {numbers.get(run.folder.name) for run in g.runs}]


def _row(
    group: RunGroup, position: int, keys: Sequence[str], numbers: Mapping[str, int]
) -> dict[str, Any]:
    known = [numbers[run.folder.name] for run in group.runs if run.folder.name in numbers]
    mean = group.mean if group.mean is not None and math.isfinite(group.mean) else None
    statuses = {run.status for run in group.runs}
    return {
        "number": min(known, default=position),
        "value": mean,
        "std": group.std,
        "n": len(group.values),
        "status": "finished" if group.complete else "/".join(sorted(statuses)),
        "part": min(_part(run.step, run.steps) for run in group.runs),
        "settings": [group.settings.get(key) for key in keys],
        "texts": [setting_text(group, key) for key in keys],
        "folder": str(group.runs[0].folder),
        "command": _command(group.runs[0].folder),
    }


def _part(step: int, steps: int | None) -> float:
    return step / steps if steps else 1.0


def _command(folder: Path) -> str | None:
    """The command that trains like a run, from the words that Hydra stored in its folder."""
    try:
        text = (folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")
    except OSError:
        return None
    words = [word for word in yaml.safe_load(text) or () if not word.startswith(OF_A_SWEEP)]
    return shlex.join(["python", "train.py", *words])


def _axis(key: str, groups: Sequence[RunGroup], study: Mapping[str, Any]) -> dict[str, Any]:
    """A setting as an axis: numeric, perhaps logarithmic, or with one place for each value."""
    values = [group.settings.get(key) for group in groups]
    short = key.rpartition(".")[2]
    name = key if short in ("kind", "name") else short
    numeric = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numeric) < len(values) or len(set(numeric)) < 2:
        texts = sorted({setting_text(group, key) for group in groups})
        return {"key": key, "name": name, "texts": texts}
    low, high = min(numeric), max(numeric)
    params = study.get("settings", {}).get("hydra", {}).get("sweeper", {}).get("params", {})
    log = params[key].get("log", False) if key in params else low > 0 and high / low >= WIDE
    return {"key": key, "name": name, "low": low, "high": high, "log": bool(log)}


def _importances(
    groups: Sequence[RunGroup], axes: Sequence[Mapping[str, Any]], direction: Direction
) -> tuple[list[tuple[str, float]], str]:
    """The importance of each setting, or the reason why there is none."""
    space: Space = {
        axis["key"]: Choices(tuple(axis["texts"]))
        if "texts" in axis
        else Interval(axis["low"], axis["high"], log=axis["log"])
        for axis in axes
    }
    trials = [
        (
            {
                key: setting_text(group, key) if isinstance(d, Choices) else group.settings[key]
                for key, d in space.items()
            },
            group.mean,
        )
        for group in groups
        if group.complete and group.mean is not None and math.isfinite(group.mean)
    ]
    if len(trials) <= FEWEST:
        return [], f"Importances need more than {FEWEST} finished rows; here are {len(trials)}."
    try:
        shares = importances(trials, space, direction)
    except ConfigError:
        return [], "Importances need Optuna: pip install 'vit-swin[search]'."
    return list(shares.items()), "" if shares else "All results are equal."
