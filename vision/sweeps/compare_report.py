"""A comparison of runs as text: a table for the terminal, CSV, LaTeX or JSON."""

import csv
import json
import re
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from vision.sweeps.compare import ABSENT, Comparison, Group
from vision.terminal import elapsed, plain

SHARES = ("top1", "top5", "balanced_accuracy", "macro_f1")
"""Metrics between 0 and 1, shown as percentages."""
PLAIN_WIDTH = 240


def table_text(comparison: Comparison, to_file: bool = False) -> str:
    """For people; in a file without colours and with lines as long as they need to be."""
    console = Console(highlight=False)
    if to_file or not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH, no_color=True, force_terminal=False)
    headers, rows = _cells(comparison)
    table = Table()
    for header in headers:
        table.add_column(plain(header))
    best = comparison.best()
    for group, row in zip(comparison.groups, rows, strict=True):
        style = "bold" if group in best else "" if group.complete else "dim"
        table.add_row(*map(plain, row), style=style)
    with console.capture() as captured:
        console.print(table)
        console.print(plain(_caption(comparison)), soft_wrap=True)
        for note in comparison.notes:
            console.print(plain(f"· {note}"), soft_wrap=True)
    return captured.get()


def csv_text(comparison: Comparison) -> str:
    """For programs: a line per group, every setting that differs, numbers with all digits."""
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    metric = comparison.metric
    numbers = [f"{metric}_mean", f"{metric}_std", "n", "seconds_mean", "parameters"]
    writer.writerow([*comparison.differing, *numbers, "finished", "unfinished", "runs"])
    for group in comparison.groups:
        writer.writerow(
            [
                *(_setting(group, key) for key in comparison.differing),
                *(_exact(x) for x in (group.mean, group.std, len(group.values))),
                *(_exact(x) for x in (group.seconds, group.parameters)),
                sum(run.finished for run in group.runs),
                sum(not run.finished for run in group.runs),
                " ".join(str(run.folder) for run in group.runs),
            ]
        )
    return file.getvalue()


def json_text(comparison: Comparison) -> str:
    """For programs: everything, with the runs of each group."""
    groups = [
        {
            "settings": {key: group.settings.get(key) for key in comparison.differing},
            "mean": group.mean,
            "std": group.std,
            "n": len(group.values),
            "seconds": group.seconds,
            "parameters": group.parameters,
            "runs": [
                {
                    "folder": str(run.folder),
                    "seed": run.seed,
                    "status": run.status,
                    "step": run.step,
                    "steps": run.steps,
                    "value": run.value,
                    "seconds": run.seconds,
                    "counted": run in group.counted,
                }
                for run in group.runs
            ],
        }
        for group in comparison.groups
    ]
    answer = {
        "metric": comparison.metric,
        "split": comparison.split,
        "select": comparison.select,
        "groups": groups,
        "notes": list(comparison.notes),
    }
    return json.dumps(answer, indent=1) + "\n"


def latex_text(comparison: Comparison) -> str:
    """For a paper: a tabular with the rules of the package booktabs."""
    headers, rows = _cells(comparison)
    best = comparison.best()
    settings = len(comparison.columns)
    lines = [f"% {line}" for line in (_caption(comparison), *comparison.notes)]
    lines += [
        rf"\begin{{tabular}}{{{'l' * settings}{'r' * (len(headers) - settings)}}}",
        r"\toprule",
        " & ".join(map(_latex, headers)) + r" \\",
        r"\midrule",
    ]
    for group, row in zip(comparison.groups, rows, strict=True):
        cells = [_latex(cell) for cell in row]
        if group in best:
            cells[settings] = rf"\textbf{{{cells[settings]}}}"
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table for people."""
    keys = [column.key for column in comparison.columns]
    unit = " (%)" if comparison.metric in SHARES else ""
    headers = [*map(_short(keys), keys), f"{comparison.metric}{unit}", "n", "time", "parameters"]
    rows = [
        [
            *(_setting(group, key) for key in keys),
            _value(comparison.metric, group),
            _number(group),
            ABSENT if group.seconds is None else elapsed(group.seconds),
            ABSENT if group.parameters is None else f"{group.parameters:,}",
        ]
        for group in comparison.groups
    ]
    return headers, rows


def _short(keys: list[str]) -> Any:
    """A function that drops what a setting is part of, unless two would then be the same."""
    ends = [key.rpartition(".")[2] for key in keys]

    def short(key: str) -> str:
        end = key.rpartition(".")[2]
        return key if ends.count(end) > 1 or end in ("kind", "name") else end

    return short


def _value(metric: str, group: Group) -> str:
    if group.mean is None:
        return ABSENT
    scale, digits = (100, 2) if metric in SHARES else (1, 4)
    text = f"{scale * group.mean:.{digits}f}"
    if group.std is not None:
        text += f" ± {scale * group.std:.{digits}f}"
    return text if group.complete else f"{text}*"


def _number(group: Group) -> str:
    """How many runs are counted, and how many are not."""
    others = len(group.runs) - len(group.values)
    return f"{len(group.values)}" + (f" (+{others})" if others else "")


def _setting(group: Group, key: str) -> str:
    if key not in group.settings:
        return ABSENT
    value = group.settings[key]
    return value if isinstance(value, str) else json.dumps(value)


def _exact(number: float | None) -> str:
    return "" if number is None else repr(number)


def _caption(comparison: Comparison) -> str:
    which = {
        "best": "at the evaluation of best.safetensors",
        "last": "at the last evaluation",
    }[comparison.select]
    weights = {
        "auto": "validation images (averaged weights where there are some)",
        "val": "validation images, weights as trained",
        "val_ema": "validation images, averaged weights",
    }[comparison.split]
    deviation = "mean ± standard deviation over seeds"
    return f"{comparison.metric} on {weights}, {which}; {deviation}; time is the mean of a run's."


def _latex(text: str) -> str:
    text = re.sub(r"([&%$#_{}])", r"\\\1", text.replace("\\", r"\textbackslash "))
    return (
        text.replace("±", r"$\pm$").replace("–", "--").replace("^", r"\^{}").replace("~", r"\~{}")
    )
