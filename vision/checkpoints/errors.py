"""What can go wrong with a checkpoint file."""

from vision.config import UserError


class CheckpointError(UserError, OSError):
    """A checkpoint that could not be written or read; the message names the file and says what to
    do. `errno` is that of the system's error, where there was one.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class NewerFormatError(CheckpointError):
    """An intact checkpoint that only a later version of this project can read."""
