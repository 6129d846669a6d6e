"""The result of an evaluation as tables for a terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vision.evaluation.all_metrics import Measured
from vision.evaluation.bootstrap import LOWER_IS_BETTER
from vision.evaluation.report.eval_report import ModelReport, Report
from vision.terminal import plain

SHOWN = 5
"""Rows of the worst classes and of the most confused pairs."""

ROWS = {
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro-F1",
    "loss": "loss (= NLL)",
    "brier": "Brier score",
    "ece": "calibration error (ECE)",
}
"""Metrics in the order and with the names of tables."""


def tables(report: Report) -> Group:
    """The numbers of all models; their differences; what each is worst at; notes."""
    several = len(report.models) > 1
    parts: list[Text | Table] = [] if several else [plain(_about(report.models[0]), "italic")]
    parts.append(_summary(report))
    if several and report.models[1].differences:
        parts.append(_comparison(report))
    parts += [table for model in report.models for table in _details(model, report.classes)]
    notes = [*report.notes, *(f"written: {_from_here(file)}" for file in report.files)]
    return Group(*parts, *map(plain, notes))


def _about(model: ModelReport) -> str:
    step = f"step {model.step:,}, " if model.step else ""  # weights of other projects tell none
    return f"{model.checkpoint} ({step}{model.weights} weights)"


def _from_here(file: Path) -> str:
    """As one would type it: below the present folder without what leads there."""
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _summary(report: Report) -> Table:
    several = len(report.models) > 1
    first = report.models[0]
    table = Table()
    table.add_column(plain(f"{report.data}, {report.split}: {report.images:,} images"))
    for model in report.models:
        table.add_column(plain(model.name) if several else "value", justify="right")
    for key, label in ROWS.items():
        table.add_row(label, *(_with_interval(model.measured, key) for model in report.models))
    if report.k:
        numbers = [m.neighbours for m in report.models]
        table.add_row(f"{report.k}-NN accuracy", *(f"{number:.4f}" for number in numbers))
    scaled = [model.measured.scaled for model in report.models]
    if all(scaled):
        cells = [
            f"T = {s.temperature:.3f}: {s.before.ece:.4f} → {s.after.ece:.4f}" for s in scaled if s
        ]
        table.add_row("ECE after temperature scaling", *cells)
    table.add_section()
    table.add_row("parameters", *(f"{model.cost.parameters:,}" for model in report.models))
    table.add_row("MACs", *(_macs(model.cost.macs) for model in report.models))
    table.add_row("images/s, model alone", *(_rate(m.speed.model) for m in report.models))
    table.add_row("images/s, with loading", *(_rate(m.speed.total) for m in report.models))
    captions = []
    if first.measured.intervals:
        captions.append("[ ]: 95 % confidence, bootstrap over images")
    if report.skipped:
        captions.append(f"{len(report.skipped)} images could not be read and are not counted.")
    table.caption = plain("\n".join(captions), "table.caption") if captions else None
    return table


def _with_interval(measured: Measured, key: str) -> Text:
    value = f"{measured.metrics[key]:.4f}"
    if key not in measured.intervals:
        return plain(value)
    low, high = measured.intervals[key]
    return plain(f"{value} [{low:.4f}, {high:.4f}]")


def _comparison(report: Report) -> Table:
    baseline, *others = report.models
    table = _titled(f"Difference from {baseline.name}")
    for title in ("model", "metric", "difference", "95 % confidence", "better in", ""):
        table.add_column(title, justify="left" if title in ("model", "metric", "") else "right")
    for model in others:
        for key, found in (model.differences or {}).items():
            better = (found.value < 0) == (key in LOWER_IS_BETTER)
            verdict = ("better" if better else "worse") if found.decided else "undecided"
            table.add_row(
                plain(model.name),
                ROWS[key],
                f"{found.value:+.4f}",
                f"{found.low:+.4f} to {found.high:+.4f}",
                f"{found.better:.1%} of draws",
                verdict,
            )
        table.add_section()
    return table


def _details(model: ModelReport, names: Sequence[str]) -> list[Table]:
    """The classes that are recognised worst, and what is confused most."""
    known = [
        (row.recall, name, row)
        for name, row in zip(names, model.measured.classes, strict=True)
        if row.recall is not None
    ]
    worst = _titled(f"{model.name}: worst classes")
    for title in ("class", "images", "recall", "precision", "F1"):
        worst.add_column(title, justify="left" if title == "class" else "right")
    for _, name, row in sorted(known, key=lambda entry: entry[0])[:SHOWN]:
        shares = [_share(row.recall), _share(row.precision), _share(row.f1)]
        worst.add_row(plain(name), f"{row.images:,}", *shares)
    pairs = _titled(f"{model.name}: most confused")
    for title in ("is", "was taken for", "images"):
        pairs.add_column(title, justify="right" if title == "images" else "left")
    for actual, predicted, count in model.measured.pairs[:SHOWN]:
        pairs.add_row(plain(names[actual]), plain(names[predicted]), f"{count:,}")
    return [worst, pairs] if model.measured.pairs else [worst]


def _titled(title: str) -> Table:
    return Table(title=plain(title, "table.title"), title_justify="left")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _macs(value: int) -> str:
    return f"{value / 1e9:.2f} G" if value >= 1e8 else f"{value / 1e6:.2f} M"
