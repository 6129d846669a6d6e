"""A comparison of runs as text: a table for the terminal, CSV, LaTeX or JSON."""

import csv
import json
from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

from vision.evaluation.configs import SHARES
from vision.files import spreadsheet_cell
from vision.sweeps.compare import ABSENT, Comparison, RunGroup
from vision.terminal import elapsed, plain

RUN_FIELDS = ("seed", "status", "step", "steps", "value", "seconds")
"""Fields of a result that JSON has for every run."""
PLAIN_WIDTH = 240
MOST = 6
"""Most columns of settings in a table for reading."""
MATTERS = (
    "model.kind", "model.name", "init", "tune.kind", "data.kind", "data.root", "data.image_size",
    "duration", "batch_size", "optimizer.name", "optimizer.learning_rate",
)  # fmt: skip
"""Settings that are shown first where many differ."""
_LATEX = str.maketrans(
    {"\\": r"\textbackslash ", "±": r"$\pm$", "–": "--", "^": r"\^{}", "~": r"\~{}"}
    | {character: f"\\{character}" for character in "&%$#_{}"}
)


def table_text(comparison: Comparison, to_file: bool = False) -> str:
    """A table for the terminal; for a file without colours and with lines of any length."""
    console = Console(highlight=False)
    if to_file or not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH, no_color=True, force_terminal=False)
    keys = _that_matter(comparison)
    headers, rows = _cells(comparison, keys)
    table = Table()
    for header in headers:
        table.add_column(plain(header), overflow="fold")
    best = comparison.best()
    for group, row in zip(comparison.groups, rows, strict=True):
        style = "bold" if group in best else "" if group.complete else "dim"
        table.add_row(*map(plain, row), style=style)
    with console.capture() as captured:
        console.print(table)
        console.print(plain(caption(comparison)), soft_wrap=True)
        if others := [key for key in comparison.columns if key not in keys]:
            text = f"{len(others)} more settings differ: {', '.join(others)} (format=csv has all)"
            console.print(plain(f"· {text}"), soft_wrap=True)
        for note in comparison.notes:
            console.print(plain(f"· {note}"), soft_wrap=True)
    return captured.get()


def csv_text(comparison: Comparison) -> str:
    """CSV: a line per group, every setting that differs, numbers with all digits."""
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    metric = comparison.metric
    by_class = comparison.by_class()
    means = [f"{name}_mean" for name in by_class]
    numbers = [f"{metric}_mean", f"{metric}_std", *means, "n", "seconds_mean", "parameters"]
    writer.writerow([*comparison.differing, *numbers, "finished", "unfinished", "runs"])
    for group in comparison.groups:
        cells = [
            *(setting_text(group, key) for key in comparison.differing),
            *(group.mean, group.std, *map(group.mean_of, by_class)),
            *(len(group.values), group.seconds, group.parameters),
            sum(run.finished for run in group.runs),
            sum(not run.finished for run in group.runs),
            " ".join(str(run.folder) for run in group.runs),
        ]
        writer.writerow(map(spreadsheet_cell, cells))
    return file.getvalue()


def json_text(comparison: Comparison) -> str:
    """JSON: everything, with the runs of each group."""
    groups = [
        {
            "settings": {key: group.settings.get(key) for key in comparison.differing},
            "mean": group.mean,
            "std": group.std,
            **{name: group.mean_of(name) for name in comparison.by_class()},
            "n": len(group.values),
            "seconds": group.seconds,
            "parameters": group.parameters,
            "runs": [
                {
                    "folder": str(run.folder),
                    **{name: getattr(run, name) for name in RUN_FIELDS},
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
    """A LaTeX tabular with the rules of the package booktabs."""
    headers, rows = _cells(comparison, list(comparison.columns))
    best = comparison.best()
    settings = 1 + len(comparison.columns)
    lines = [f"% {line}" for line in (caption(comparison), *comparison.notes)]
    lines += [
        rf"\begin{{tabular}}{{{'l' * settings}{'r' * (len(headers) - settings)}}}",
        r"\toprule",
        " & ".join(header.translate(_LATEX) for header in headers) + r" \\",
        r"\midrule",
    ]
    for group, row in zip(comparison.groups, rows, strict=True):
        cells = [cell.translate(_LATEX) for cell in row]
        if group in best:
            cells[settings] = rf"\textbf{{{cells[settings]}}}"
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _that_matter(comparison: Comparison) -> list[str]:
    """The columns of a table for reading: all, if they are few, else those that matter most."""
    keys = list(comparison.columns)
    if len(keys) <= MOST:
        return keys
    ranked = [key for name in MATTERS for key in keys if key == name]
    chosen = [*ranked, *(key for key in keys if key not in ranked)][:MOST]
    return [key for key in keys if key in chosen]


def _cells(comparison: Comparison, keys: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table with these settings."""
    unit = " (%)" if comparison.metric in SHARES else ""
    ends = [key.rpartition(".")[2] for key in keys]
    titles = [
        key if ends.count(end) > 1 or end in ("kind", "name") else end
        for key, end in zip(keys, ends, strict=True)
    ]
    by_class = comparison.by_class()
    numbers = [f"{name}{unit}" for name in (comparison.metric, *by_class)]
    headers = ["run", *titles, *numbers, "n", "time", "parameters"]
    rows = [
        [
            group.runs[0].folder.name + (" …" if len(group.runs) > 1 else ""),
            *(setting_text(group, key) for key in keys),
            _value(comparison.metric, group),
            *(_percent(group.mean_of(name)) for name in by_class),
            _number(group),
            ABSENT if group.seconds is None else elapsed(group.seconds),
            ABSENT if group.parameters is None else f"{group.parameters:,}",
        ]
        for group in comparison.groups
    ]
    return headers, rows


def _value(metric: str, group: RunGroup) -> str:
    if group.mean is None:
        return ABSENT
    scale, digits = (100, 2) if metric in SHARES else (1, 4)
    text = f"{scale * group.mean:.{digits}f}"
    if group.std is not None:
        text += f" ± {scale * group.std:.{digits}f}"
    return text if group.complete else f"{text}*"


def _percent(mean: float | None) -> str:
    return ABSENT if mean is None else f"{100 * mean:.2f}"


def _number(group: RunGroup) -> str:
    """The number of runs that are counted, and of those that are not."""
    others = len(group.runs) - len(group.values)
    return f"{len(group.values)}" + (f" (+{others})" if others else "")


def setting_text(group: RunGroup, key: str) -> str:
    """The value of a setting in a group, as text."""
    if key not in group.settings:
        return ABSENT
    value = group.settings[key]
    return value if isinstance(value, str) else json.dumps(value)


def caption(comparison: Comparison) -> str:
    """A sentence on what the numbers are."""
    best = comparison.select == "best"
    evaluation = "the evaluation of best.safetensors" if best else "the last evaluation"
    weights = {"auto": "averaged where available", "val": "raw", "val_ema": "averaged"}
    return (
        f"{comparison.metric} on validation images (weights: {weights[comparison.split]}), at "
        f"{evaluation}; mean ± standard deviation over seeds; time is the mean duration of a run."
    )
