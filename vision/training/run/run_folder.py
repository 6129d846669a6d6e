"""The folder of a run: its name, its files, and whether to resume it.

outputs/<name>/
    config.json    the settings of the run
    status.json    running | finished | pruned | preempted | failed, step, number of steps,
                   duration in seconds, parameters of the model, micro-batch
    metrics.jsonl  every number, one line per event; trackers get copies
    metrics.csv, curves.png, environment.json, README.md, log.txt   see story.py and log.py
    load_report.json  report on loading the initial weights, if there were any
    reconstructions/  hidden and predicted pixels of validation images, of masked pretraining
    probe/         the run before this one, with probe_first
    split.csv      split of a folder of images
    ignored.json   number of files in that folder that are not images, by reason
    skipped-0.jsonl  images that process 0 could not read, if there were any
    .lock          lock of the process that trains this run
    checkpoints/   step_….safetensors and best.safetensors

Whether there is a run to resume, and from where, the checkpoints decide. Without `status.json` or
`config.json` a run is resumed all the same, and both are written again.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.native.checkpoint_folder import FOLDER, latest
from vision.checkpoints.native.header import read_record
from vision.config import ConfigError, UserError
from vision.evaluation.configs import LOWER_IS_BETTER
from vision.files import make_folder, replacing, sync_file, write_all
from vision.training.configs import TrainConfig
from vision.training.run.run_settings import auto_folder, changes

T = TypeVar("T")

BY_CLASS = ("balanced_accuracy", "macro_f1")
"""Means over classes, which differ from the accuracy where classes are unequal."""

PREEMPTED = 75
"""Exit code of a run that was stopped and can be resumed (EX_TEMPFAIL): schedulers requeue it."""


REWRITTEN = "Remove this one file and start again: it is written anew from the newest checkpoint."
"""Remedy for a damaged file of a run that is not needed to resume it."""

WRITTEN_BEFORE = ("config.json", "split.csv", "ignored.json")
"""Files of a run that are written before it starts; a start that fails leaves none behind."""

STATUSES = ("running", "finished", "pruned", "preempted", "failed")


def read_json(file: Path, remedy: str) -> Mapping[str, Any]:
    """The content of a JSON file; empty if it does not exist. An error ends with the remedy."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}. {remedy}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is damaged: expected a mapping, found {values!s:.50}. {remedy}")
    return values


class RunFileError(UserError, OSError):
    """A file of a run that cannot be written; the message names it."""

    def __init__(self, file: Path, error: OSError) -> None:
        super().__init__(
            f"{file} cannot be written: {error.strerror or error}. What was stored before is "
            "untouched; the same command resumes from the newest checkpoint."
        )
        self.errno = error.errno


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Within, an error of the file system becomes a RunFileError that names the file."""
    try:
        yield
    except UserError:  # an unreadable image, say, met while its features are written
        raise
    except OSError as error:
        raise RunFileError(file, error) from error


@dataclass(frozen=True)
class Run:
    """A run's folder."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / FOLDER

    @property
    def status_file(self) -> Path:
        """File of the progress of the run, written when it starts."""
        return self.folder / "status.json"

    @property
    def metrics(self) -> Path:
        """File of all numbers."""
        return self.folder / "metrics.jsonl"

    def read(self, name: str) -> Mapping[str, Any]:
        """The content of a JSON file of the run, which is written again if it does not exist; empty
        then.
        """
        return read_json(self.folder / name, REWRITTEN)

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Replace a JSON file of the run."""
        self.write_text(name, json.dumps(values, indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replace a text file of the run."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Replace a file of the run."""
        file = self.folder / name
        with writing(file):
            make_folder(file.parent)
            with replacing(file) as stream:
                write_all(stream, content)

    def store_unreadable(self, rank: int, reasons: Mapping[str, str]) -> None:
        """Add the images that a process could not read, with the reasons, to those that it could
        not read before the run was resumed.
        """
        name = f"skipped-{rank}.jsonl"
        before = _lines(self.folder / name)
        lines = {json.dumps({"image": n, "reason": reason}) for n, reason in reasons.items()}
        if not lines <= before:
            self.write_text(name, "".join(f"{line}\n" for line in sorted(lines | before)))

    def unreadable(self) -> int:
        """Number of images that the processes could not read, since the start of the run."""
        return len(set[str]().union(*map(_lines, self.folder.glob("skipped-*.jsonl"))))

    def mark_latest(self) -> None:
        """Point the link `latest` beside the run's folder to it."""
        link = self.folder.parent / "latest"
        if link.is_dir() and not link.is_symlink():
            return  # a run of that name
        fresh = self.folder.parent / f".latest-{os.getpid()}"
        with writing(link):
            fresh.symlink_to(self.folder.name)
            fresh.replace(link)

    def status(self) -> Mapping[str, Any]:
        """The status of the run; empty if it never started, or where the file is missing."""
        status = self.read("status.json")
        if status and status.get("status") not in STATUSES:
            raise ConfigError(
                f"{self.folder / 'status.json'} is damaged: status is {status.get('status')!s:.50},"
                f" expected one of {', '.join(STATUSES)}. {REWRITTEN}"
            )
        return status

    def decision(self, config: TrainConfig) -> Literal["new", "resume", "finished"]:
        """What to do with these settings in this folder; refused if they are not the run's own.

        Only the holder of the run's lock can rely on the answer.
        """
        status = self.status()
        if not status and not self.metrics.exists() and not latest(self.checkpoints):
            return "new"
        if config.on_existing == "refuse":
            raise ConfigError(
                f"the run {self.folder} exists. Choose another name, or on_existing=resume."
            )
        stored = self.stored_settings()
        differences = changes(stored, config.model_dump(mode="json")) if stored else []
        if differences and not config.allow_changes:
            raise ConfigError(
                f"the run {self.folder} was started with other settings:\n"
                + "\n".join(f"  {line}" for line in differences)
                + "\nChoose another name, or allow_changes=true to resume with the new settings."
            )
        if status.get("status") == "pruned" and config.prune is None:
            return "resume"  # to its end, without the search that stopped it
        early = status.get("step", 0) < status.get("steps", 0)
        if early and any(line.startswith("stop_early") for line in differences):
            return "resume"  # with another patience, or none
        return "finished" if status.get("status") in ("finished", "pruned") else "resume"

    def stored_settings(self) -> Mapping[str, Any]:
        """The settings that the run was started with, or those of its newest checkpoint where that
        file is missing; empty if both are.
        """
        return self.read("config.json") or self.newest_record().get("config", {})

    def restore_files(self, config: TrainConfig) -> list[str]:
        """Write the missing `config.json` of a run that is resumed with a config, and return a line
        on each file that was missing.
        """
        missing = [n for n in ("config.json", "status.json") if not (self.folder / n).exists()]
        if "config.json" in missing:
            self.write("config.json", self.stored_settings() or config.model_dump(mode="json"))
        return [f"{self.folder / name} was missing; it is written again." for name in missing]

    def newest_record(self) -> Mapping[str, Any]:
        """The record of the newest readable checkpoint; empty if there is none."""
        return self.read_newest(read_record) or {}

    def read_newest(self, read: Callable[[Path], T]) -> T | None:
        """What is read from the newest readable checkpoint; None if there is none."""
        for path in latest(self.checkpoints):
            with suppress(CheckpointError):  # resuming warns about it, and takes the one before
                return read(path)
        return None

    def events(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, except a last one that is not complete."""
        return [event for _, event in self._events()]

    def sync_metrics(self) -> None:
        """Force all numbers so far to the disk."""
        with writing(self.metrics):
            sync_file(self.metrics)

    def cut_metrics(self, step: int, evaluated: int) -> None:
        """Remove the numbers of steps after `step`, and of evaluations after the step `evaluated`:
        they are about to be repeated.
        """
        if self.metrics.exists():
            last = {"train": step}
            kept = [
                line
                for line, event in self._events(step)
                if event["step"] <= last.get(event["split"], evaluated)
            ]
            self.write_text(self.metrics.name, "".join(f"{line}\n" for line in kept))

    def _events(self, step: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Lines of `metrics.jsonl` with their content. A damaged line is an error if one of
        a step up to `step` follows, or any other one if `step` is None: a process that is killed
        leaves half a line at the end, and a power failure more than that after the last checkpoint.
        """
        if not self.metrics.exists():
            return
        damage = ""
        text = self.metrics.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            try:
                event = json.loads(line)
                here, _ = event["step"], event["split"]
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                damage = damage or f"line {number} is damaged ({error!s:.100})"
                continue
            if damage and (step is None or here <= step):
                raise ConfigError(
                    f"{self.metrics}, {damage}. Repair the line, or remove it: its numbers are "
                    "missing then, and nothing else changes."
                )
            yield line, event


def find_run(config: TrainConfig, chosen: Mapping[str, str]) -> Run:
    """The run that a config names, whether it exists or not; `chosen` has the choice in each group
    of settings, which `name=auto` follows from.
    """
    output = Path(config.output)
    if config.name != "auto":
        return Run(output / config.name)
    return Run(auto_folder(output, config.model_dump(mode="json"), chosen))


def better(metric: str, new: float, old: float) -> bool:
    """Whether a value of a metric is better than another one."""
    return new < old if metric in LOWER_IS_BETTER else new > old


def _lines(file: Path) -> set[str]:
    """The lines of a text file; none if it does not exist."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return set(text.splitlines())
