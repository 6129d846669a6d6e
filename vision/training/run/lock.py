"""A lock on the file `.lock` in a run's folder: one training at a time."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vision.config import ConfigError
from vision.training.run.distributed import World
from vision.training.run.run_folder import Run

_TAKEN = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@contextmanager
def run_lock(run: Run, world: World) -> Iterator[str]:
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
        if error.errno in _TAKEN:
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
