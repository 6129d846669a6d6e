"""What a run says to its readers: its parts and likely mistakes before the first step, and files
beside numbers and checkpoints.

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
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import vision
from vision.checkpoints.open import OpenedModel
from vision.data.preprocess import NAMES
from vision.data.sources.folder import ignored_line
from vision.data.sources.subsets import imbalance
from vision.terminal import elapsed
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import Run
from vision.training.tasks.configs import MultiLabelConfig

if TYPE_CHECKING:
    from vision.training.job import TrainingJob
    from vision.training.run.distributed import World

_PANELS = {"loss": ("loss",), "accuracy": ("top1",), "learning rate": ("learning_rate",)}
"""Panels of the curves, with the numbers in each; those that a task does not have are left out."""
_COLORS = {"train": "#888888", "val": "#1f77b4", "val_ema": "#d95f02"}
LARGE, SMALLER = 384, 224
"""Sides of images: above the first, the cost of a size that the weights decide is said."""
_PACKAGES = ("torchvision", "timm", "numpy", "hydra-core")


def summary(job: "TrainingJob") -> dict[str, str]:
    """The parts of a run, by name."""
    config, world, schedule = job.config, job.world, job.schedule
    trained, parameters = job.record["trained_parameters"], job.record["parameters"]
    part = "" if trained == parameters else f", {trained:,} of them trained ({config.tune.kind})"
    origin = f", from {config.init}" if config.init else ""
    train, val = job.data.train, job.data.val
    height, width = job.data.preprocess.image_size
    classes = f"{len(train.classes)} classes" if train.classes else "without labels"
    scaling = ""
    if config.optimizer.reference_batch is not None:
        scaling = (
            f" ({config.optimizer.learning_rate:g} × {config.batch_size} / "
            f"{config.optimizer.reference_batch})"
        )
    rest = ""
    if (rate := config.optimizer.rest_learning_rate) is not None:
        rest = f", {schedule.peak * rate / config.optimizer.learning_rate:g} for the rest"
    return {
        "model": f"{job.start.config.kind}, {parameters:,} parameters{part}{origin}",
        "data": f"{config.data.kind}, {len(train):,} + {len(val):,} images of "
        f"{height} × {width}, {classes}",
        "preprocess": str(job.data.preprocess),
        "batch": f"{config.batch_size} = {job.micro_batch} per device × {world.size} device"
        f"{'s' if world.size > 1 else ''} × {job.order.accumulation} "
        f"{'virtual ranks' if job.order.virtual else 'accumulated'}",
        "learning rate": f"{schedule.peak:g}{scaling}, {config.optimizer.name}{rest}",
        "length": f"{schedule.total:,} steps of {schedule.steps_per_epoch:,} per epoch",
        "precision": f"{config.precision} on {world.device.type}",
        "memory": job.start.memory.line(job.micro_batch),
        "run": f"{job.run.folder}" + (f", from step {job.state.step}" if job.state.step else ""),
    }


def size_line(opened: OpenedModel, chosen: bool) -> list[str]:
    """A line of the report where the weights were trained on images of another size, or where their
    size is `chosen` for the run and large.
    """
    if opened.trained_size == opened.image_size:
        height, width = opened.image_size
        if not chosen or max(height, width) <= LARGE:
            return []
        more = height * width / SMALLER**2
        return [
            f"size      {height} × {width} as the weights were trained: {more:.1f} × the pixels of "
            f"{SMALLER} × {SMALLER}, and about as much time and memory; data.image_size={SMALLER} "
            "is the smaller choice"
        ]
    sizes = (opened.trained_size, opened.image_size)
    before, after = (f"{height} × {width}" for height, width in sizes)
    return [f"size      trained on {before} pixels; this run has {after} (data.image_size)"]


def warnings(job: "TrainingJob") -> Iterator[str]:
    """What is likely to be a mistake in the settings or the data."""
    if job.config.precision == "fp16" and job.world.device.type == "cpu":
        yield "precision=fp16 on a CPU is slow and less exact than bf16 or fp32."
    if tight := job.start.memory.warning(job.micro_batch):
        yield tight
    yield from left_out(job)
    chosen = _against_imbalance(job.config)
    if unequal := imbalance(job.data.train.labels, job.data.train.classes, chosen):
        yield unequal
    for name in NAMES:
        trained = next((values[name] for _, values in job.start.known if name in values), None)
        given, used = getattr(job.config.preprocess, name), getattr(job.data.preprocess, name)
        if given != "auto" and trained is not None and not _same(used, trained):
            yield (
                f"preprocess.{name} = {_listed(given)}, but the weights were trained with "
                f"{_listed(trained)}; preprocess.{name}=auto takes theirs."
            )


def _against_imbalance(config: TrainConfig) -> list[str]:
    """The settings of a run that treat classes of different sizes differently."""
    loss, weights, task = config.loss, config.loss.class_weights, config.task
    positive = task.pos_weight if isinstance(task, MultiLabelConfig) else "none"
    return [
        *(["data.sampling=balanced"] if config.data.sampling == "balanced" else []),
        *([f"loss.class_weights={_listed(weights)}"] if weights != "none" else []),
        *([f"loss.logit_adjustment={loss.logit_adjustment:g}"] if loss.logit_adjustment else []),
        *(["loss.kind=focal"] if loss.kind == "focal" else []),
        *([f"task.pos_weight={_listed(positive)}"] if positive != "none" else []),
    ]


def left_out(job: "TrainingJob") -> Iterator[str]:
    """Files of the data that are not images, and images that could not be read."""
    if ignored := job.run.read("ignored.json"):
        yield ignored_line(ignored)
    if skipped := job.run.unreadable():
        images = f"{skipped:,} image{'' if skipped == 1 else 's'}"
        yield f"{images} could not be read and left out; see {job.run.folder}/skipped-*.jsonl."


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple):
        return len(first) == len(second) and np.allclose(first, second, rtol=0, atol=1e-4)
    return bool(first == second)


def _listed(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(f'{number:g}' for number in value)}]"
    return str(value)


def write_csv(run: Run) -> None:
    """Replace `metrics.csv`: a row per event, a column per number."""
    events = run.events()
    columns = list(dict.fromkeys(name for event in events for name in event))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(events)
    run.write_text("metrics.csv", text.getvalue())


def draw_curves(run: Run) -> None:
    """Replace `curves.png`."""
    from matplotlib.figure import Figure

    events = run.events()
    panels = {
        title: names
        for title, names in _PANELS.items()
        if any(name in event for event in events for name in names)
    }
    figure = Figure(figsize=(4 * len(panels), 3), layout="constrained")
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
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    run.write_bytes("curves.png", drawn.getvalue())


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


def next_commands(job: "TrainingJob") -> dict[str, str]:
    """Commands to continue with after a run, each with its purpose."""
    folder = job.run.folder
    data = " data=folder data.root=…" if job.config.data.kind == "python" else ""
    commands = {
        f"python eval.py checkpoint={folder}{data}": "evaluate its best checkpoint",
        f"vision predict checkpoint={folder} images=photos/": "classify your own images",
        f"vision visualize checkpoint={folder} images=photos/ page=true": "see where it looks",
        f"vision export checkpoint={folder} format=onnx": "use it elsewhere",
    }
    if not job.data.train.classes:
        commands = {
            f"python train.py recipe=finetune model=auto init={folder} data=…": "train a head",
            f"python eval.py checkpoint={folder} neighbours=20 data=…": "evaluate its features",
            f"vision convert source={folder} format=timm output=…": "use it elsewhere",
        }
    if job.start.config.kind == "timm":  # a baseline: most have no attention
        commands = {c: purpose for c, purpose in commands.items() if "visualize" not in c}
    return commands


def write_readme(job: "TrainingJob", best: str, commands: Mapping[str, str]) -> None:
    """The result of a finished run, its parts, and commands to continue with."""
    state, parts = job.state, summary(job)
    lines = [
        f"# {job.run.folder.name}",
        "",
        f"Best {job.config.checkpoint.best}: **{best}** at step {state.best_step} of "
        f"{job.schedule.total}, after {elapsed(state.seconds)}.",
        "",
        *(f"- {name}: {parts[name]}" for name in ("model", "data", "preprocess")),
    ]
    if job.config.log.curves:
        lines += ["", "![loss, accuracy and learning rate](curves.png)"]
    lines += ["", "Next:", ""]
    lines += [f"    {command}  # {purpose}" for command, purpose in commands.items()]
    job.run.write_text("README.md", "\n".join(lines) + "\n")
