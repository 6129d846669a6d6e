"""The folder of a run: its name, its files, its lock, and whether to resume it.

outputs/<name>/
    config.json    the settings of the run
    status.json    running | finished | pruned | preempted | failed, step, number of steps,
                   duration in seconds, parameters of the model, micro-batch
    metrics.jsonl  every number, one line per event; trackers get copies
    load_report.json  report on loading the initial weights, if there were any
    features/      cached features of a probe; see probe.py
    probe/         the run before this one, with probe_first
    split.csv      split of a folder of images
    skipped-0.jsonl  images that process 0 could not read, if there were any
    .lock          lock of the process that trains this run
    checkpoints/   step_….safetensors and best.safetensors
"""

import errno
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vision.config import ConfigError, UserError
from vision.files import write_text
from vision.training.configs import TrainConfig

if TYPE_CHECKING:
    from vision.training.run.distributed import World

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
    "loader.memory",
    "flip_test",
    "checkpoint.keep",
    "objective",
    "prune",
    "log",
)
"""Settings that may differ when a run is resumed: they do not change what is learned."""

LOWER_IS_BETTER = ("loss", "loss_flipped")

PREEMPTED = 75
"""Exit code of a run that was stopped and can be resumed (EX_TEMPFAIL): schedulers requeue it."""

_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


def read_json(file: Path) -> Mapping[str, Any]:
    """The content of a JSON file; empty if it does not exist."""
    try:
        values: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise ConfigError(f"{file} is damaged: {error}. Remove it or the whole run.") from error
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
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        """File of all numbers."""
        return self.folder / "metrics.jsonl"

    def read(self, name: str) -> Mapping[str, Any]:
        """The content of a JSON file of the run; empty if it does not exist."""
        return read_json(self.folder / name)

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Replace a JSON file of the run."""
        self._write(name, json.dumps(values, indent=1) + "\n")

    def _write(self, name: str, text: str) -> None:
        file = self.folder / name
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)

    def store_unreadable(self, rank: int, reasons: Mapping[str, str]) -> None:
        """List the images that a process could not read, with the reasons."""
        lines = [
            json.dumps({"image": n, "reason": reason}) for n, reason in sorted(reasons.items())
        ]
        if lines:
            self._write(f"skipped-{rank}.jsonl", "".join(f"{line}\n" for line in lines))

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
        return self.read("status.json")

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

    def refuse_if_locked(self) -> None:
        """Refuse a run that another process trains at this moment.

        Not for the process that holds the lock: closing a file gives up all its locks.
        """
        descriptor = _lock(self.folder) if (self.folder / ".lock").exists() else None
        if descriptor is not None:
            os.close(descriptor)

    def stored_settings(self) -> Mapping[str, Any]:
        """The settings that the run was started with."""
        return self.read("config.json")

    def cut_metrics(self, step: int, evaluated: int) -> None:
        """Remove the numbers of steps after `step`, and of evaluations after the step `evaluated`:
        they are about to be repeated.
        """
        if not self.metrics.exists():
            return
        lines = self.metrics.read_text(encoding="utf-8").splitlines()
        complete = [line for line in lines if line.endswith("}")]  # a killed process may cut one
        last = {"train": step}
        kept = [
            line
            for line, event in zip(complete, map(json.loads, complete), strict=True)
            if event["step"] <= last.get(event["split"], evaluated)
        ]
        self._write(self.metrics.name, "".join(f"{line}\n" for line in kept))


@contextmanager
def run_lock(run: Run, world: "World") -> Iterator[str]:
    """Within, nobody else trains this run. All processes must call this together.

    The main process holds the lock for all of them. The system releases it when that process ends,
    however it ends, so neither a killed run nor an elastic restart has to wait. A finished run
    never changes and is not locked: its folder may be read-only. Yields a warning where the file
    system does not support locks.
    """
    descriptor, refusal, warning = None, "", ""
    if world.main and run.status().get("status") != "finished":
        try:
            descriptor = _lock(run.folder)
        except ConfigError as error:
            refusal = str(error)
        if descriptor is None:
            warning = (
                f"{run.folder} cannot be locked here: nothing prevents a second start of this run "
                "at the same time."
            )
    if refusal := world.from_main(refusal):
        raise ConfigError(refusal)
    try:
        yield warning
    finally:
        if descriptor is not None:
            _unlock(descriptor, run.folder)


def _lock(folder: Path) -> int | None:
    """Take the lock and write its holder into the file; None where locks are not supported.

    With `lockf`, not `flock`: the workers that a loader forks would inherit the latter, and keep it
    for some seconds after their parent was killed.
    """
    import fcntl  # not on Windows

    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"output: the run's folder {folder} cannot be used: {reason}.") from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        os.close(descriptor)
        if isinstance(error, BlockingIOError | PermissionError):  # EAGAIN, EACCES
            raise ConfigError(
                f"the run {folder} is being trained at this moment, by {holder}. Wait for it, stop "
                "it, or choose another name."
            ) from error
        if error.errno in _NO_LOCKS:
            return None
        raise
    if not os.fstat(descriptor).st_nlink:  # its last holder has just removed it
        os.close(descriptor)
        return _lock(folder)
    with suppress(OSError):  # on a full disk the lock holds without the name of its holder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _unlock(descriptor: int, folder: Path) -> None:
    """Release the lock. A run that failed before it started leaves no folder behind."""
    if not (folder / "status.json").exists():
        with suppress(OSError):  # there is more in the folder
            (folder / ".lock").unlink()
            folder.rmdir()
    os.close(descriptor)


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


def is_free(key: str) -> bool:
    """Whether a setting, by its dotted name, may differ when a run is resumed; see FREE."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


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


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "(missing)"
