"""What a run reports, on the terminal, in `metrics.jsonl`, and to wandb and TensorBoard, whose only
door this is.

Only the main process does.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from vision.config import ConfigError
from vision.files import sync_file, sync_folder
from vision.terminal import percent, plain
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import BY_CLASS, writing
from vision.training.run.run_settings import flat
from vision.training.run.story import left_out, next_commands, summary, warnings, write_readme

if TYPE_CHECKING:
    from PIL.Image import Image

    from vision.training.job import TrainingJob

# On a narrow terminal the bar gives way, not the numbers.
_COLUMNS = (
    TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
    BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
    MofNCompleteColumn(table_column=Column(no_wrap=True)),
    TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
)


class Reporter:
    """Summary at the start, progress, numbers, summary at the end."""

    def __init__(self, main: bool) -> None:
        self.console = Console(quiet=not main, highlight=False)
        self.progress: Progress | None = None
        self.latest = ""
        self.metrics: Path | None = None
        """`metrics.jsonl` while it is open."""
        self.wandb_run: Any = None
        self.board: Any = None
        """TensorBoard's writer, if it is asked for."""
        self.said: list[str] = []
        """Lines for `log.txt` before the run has a folder."""
        self.log: Path | None = None

    def say(self, text: str) -> None:
        """Print a line, also into `log.txt`."""
        self.console.print(plain(text), soft_wrap=True)
        self._note(text)

    def _note(self, text: str) -> None:
        self.said.append(text)
        if self.log is not None:
            with writing(self.log), self.log.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in self.said))
            self.said.clear()

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._named("warning:", "yellow", text)

    def _named(self, name: str, style: str, text: str) -> None:
        self.console.print(Text.assemble((name, style), " ", plain(text)), soft_wrap=True)
        self._note(f"{name} {text}")

    @contextmanager
    def progress_bar(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Within, a bar that the yielded function advances; a line if there is no terminal."""
        if not self.console.is_terminal:
            self.say(f"{text} …")
            yield lambda number: None
            return
        with Progress(*_COLUMNS, console=self.console, transient=True) as progress:
            task = progress.add_task(text, total=total)
            yield lambda number: progress.advance(task, number)

    def open(self, job: "TrainingJob") -> None:
        """Open the run's `metrics.jsonl`, and its wandb run unless wandb is disabled."""
        self.wandb_run = _start_wandb(job.config, job.run.folder, job.state.wandb_id)
        with writing(job.run.metrics):
            self.file = job.run.metrics.open("a", encoding="utf-8")
            sync_folder(job.run.folder)
        self.metrics = job.run.metrics
        self.log = job.run.folder / "log.txt"
        if job.config.log.tensorboard:
            self.board = _open_board(job.run.folder, job.state.step)

    def summarize(self, job: "TrainingJob") -> None:
        """Print the load report, a summary of the run, and warnings."""
        for line in job.start.report_lines:
            self.say(line)
        for name, value in summary(job).items():
            self._named(f"{name:14}", "bold", value)
        for warning in warnings(job):
            self.warn(warning)

    def start(self, job: "TrainingJob") -> None:
        """Show the progress of the steps."""
        if self.console.is_terminal:
            self.progress = Progress(*_COLUMNS, console=self.console)
            self.progress.start()
            self.progress.add_task("training", total=job.schedule.total, completed=job.state.step)

    def step(self, job: "TrainingJob") -> None:
        """Move the progress bar to the present step; its text is the latest numbers."""
        if self.progress is not None:
            task, text = self.progress.tasks[0], self.latest or "training"
            self.progress.update(task.id, completed=job.state.step, description=text)

    @contextmanager
    def evaluating(self, split: str, batches: int) -> Iterator[Callable[[], None]]:
        """Within, a second bar that the yielded function advances by a batch."""
        if self.progress is None:
            yield lambda: None
            return
        progress = self.progress
        task = progress.add_task(f"evaluating ({split})", total=batches)
        try:
            yield lambda: progress.advance(task)
        finally:
            progress.remove_task(task)

    def write(self, step: int, split: str, numbers: Mapping[str, float]) -> None:
        """Write a line of JSON and hand it to the operating system."""
        if self.metrics is None:
            return
        with writing(self.metrics):
            self.file.write(json.dumps({"step": step, "split": split, **numbers}) + "\n")
            self.file.flush()
        if self.wandb_run is not None:
            self.wandb_run.log({"step": step, **{f"{split}/{k}": v for k, v in numbers.items()}})
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(f"{split}/{name}", value, step)

    def image(self, step: int, name: str, image: "Image | None") -> None:
        """Log an image, to trackers alone."""
        if self.board is not None and image is not None:
            pixels = np.asarray(image.convert("RGB"))
            self.board.add_image(name, pixels, step, dataformats="HWC")
        if self.wandb_run is not None and image is not None:
            import wandb

            self.wandb_run.log({"step": step, name: wandb.Image(image)})

    def training(self, job: "TrainingJob", numbers: Mapping[str, float]) -> None:
        """Report the means of the last steps."""
        self.write(job.state.step, "train", numbers)
        speed = numbers["images_per_second"]
        self.latest = (
            f"{_shown(numbers, job.task.measures, digits=3)}  "
            f"lr {numbers['learning_rate']:.1e}  {speed:,.{0 if speed >= 10 else 1}f} images/s"
        )
        if self.progress is None:
            place = f"step {job.state.step}/{job.schedule.total}  epoch {numbers['epoch']:.2f}"
            self.say(f"{place}  {self.latest}")

    def evaluation(self, job: "TrainingJob", split: str, numbers: Mapping[str, float]) -> None:
        """Report numbers on validation images."""
        self.write(job.state.step, split, numbers)
        self.say(
            f"step {job.state.step}/{job.schedule.total}  {split}: "
            f"{_shown(numbers, _headline(job, numbers), digits=4)}"
        )
        self.step(job)

    def finish(self, job: "TrainingJob") -> None:
        """Print the result, the run's folder and commands to continue with."""
        self._stop_progress()
        folder = job.run.folder
        metric = job.config.checkpoint.best
        best = "never evaluated"
        if job.state.best is not None:
            best = f"{job.state.best:.4f}" if "loss" in metric else percent(job.state.best)
        self.say(f"\nFinished. Best {metric}: {best}. The run is in {folder}.")
        if numbers := _best_numbers(job):
            shown = _shown(numbers, _headline(job, numbers), digits=4)
            self.say(f"Step {job.state.best_step}, the best: {shown}")
        for warning in left_out(job):
            self.warn(warning)
        commands = next_commands(job)
        write_readme(job, best, commands)
        if self.board is not None:
            _add_settings(self.board, job.config, {metric: job.state.best})
        width = max(map(len, commands))
        self.say("Next:")
        for command, purpose in commands.items():
            self.say(f"  {command:{width}}  # {purpose}")

    def close(self, exit_code: int) -> None:
        """Remove the progress bar and write everything that is buffered."""
        self._stop_progress()
        try:
            if self.metrics is not None:
                with writing(self.metrics):  # tries once more what a full disk did not take
                    self.file.close()
                    sync_file(self.metrics)
        finally:
            self.metrics = None
            if self.wandb_run is not None:
                self.wandb_run.finish(exit_code=exit_code)
            if self.board is not None:
                self.board.close()

    def _stop_progress(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


def _headline(job: "TrainingJob", numbers: Mapping[str, float]) -> list[str]:
    """The numbers to show, without means over classes that equal the accuracy as it is shown."""
    top1 = numbers.get("top1")
    same = [n for n in BY_CLASS if top1 is not None and f"{numbers[n]:.4f}" == f"{top1:.4f}"]
    few = ["top5"] if len(job.data.train.classes) <= 5 else []  # always 100 %
    return [name for name in job.task.headline if name not in (*same, *few)]


def _best_numbers(job: "TrainingJob") -> dict[str, Any]:
    """The numbers that made the best checkpoint the best; empty where they are not on file."""
    split = "val" if job.state.average is None else "val_ema"
    place = (job.state.best_step, split)
    found = [event for event in job.run.events() if (event["step"], event["split"]) == place]
    return found[-1] if found else {}


def _shown(numbers: Mapping[str, float], names: Sequence[str], digits: int) -> str:
    """Some of the numbers; accuracies in percent."""
    shares = {
        "top1": "top-1",
        "top5": "top-5",
        "top1_flipped": "top-1 with flips",
        "balanced_accuracy": "balanced",
        "macro_f1": "macro-F1",
    }
    return "  ".join(
        f"{shares[name]} {percent(numbers[name], digits - 2)}"
        if name in shares
        else f"{name} {numbers[name]:.{digits}f}"
        for name in names
        if name in numbers
    )


def _start_wandb(config: TrainConfig, folder: Path, run_id: str | None) -> Any:
    """A new wandb run or the one with this id; None where wandb is disabled."""
    mode = config.log.wandb
    if mode == "disabled":
        return None
    import wandb

    try:
        run = wandb.init(
            project=config.log.project,
            name=folder.name,
            id=run_id,
            dir=folder,
            config=config.model_dump(mode="json"),
            mode=mode,
            # Offline, only `wandb sync` will know what the run has already.
            resume="allow" if mode == "online" else None,
        )
    except wandb.Error as error:
        raise ConfigError(
            f"log.wandb={mode}: {error} Run `wandb login`, or use log.wandb=offline."
        ) from error
    # wandb's own step must increase from call to call, but a resumed run repeats some steps.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run


def check_board() -> None:
    """Refuse a run that asks for TensorBoard where the package is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "log.tensorboard=true needs the package: pip install 'vit-swin[tensorboard]'."
        )


def _open_board(run: Path, step: int) -> Any:
    """A writer into the run's folder; what an earlier start wrote after `step` is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)


def _add_settings(board: Any, config: TrainConfig, results: Mapping[str, float | None]) -> None:
    """The settings with the results that they led to, for TensorBoard's table of runs."""
    settings = flat(config.model_dump(mode="json"))
    shown = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in settings.items()}
    numbers = {f"best/{name}": value for name, value in results.items() if value is not None}
    board.add_hparams(shown, numbers, run_name=".")
