"""Files of a run for its readers, beside numbers and checkpoints.

metrics.csv        the numbers of metrics.jsonl as a table
curves.png         loss, accuracy and learning rate
environment.json   command, commit, versions and device of every start
README.md          the result and commands to continue with
"""

import csv
import io
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import vision
from vision.files import replacing, write_all, write_text
from vision.terminal import elapsed
from vision.training.run.run_folder import Run, writing

if TYPE_CHECKING:
    from vision.training.job import TrainingJob
    from vision.training.run.distributed import World

_PANELS = {"loss": ("loss",), "accuracy": ("top1",), "learning rate": ("learning_rate",)}
"""Panels of the curves, with the numbers in each; those that a task does not have are left out."""
_COLORS = {"train": "#888888", "val": "#1f77b4", "val_ema": "#d95f02"}
_PACKAGES = ("torchvision", "timm", "numpy", "hydra-core")


def write_csv(run: Run) -> None:
    """Replace `metrics.csv`: a row per event, a column per number."""
    events = run.events()
    columns = list(dict.fromkeys(name for event in events for name in event))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(events)
    file = run.folder / "metrics.csv"
    with writing(file):
        write_text(file, text.getvalue())


def draw_curves(run: Run) -> None:
    """Replace `curves.png`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    events = run.events()
    panels = {
        title: names
        for title, names in _PANELS.items()
        if any(name in event for event in events for name in names)
    }
    figure = Figure(figsize=(4 * len(panels), 3), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, names) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name in names:
            for split in dict.fromkeys(event["split"] for event in events):
                points = [(e["step"], e[name]) for e in events if e["split"] == split and name in e]
                if points:
                    mark = "." if len(points) < 30 and split != "train" else None
                    color = _COLORS.get(split)
                    axes.plot(*zip(*points, strict=True), label=split, color=color, marker=mark)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if title != "learning rate":
            axes.legend()
        if title == "accuracy":
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    file = run.folder / "curves.png"
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    with writing(file), replacing(file) as target:
        write_all(target, drawn.getvalue())


def write_environment(run: Run, world: "World") -> None:
    """Add this start of the run to `environment.json`."""
    device = world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    this: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": _commit(),
        "versions": {
            "vision": vision.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{package: version(package) for package in _PACKAGES},
        },
        "device": f"{device.type} {name}".strip(),
        "processes": world.size,
        "machine": platform.node(),
        "system": platform.platform(),
    }
    before = run.read("environment.json").get("starts", [])
    run.write("environment.json", {"starts": [*before, this]})


def _commit() -> str | None:
    """The commit of the checkout that this package is in, with a + after changes."""
    git = ["git", "-C", str(Path(vision.__file__).parent)]
    try:
        commit, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=5, check=True)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def write_readme(job: "TrainingJob", best: str, commands: Mapping[str, str]) -> None:
    """The result of a finished run, its parts, and commands to continue with."""
    state, data = job.state, job.data
    lines = [
        f"# {job.run.folder.name}",
        "",
        f"Best {job.config.checkpoint.best}: **{best}** at step {state.best_step} of "
        f"{job.schedule.total}, after {elapsed(state.seconds)}.",
        "",
        f"- model: {job.start.config.kind}, {job.record['parameters']:,} parameters"
        + (f", from {job.config.init}" if job.config.init else ""),
        f"- data: {job.config.data.kind}, {len(data.train):,} + {len(data.val):,} images, "
        f"{len(data.train.classes)} classes",
        f"- preprocess: {data.preprocess}",
    ]
    if job.config.log.curves:
        lines += ["", "![loss, accuracy and learning rate](curves.png)"]
    lines += ["", "Next:", ""]
    lines += [f"    {command}  # {purpose}" for command, purpose in commands.items()]
    file = job.run.folder / "README.md"
    with writing(file):
        write_text(file, "\n".join(lines) + "\n")
