"""The lock of a run: one training at a time works in its folder.

The lock is the system's, on the file `.lock`, and ends with the process. On a file system without
locks a holder announces itself by a file of its own, `.lock-<machine>-<pid>-<start>`. Whoever finds
the file of another process that lives, or may live, withdraws: of two that start at the same time
the later one sees the other, so that never both train. The file of a process of this machine that
has ended is removed; whether one of another machine lives cannot be known, and is not guessed from
the age of its file.
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vision.config import ConfigError
from vision.files import NO_LOCKS, ProcessIdentity, make_folder, this_process, write_text
from vision.training.run.run_folder import WRITTEN_BEFORE, Run, writing

if TYPE_CHECKING:
    from vision.training.run.distributed import World

LOCK = ".lock"
_ANNOUNCED = re.compile(rf"\{LOCK}-(\w+-\d+-\d+)")

Lock = int | Path
"""The descriptor of a locked file, or the file by which a holder announces itself."""


@contextmanager
def run_lock(run: Run, world: "World") -> Iterator[None]:
    """Within, nobody else trains this run. All processes must call this together.

    The main process holds the lock for all of them. The system releases it when that process ends,
    however it ends, so neither a killed run nor an elastic restart has to wait. A finished run
    never changes and is not locked: its folder may be read-only.
    """
    lock, refusal = None, ""
    if world.main and run.status().get("status") != "finished":
        try:
            lock = _lock(run.folder)
        except ConfigError as error:
            refusal = str(error)
    if refusal := world.from_main(refusal):
        raise ConfigError(refusal)
    try:
        yield
    finally:
        if lock is not None:
            _unlock(lock, run.folder)


def refuse_if_locked(run: Run) -> None:
    """Refuse a run that another process trains at this moment.

    Not for the process that holds the lock: closing a file gives up all its locks.
    """
    if (run.folder / LOCK).exists():
        _release(_lock(run.folder))


def _lock(folder: Path) -> Lock:
    """Take the lock and write its holder into the file.

    With `lockf`, not `flock`: the workers that a loader forks would inherit the latter, and keep it
    for some seconds after their parent was killed.
    """
    import fcntl  # not on Windows

    try:
        make_folder(folder)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"output: the run's folder {folder} cannot be used: {reason}.") from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        os.close(descriptor)
        if isinstance(error, BlockingIOError | PermissionError):  # EAGAIN, EACCES
            raise ConfigError(_refusal(folder, holder)) from error
        if error.errno in NO_LOCKS:
            return _announce(folder)
        raise
    if not os.fstat(descriptor).st_nlink:  # its last holder has just removed it
        os.close(descriptor)
        return _lock(folder)
    with suppress(OSError):  # on a full disk the lock holds without the name of its holder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _this_holder().encode(), 0)
    return descriptor


def _announce(folder: Path) -> Path:
    """Take the lock of a file system that has none."""
    own = folder / f"{LOCK}-{this_process().text}"
    with writing(own):
        write_text(own, _this_holder())
    for other in folder.glob(f"{LOCK}-*"):
        named = _ANNOUNCED.fullmatch(other.name)
        if named is None or other == own:
            continue
        ended = ProcessIdentity.read(named[1]).has_ended
        if ended:
            other.unlink(missing_ok=True)
            continue
        holder = other.read_text(errors="replace") or "another process"
        own.unlink()
        if ended is False:
            raise ConfigError(_refusal(folder, holder))
        raise ConfigError(
            f"the run {folder} is being trained by {holder}, or was when that process was killed: "
            "on a file system without locks this cannot be seen from another machine. If it is not "
            f"running any more, remove the file {other} and start again; otherwise wait for it."
        )
    return own


def _this_holder() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _refusal(folder: Path, holder: str) -> str:
    return (
        f"the run {folder} is being trained at this moment, by {holder}. Wait for it, stop it, or "
        "choose another name."
    )


def _unlock(lock: Lock, folder: Path) -> None:
    """Release the lock. A run that failed before it started leaves no folder behind."""
    if isinstance(lock, Path):  # before the folder, which would not be empty
        _release(lock)
    run = Run(folder)
    if not (run.status_file.exists() or run.metrics.exists() or run.checkpoints.exists()):
        with suppress(OSError):  # there is more in the folder
            for name in WRITTEN_BEFORE:
                (folder / name).unlink(missing_ok=True)
            (folder / LOCK).unlink()
            folder.rmdir()
    if isinstance(lock, int):
        _release(lock)


def _release(lock: Lock) -> None:
    if isinstance(lock, int):
        os.close(lock)
    else:
        lock.unlink(missing_ok=True)
