"""Errors of reading and writing checkpoint files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vision.config import UserError

OLDER = "Use an older checkpoint of the run, or a copy of this one."
"""What to do about a damaged checkpoint of this project."""


class CheckpointError(UserError, OSError):
    """A checkpoint that could not be written or read; the message names the file and says what to
    do. `errno` is that of the system's error, where there was one.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class NewerFormatError(CheckpointError):
    """An intact checkpoint that only a later version of this project can read."""


class MalformedError(ValueError):
    """A pickle, archive or header that does not make sense; the message says where."""


@contextmanager
def system_errors(failure: str, advice: Callable[[int | None], str] | str = "") -> Iterator[None]:
    """What the system says about a file becomes a CheckpointError: the failure, such as "best.pth
    cannot be written", the reason, and what to do about it, which may depend on `errno`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        remedy = advice if isinstance(advice, str) else advice(error.errno)
        reason = f"{failure}: {error.strerror or error}. {remedy}".rstrip()
        raise CheckpointError(reason, error.errno) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """What the system says about a file, with the file's name."""
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path} does not exist.", error.errno)
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}.", error.errno)
