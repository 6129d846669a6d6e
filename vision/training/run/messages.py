"""What a run says to the person in front of it. Only the main process speaks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from vision.data.preprocess import Preprocess
from vision.terminal import plain
from vision.training.tune import counts

if TYPE_CHECKING:
    from vision.training.job import Job


# On a narrow terminal the bar gives way, not the numbers.
_COLUMNS = (
    TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
    BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
    MofNCompleteColumn(table_column=Column(no_wrap=True)),
    TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
)


class Reporter:
    """Start summary, progress, numbers, end summary."""

    def __init__(self, speaks: bool) -> None:
        self.console = Console(quiet=not speaks, highlight=False)
        self.progress: Progress | None = None
        self.latest = ""

    def say(self, text: str) -> None:
        """A line."""
        self.console.print(plain(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line that should not be missed."""
        self._named("warning:", "yellow", text)

    def _named(self, name: str, style: str, text: str) -> None:
        self.console.print(Text.assemble((name, style), " ", plain(text)), soft_wrap=True)

    @contextmanager
    def counting(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Within, a bar that is moved on by numbers; a line where there is no terminal."""
        if not self.console.is_terminal:
            self.say(f"{text} …")
            yield lambda number: None
            return
        with Progress(*_COLUMNS, console=self.console, transient=True) as progress:
            task = progress.add_task(text, total=total)
            yield lambda number: progress.advance(task, number)

    def start(self, job: "Job") -> None:
        """What is about to run, and where it is stored."""
        for line in job.load_report:
            self.say(line)
        for name, value in _summary(job).items():
            self._named(f"{name:14}", "bold", value)
        for warning in job.warnings:
            self.warn(warning)
        if self.console.is_terminal:
            self.progress = Progress(*_COLUMNS, console=self.console)
            self.progress.start()
            self.progress.add_task("training", total=job.plan.total, completed=job.state.step)

    def step(self, job: "Job") -> None:
        """One step more."""
        self._show(job, self.latest or "training")

    def evaluating(self, job: "Job") -> None:
        """No step for a while."""
        self._show(job, "evaluating")

    def _show(self, job: "Job", text: str) -> None:
        if self.progress is not None:
            task = self.progress.tasks[0]
            self.progress.update(task.id, completed=job.state.step, description=text)

    def training(self, job: "Job", numbers: Mapping[str, float]) -> None:
        """The means of some steps."""
        self.latest = (
            f"loss {numbers['loss']:.3f}  top-1 {numbers['top1']:.1%}  "
            f"lr {numbers['learning_rate']:.1e}  {numbers['images_per_second']:,.0f} images/s"
        )
        if self.progress is None:
            place = f"step {job.state.step}/{job.plan.total}  epoch {numbers['epoch']:.2f}"
            self.say(f"{place}  {self.latest}")

    def evaluation(self, job: "Job", split: str, numbers: Mapping[str, float]) -> None:
        """The numbers on validation images."""
        self.say(
            f"step {job.state.step}/{job.plan.total}  {split}: loss {numbers['loss']:.4f}  "
            f"top-1 {numbers['top1']:.2%}  top-5 {numbers['top5']:.2%}"
        )
        self.step(job)

    def finish(self, job: "Job") -> None:
        """Where everything is, and what to type next."""
        self.close()
        folder = job.run.folder
        metric = job.config.checkpoint.best
        best = "never evaluated" if job.state.best is None else f"{job.state.best:.4f}"
        self.say(f"\nFinished. Best {metric}: {best}. The run is in {folder}.")
        commands = {
            f"python eval.py checkpoint={folder}": "evaluate its best checkpoint",
            f"vision predict checkpoint={folder} images=photos/": "classify your own images",
            f"vision visualize checkpoint={folder} images=photos/ page=true": "see where it looks",
            f"vision export checkpoint={folder} format=onnx": "use it elsewhere",
        }
        if job.state.notes["model"]["kind"] == "timm":  # a baseline: most have no attention
            commands = {c: purpose for c, purpose in commands.items() if "visualize" not in c}
        width = max(map(len, commands))
        self.say("Next:")
        for command, purpose in commands.items():
            self.say(f"  {command:{width}}  # {purpose}")

    def close(self) -> None:
        """End the progress bar."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


def _summary(job: "Job") -> dict[str, str]:
    config, world, plan = job.config, job.world, job.plan
    trained, parameters = counts(job.state.model)
    part = "" if trained == parameters else f", {trained:,} of them trained ({config.tune.kind})"
    train, val = job.train_loader.source, job.val_loader.source
    height, width = job.preprocess.image_size
    scaling = ""
    if config.optimizer.reference_batch is not None:
        scaling = (
            f" ({config.optimizer.learning_rate:g} × {config.batch_size} / "
            f"{config.optimizer.reference_batch})"
        )
    return {
        "model": f"{job.state.notes['model']['kind']}, {parameters:,} parameters{part}",
        "data": f"{config.data.kind}, {len(train):,} + {len(val):,} images of "
        f"{height} × {width}, {len(train.classes)} classes",
        "preprocess": _preprocess(job.preprocess),
        "batch": f"{config.batch_size} = {job.micro_batch} per device × {world.size} device"
        f"{'s' if world.size > 1 else ''} × {job.order.accumulation} accumulated",
        "learning rate": f"{plan.peak:g}{scaling}, {config.optimizer.name}",
        "length": f"{plan.total:,} steps of {plan.steps_per_epoch:,} per epoch",
        "precision": f"{config.precision} on {world.device.type}",
        "run": f"{job.run.folder}" + (f", from step {job.state.step}" if job.state.step else ""),
    }


def _preprocess(preprocess: Preprocess) -> str:
    """Every value with who said so; those of one origin together."""
    height, width = preprocess.image_size
    values = {
        "image size": f"{height} × {width}",
        "mean": ", ".join(f"{number:.4g}" for number in preprocess.mean),
        "std": ", ".join(f"{number:.4g}" for number in preprocess.std),
        "interpolation": preprocess.interpolation,
        "crop ratio": f"{preprocess.crop_ratio:.4g}",
    }
    by_origin: dict[str, list[str]] = {}
    for name, value in values.items():
        origin = preprocess.origin[name.replace(" ", "_")]
        by_origin.setdefault(origin, []).append(f"{name} {value}")
    return "; ".join(f"{', '.join(said)} (from {who})" for who, said in by_origin.items())
