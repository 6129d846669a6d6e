"""The table of docs/finetune.md: what each way to tune gives and costs.

    python docs/finetune_table.py scratch=outputs/scratch-0,outputs/scratch-1 lora=outputs/lora-0,…

The runs of a name differ in their seed only. *top-1* is that of the last evaluation, mean and
standard deviation (n - 1) over runs; *time* is their median. *memory* is counted, not measured: the
most bytes that are alive at once in tensors when the model is made and trained for one step
(weights, activations, gradients, optimiser), at the run's batch.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from counting import PeakMemory

from vision.checkpoints.native.checkpoint_folder import latest
from vision.checkpoints.native.header import read_record
from vision.config import parse
from vision.models.build import build_model
from vision.models.configs import ModelConfig
from vision.training.configs import TrainConfig
from vision.training.optim import build_optimizer
from vision.training.tune import freeze


def record_of(run: Path) -> dict[str, Any]:
    """What the newest checkpoint of a run says."""
    found = latest(run / "checkpoints")
    if not found:
        sys.exit(f"error: {run} has no checkpoint.")
    return read_record(found[0])


def accuracy(run: Path) -> float:
    """Top-1 of the last evaluation, in percent."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    evaluations = [entry for entry in map(json.loads, lines) if entry["split"] == "val"]
    return 100 * float(evaluations[-1]["top1"])


def peak_bytes(record: dict[str, Any]) -> int:
    """Of the model as it is trained, in its first step."""
    config = parse(TrainConfig, record["config"])
    height, width = record["preprocess"]["image_size"]
    images = torch.randn(config.batch_size, record["channels"], height, width)
    labels = torch.arange(config.batch_size) % len(record["classes"])
    with PeakMemory() as memory:
        model = build_model(
            parse(ModelConfig, record["model"]),  # type: ignore[arg-type]
            (height, width),
            channels=record["channels"],
            classes=len(record["classes"]),
        )
        freeze(model, config.tune, config.seed)
        optimizer = build_optimizer(model, config.optimizer, 1e-4)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return memory.peak


def row(name: str, runs: list[Path]) -> str:
    """One line of the table."""
    record = record_of(runs[0])
    values = [accuracy(run) for run in runs]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    seconds = statistics.median(
        json.loads((run / "status.json").read_text())["seconds"] for run in runs
    )
    cells = (
        f"`{name}`",
        f"{record['trained_parameters']:,}",
        f"{statistics.mean(values):.1f}{spread} %",
        f"{seconds:.0f} s",
        f"{peak_bytes(record) / 2**20:.0f} MiB",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    if len(sys.argv) < 2 or any("=" not in word for word in sys.argv[1:]):
        sys.exit(__doc__)
    print(
        "| recipe | trained parameters | top-1 | time | memory |", "|---|---|---|---|---|", sep="\n"
    )
    for word in sys.argv[1:]:
        name, _, folders = word.partition("=")
        print(row(name, [Path(folder) for folder in folders.split(",")]))


if __name__ == "__main__":
    main()
