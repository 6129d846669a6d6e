"""Comparison of runs: those that differ only in their seed are a group, with mean and std."""

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vision.config import ConfigError, shorten, suggest
from vision.evaluation.configs import LOWER_IS_BETTER
from vision.sweeps.configs import CompareConfig
from vision.sweeps.outcome import Result, Select, Split, evaluations, find_runs, read_result
from vision.training.run.run_folder import BY_CLASS, Run

FEW = 4
"""Up to this number, all settings of a part (model, optimizer, …) that differ are shown."""
ABSENT = "–"
"""Stands for a setting that a run does not have, because its model is of another kind."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed."""

    runs: Sequence[Result]

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings that the runs have in common."""
        return self.runs[0].settings

    @property
    def complete(self) -> bool:
        """Whether there are finished runs, to which the numbers then refer."""
        return any(run.finished for run in self.runs)

    @cached_property
    def counted(self) -> list[Result]:
        """The finished runs; without any, those that have been evaluated."""
        with_value = [run for run in self.runs if run.value is not None]
        return [run for run in with_value if run.finished or not self.complete]

    @property
    def values(self) -> list[float]:
        """Values of the metric in the runs that are counted."""
        return [run.value for run in self.counted if run.value is not None]

    @property
    def mean(self) -> float | None:
        """Mean of the metric over the runs that are counted."""
        return statistics.fmean(self.values) if self.values else None

    def mean_of(self, metric: str) -> float | None:
        """Mean of another number of the same evaluations; None if one of them does not have it."""
        found = [run.numbers[metric] for run in self.counted if metric in run.numbers]
        return statistics.fmean(found) if found and len(found) == len(self.counted) else None

    @property
    def std(self) -> float | None:
        """Standard deviation of the sample (divided by n − 1); None for a single run."""
        if len(self.values) < 2 or not all(map(math.isfinite, self.values)):
            return None
        return statistics.stdev(self.values)

    @property
    def seconds(self) -> float | None:
        """Mean duration of the runs that are counted."""
        known = [run.seconds for run in self.counted if run.seconds is not None]
        return statistics.fmean(known) if known else None

    @property
    def parameters(self) -> int | None:
        """Number of parameters of the model."""
        return next((run.parameters for run in self.runs if run.parameters is not None), None)


@dataclass(frozen=True)
class Comparison:
    """Groups from best to worst, with notes."""

    metric: str
    split: Split
    select: Select
    groups: Sequence[RunGroup]
    differing: Sequence[str]
    """All settings that differ between groups."""
    columns: Mapping[str, Sequence[str]]
    """The same, each with the settings that it decides, which need no column of their own."""
    notes: Sequence[str]

    def by_class(self) -> list[str]:
        """Means over classes that differ from the accuracy that is compared."""
        if self.metric != "top1":
            return []
        return [
            name
            for name in BY_CLASS
            if any(
                (mean := group.mean_of(name)) is not None and f"{mean:.4f}" != f"{group.mean:.4f}"
                for group in self.groups
                if group.mean is not None
            )
        ]

    def best(self) -> list[RunGroup]:
        """The groups with the best mean among those with finished runs; several if equal."""
        ranked = [g for g in self.groups if g.complete and g.mean is not None]
        if len(ranked) < 2:
            return []
        return [g for g in ranked if g.mean == ranked[0].mean]


def compare(runs: Iterable[Path], metric: str, split: Split, select: Select) -> Comparison:
    """Group runs by the settings that change what is learned, and rank them by a metric."""
    results, metrics = [], set[str]()
    for folder in runs:
        run = Run(folder)
        events = evaluations(run)
        metrics |= {key for event in events for key in event} - {"step", "split"}
        results.append(read_result(run, events, metric, split, select))
    if all(result.value is None for result in results):
        raise ConfigError(_no_values(results, metrics, metric, split))
    by_settings: dict[str, list[Result]] = {}
    for result in results:
        key = json.dumps(result.settings, sort_keys=True)
        by_settings.setdefault(key, []).append(result)
    groups = [RunGroup(sorted(g, key=lambda run: run.seed)) for g in by_settings.values()]
    groups.sort(key=lambda group: _rank(metric, group))
    differing = _differing(groups)
    columns = _columns(groups, differing)
    notes = _notes(groups, columns)
    return Comparison(metric, split, select, groups, differing, columns, notes)


def _rank(metric: str, group: RunGroup) -> tuple[bool, bool, float]:
    """Finished before unfinished, measured before unmeasured, then by the mean."""
    mean = group.mean
    if mean is None or math.isnan(mean):
        return (not group.complete, True, 0.0)
    return (not group.complete, False, mean if metric in LOWER_IS_BETTER else -mean)


def _no_values(results: Sequence[Result], metrics: set[str], metric: str, split: Split) -> str:
    folders = shorten([str(result.folder) for result in results], 3)
    if not metrics:
        return f"runs: none of them has been evaluated yet: {folders}."
    if metric not in metrics:
        return f"metric: no run has '{metric}'. {suggest(metric, metrics)}"
    return f"split: no run has evaluations of '{split}'; runs with an average (ema) have val_ema."


def _differing(groups: Sequence[RunGroup]) -> list[str]:
    """Settings that differ between groups, in the order of the config."""
    keys = dict.fromkeys(key for group in groups for key in group.settings)
    return [key for key in keys if len({_value(group, key) for group in groups}) > 1]


def _value(group: RunGroup, key: str) -> str:
    return json.dumps(group.settings[key]) if key in group.settings else ABSENT


def _columns(groups: Sequence[RunGroup], differing: Sequence[str]) -> dict[str, list[str]]:
    """One column per setting. Where many of one part differ, a setting shares the column of the one
    that decides it; the kind or name of the part comes first.
    """
    columns: dict[str, list[str]] = {}
    for part in dict.fromkeys(key.partition(".")[0] for key in differing):
        keys = [key for key in differing if key.partition(".")[0] == part]
        if len(keys) <= FEW:
            columns |= {key: [] for key in keys}
            continue
        kept: dict[str, list[str]] = {}
        for key in sorted(keys, key=lambda key: key not in (f"{part}.kind", f"{part}.name")):
            decider = next((k for k in kept if _decides(groups, k, key)), None)
            if decider is None:
                kept[key] = []
            else:
                kept[decider].append(key)
        columns |= kept
    return columns


def _decides(groups: Sequence[RunGroup], key: str, other: str) -> bool:
    """Whether groups with the same value of `key` have the same value of `other`."""
    pairs = {(_value(group, key), _value(group, other)) for group in groups}
    return len(pairs) == len({value for value, _ in pairs})


def _notes(groups: Sequence[RunGroup], columns: Mapping[str, Sequence[str]]) -> list[str]:
    notes = [
        f"{key} stands for {len(others)} more settings that differ with it: {', '.join(others)}"
        for key, others in columns.items()
        if others
    ]
    for group in groups:
        for run in group.runs:
            if not run.finished:
                of = "" if run.steps is None else f" of {run.steps}"
                counted = "counted (*)" if run in group.counted else "not counted"
                where = f"{run.folder} ({run.status}, step {run.step}{of})"
                notes.append(f"not finished, {counted}: {where}")
            elif run.value is None:
                notes.append(f"without this number, not counted: {run.folder}")
        for seed, number in Counter(run.seed for run in group.counted).items():
            if number > 1:
                same = ", ".join(str(run.folder) for run in group.counted if run.seed == seed)
                notes.append(f"the same settings and the same seed {seed}, each counted: {same}")
    return notes


def report_comparison(config: CompareConfig) -> None:
    """Print a comparison, or write it to a file."""
    from vision.sweeps.compare_page import comparison_page
    from vision.sweeps.compare_report import csv_text, json_text, latex_text, table_text

    runs, without = find_runs(config.runs)
    for place in without:
        print(f"note: no run was found in {place}.", file=sys.stderr)
    comparison = compare(runs, config.metric, config.split, config.select)
    if config.format == "table":
        text = table_text(comparison, to_file=config.output is not None)
    else:
        texts = {"csv": csv_text, "latex": latex_text, "json": json_text, "html": comparison_page}
        text = texts[config.format](comparison)
    if config.output is None:
        print(text, end="")
        return
    config.output.parent.mkdir(parents=True, exist_ok=True)
    config.output.write_text(text, encoding="utf-8")
    print(f"{len(comparison.groups)} rows are in {config.output}.")
