"""A run's folder belongs to one training at a time: a lock on the file `.lock` in it."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from vision.config import ConfigError
from vision.training.run.distributed import World

_TAKEN = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class _Attempt(NamedTuple):
    """An open and locked file; or why the run is refused; or what is missing without a lock."""

    descriptor: int | None = None
    refusal: str = ""
    warning: str = ""


@contextmanager
def held(folder: Path, world: World) -> Iterator[str]:
    """Within, nobody else trains the run in this folder. All processes must call this together.

    The main process holds the lock for all of them. The system takes it back when that process
    ends, however it ends, so that neither a killed run nor an elastic restart has to wait. Yields a
    warning where the file system knows no locks.
    """
    attempt = _lock(folder) if world.main else _Attempt()
    if refusal := world.from_main(attempt.refusal):
        raise ConfigError(refusal)
    try:
        yield attempt.warning
    finally:
        if attempt.descriptor is not None:
            _unlock(attempt.descriptor, folder)


def _lock(folder: Path) -> _Attempt:
    """Take the lock, and write who has it into the file.

    A lock of fcntl and not of flock: processes that a loader forks would inherit the latter, and
    keep it for some seconds after their parent was killed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        reason = error.strerror or str(error)
        return _Attempt(refusal=f"output: the run's folder {folder} cannot be used: {reason}.")
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        os.close(descriptor)
        if error.errno in _TAKEN:
            return _Attempt(
                refusal=f"the run {folder} is being trained at this moment, by {holder}. Wait for "
                "it or stop it; or choose another name."
            )
        if error.errno in _NO_LOCKS:
            return _Attempt(
                warning=f"{folder} cannot be locked here: nothing stops a second start of this run."
            )
        raise
    if not os.fstat(descriptor).st_nlink:  # its last holder has just removed it
        os.close(descriptor)
        return _lock(folder)
    with suppress(OSError):  # a full disk: the lock holds, even if it cannot say whose it is
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return _Attempt(descriptor)


def _unlock(descriptor: int, folder: Path) -> None:
    """Let go. A run that failed before it started leaves no folder behind."""
    if not (folder / "status.json").exists():
        with suppress(OSError):  # there is more in the folder
            (folder / ".lock").unlink()
            folder.rmdir()
    os.close(descriptor)
