"""The tables of docs/attention.md: the methods, and their scores, mean and deviation over runs.

    python docs/attention_table.py methods
    python docs/attention_table.py ViT=out/vit0,out/vit1,out/vit2 Swin=out/swin0,out/swin1,out/swin2

Each folder holds the scores.json that `vision visualize … score=true output=<folder>` wrote; the
runs of a name differ in their seed only. ± is the standard deviation over runs (n - 1).
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from vision.inspection.methods.spec import METHODS
from vision.inspection.trust.scoring import METRICS

Numbers = dict[str, dict[str, list[float]]]
"""By method and metric, one number for each run."""
SAME = ("images", "steps", "seed")
"""Settings that the runs of a table must share."""


def methods_table() -> str:
    """Markdown: every method as its spec describes it."""
    lines = [
        "| method | title | formula | needs | options | reference |",
        "|---|---|---|---|---|---|",
    ]
    for name, spec in METHODS.items():
        needs = {
            "gradients": spec.gradients,
            "linear head on the mean": spec.mean_pool,
            "query": spec.query,
        }
        options = [
            f"`{key}` {str(o.default).lower()} ({o.expects})" for key, o in spec.options.items()
        ]
        cells = [
            f"`{name}`",
            spec.title,
            spec.formula,
            ", ".join(need for need, wanted in needs.items() if wanted) or "–",
            "; ".join(options) or "–",
            spec.reference,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def read(folder: str) -> dict[str, Any]:
    """The scores of one run."""
    path = Path(folder) / "scores.json"
    if not path.is_file():
        sys.exit(f"error: {path} does not exist: vision visualize … score=true output={folder}")
    content: dict[str, Any] = json.loads(path.read_text())
    if len(content["scores"]) != 1:
        sys.exit(f"error: {path} has scores of {len(content['scores'])} models; one is expected.")
    return content


def gathered(folders: list[str]) -> tuple[Numbers, int]:
    """The scores of some runs, and the number of images."""
    contents = [read(folder) for folder in folders]
    for key in SAME:
        values = [content[key] for content in contents]
        if len(set(values)) > 1:
            sys.exit(f"error: {', '.join(folders)}: {key} differ: {values}.")
    found: Numbers = {}
    for content in contents:
        (methods,) = content["scores"].values()
        for method, numbers in methods.items():
            for metric, value in numbers.items():
                found.setdefault(method, {}).setdefault(metric, []).append(value)
    for method, row in found.items():
        for metric, values in row.items():
            if len(values) != len(folders):
                sys.exit(f"error: only {len(values)} of {folders} have {metric} of {method}.")
    return found, contents[0]["images"]


def cell(values: list[float]) -> str:
    """Mean and, of several values, their standard deviation."""
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.1f}"


def table(name: str, folders: list[str]) -> str:
    """Markdown."""
    numbers, images = gathered(folders)
    metrics = [metric for metric in METRICS if any(metric in row for row in numbers.values())]
    runs = "1 run" if len(folders) == 1 else f"{len(folders)} runs, mean ± standard deviation"
    lines = [
        f"**{name}**, {runs}, {images} images:",
        "",
        f"| method | {' | '.join(METRICS[metric] for metric in metrics)} |",
        f"|---|{'---|' * len(metrics)}",
    ]
    for method, row in numbers.items():
        cells = (cell(row[metric]) if metric in row else "–" for metric in metrics)
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:] == ["methods"]:
        print(methods_table())
        return
    if len(sys.argv) < 2 or any("=" not in word for word in sys.argv[1:]):
        sys.exit(__doc__)
    for word in sys.argv[1:]:
        name, _, folders = word.partition("=")
        listed = folders.split(",")
        if len(set(listed)) != len(listed):
            sys.exit(f"error: {name}: a folder is named twice.")
        print(table(name, listed), end="\n\n")


if __name__ == "__main__":
    main()
