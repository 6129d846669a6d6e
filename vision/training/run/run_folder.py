"""The folder of a run: its name, its stored settings, and whether to resume it.

outputs/<name>/
    config.json    the settings of the run
    status.json    running | finished | pruned | preempted | failed, step, number of steps,
                   duration in seconds, parameters of the model, micro-batch
    metrics.jsonl  every number, one line per event; trackers get copies
    load_report.json  report on loading the initial weights, if there were any
    features/      cached features of a probe; see features.py
    probe/         the run before this one, with probe_first
    split.csv      split of a folder of images
    skipped-0.jsonl  images that process 0 could not read, if there were any
    .lock          lock of the process that trains this run; see lock.py
    checkpoints/   step_….safetensors and best.safetensors
"""

import hashlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from vision.config import ConfigError, UserError
from vision.files import write_text
from vision.training.configs import TrainConfig

FREE = (
    "name",
    "output",
    "device",
    "parallel",
    "max_batch_per_device",
    "on_existing",
    "allow_changes",
    "loader.workers",
    "loader.prefetch",
    "loader.start_method",
    "checkpoint.keep",
    "objective",
    "prune",
    "log",
)
"""Settings that may differ when a run is resumed: they do not change what is learned."""

LOWER_IS_BETTER = ("loss",)

Status = Literal["running", "finished", "pruned", "preempted", "failed"]

PREEMPTED = 75
"""Exit code of a run that was stopped and can be resumed (EX_TEMPFAIL): schedulers requeue it."""


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
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        """File of all numbers."""
        return self.folder / "metrics.jsonl"

    @property
    def split(self) -> Path:
        """File with the split of a folder of images."""
        return self.folder / "split.csv"

    def store_unreadable(self, rank: int, reasons: Mapping[str, str]) -> None:
        """List the images that a process could not read, with the reasons."""
        lines = [
            json.dumps({"image": n, "reason": reason}) for n, reason in sorted(reasons.items())
        ]
        if lines:
            _write(self.folder / f"skipped-{rank}.jsonl", "".join(f"{x}\n" for x in lines))

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
        """The status of the run; empty if it never started."""
        return read_json(self.folder / "status.json")

    def decision(self, config: TrainConfig) -> Literal["new", "resume", "finished"]:
        """What to do with these settings in this folder; refused if they are not the run's own.

        Only the holder of the run's lock can rely on the answer.
        """
        status = self.status()
        if not status:
            return "new"
        if config.on_existing == "refuse":
            raise ConfigError(
                f"the run {self.folder} exists. Choose another name, or on_existing=resume."
            )
        differences = changes(self.stored_settings(), config.model_dump(mode="json"))
        if differences and not config.allow_changes:
            raise ConfigError(
                f"the run {self.folder} was started with other settings:\n"
                + "\n".join(f"  {line}" for line in differences)
                + "\nChoose another name, or allow_changes=true to resume with the new settings."
            )
        if status["status"] == "pruned" and config.prune is None:
            return "resume"  # to its end, without the search that stopped it
        return "finished" if status["status"] in ("finished", "pruned") else "resume"

    def set_status(self, status: Status, step: int, **more: Any) -> None:
        """Write the status of the run."""
        write_json(self.folder / "status.json", {"status": status, "step": step, **more})

    def stored_settings(self) -> Mapping[str, Any]:
        """The settings that the run was started with."""
        return read_json(self.folder / "config.json")

    def store_settings(self, config: TrainConfig) -> None:
        """Write the settings, once at the start of a run."""
        write_json(self.folder / "config.json", config.model_dump(mode="json"))

    def store_load_report(self, report: Mapping[str, Any]) -> None:
        """Write the report on loading the initial weights."""
        write_json(self.folder / "load_report.json", report)

    def cut_metrics(self, step: int) -> None:
        """Remove the numbers of steps after `step`, which are about to be repeated."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_text(encoding="utf-8").splitlines()
        complete = [line for line in lines if line.endswith("}")]  # a killed process may cut one
        kept = [line for line in complete if json.loads(line)["step"] <= step]
        _write(self.metrics, "".join(f"{line}\n" for line in kept))


def find_run(config: TrainConfig, label: str) -> Run:
    """The run that a config names, whether it exists or not."""
    name = config.name
    if name == "auto":
        name = run_name(config.model_dump(mode="json"), label)
    return Run(Path(config.output) / name)


def run_name(settings: Mapping[str, Any], label: str) -> str:
    """`label` and six digits of a digest of all settings that change what is learned."""
    fixed = {k: v for k, v in flat(settings).items() if not is_free(k)}
    digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
    return f"{label}-{digest[:6]}"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings that differ and change what is learned, one line each."""
    before, after = flat(old), flat(new)
    keys = sorted(k for k in before.keys() | after.keys() if not is_free(k))
    return [
        f"{key}: {_shown(before, key)} → {_shown(after, key)}"
        for key in keys
        if before.get(key, ...) != after.get(key, ...)
    ]


def better(metric: str, new: float, old: float) -> bool:
    """Whether a value of a metric is better than another one."""
    return new < old if metric in LOWER_IS_BETTER else new > old


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


@dataclass
class StopRequest:
    """A request to stop by SIGTERM, SIGINT or SIGUSR1; false until there is one."""

    signal: str = ""

    def __bool__(self) -> bool:
        return bool(self.signal)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the request; a second interrupt from the keyboard ends the process at once."""
        name = signal.Signals(number).name
        if name == self.signal == "SIGINT":
            raise KeyboardInterrupt
        self.signal = name


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Within, signals become a request that the loop handles after its step."""
    request = StopRequest()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGUSR1"):  # not on Windows
        numbers.append(signal.SIGUSR1)
    before = {number: signal.signal(number, request.handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_free(key: str) -> bool:
    """Whether a setting, by its dotted name, may differ when a run is resumed; see FREE."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "(missing)"


def read_json(file: Path) -> Mapping[str, Any]:
    """The content of a JSON file of a run; empty if it does not exist."""
    try:
        values: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise ConfigError(f"{file} is damaged: {error}. Remove it or the whole run.") from error
    return values


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Replace a JSON file of a run."""
    _write(file, json.dumps(values, indent=1) + "\n")


def _write(file: Path, text: str) -> None:
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
