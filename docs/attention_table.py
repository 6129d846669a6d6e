"""The table of docs/attention.md: scores of methods, mean and deviation over runs.

    python docs/attention_table.py ViT=out/vit0,out/vit1,out/vit2 Swin=out/swin0,out/swin1,out/swin2

Each folder holds the scores.json that `vision visualize … score=true output=<folder>` wrote; the
runs of a name differ in their seed only.
"""

import json
import statistics
import sys
from pathlib import Path

from vision.inspection.scoring import METRICS

Numbers = dict[str, dict[str, list[float]]]
"""By method and metric, one number for each run."""


def gathered(folders: list[str]) -> tuple[Numbers, int]:
    """The scores of some runs, and the number of pictures."""
    found: Numbers = {}
    pictures = 0
    for folder in folders:
        content = json.loads((Path(folder) / "scores.json").read_text())
        pictures = content["pictures"]
        for methods in content["scores"].values():
            for method, numbers in methods.items():
                for metric, value in numbers.items():
                    found.setdefault(method, {}).setdefault(metric, []).append(value)
    return found, pictures


def cell(values: list[float]) -> str:
    """Mean and, of several, their standard deviation."""
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.1f}"


def table(name: str, folders: list[str]) -> str:
    """Markdown."""
    numbers, pictures = gathered(folders)
    metrics = [metric for metric in METRICS if any(metric in row for row in numbers.values())]
    lines = [
        f"**{name}**, {len(folders)} run(s), {pictures} pictures:",
        "",
        f"| method | {' | '.join(METRICS[metric] for metric in metrics)} |",
        f"|---|{'---|' * len(metrics)}",
    ]
    for method, row in numbers.items():
        cells = (cell(row[metric]) if metric in row else "–" for metric in metrics)
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) < 2 or any("=" not in word for word in sys.argv[1:]):
        sys.exit(__doc__)
    for word in sys.argv[1:]:
        name, _, folders = word.partition("=")
        print(table(name, folders.split(",")), end="\n\n")


if __name__ == "__main__":
    main()
