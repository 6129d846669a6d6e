"""A new folder of files that appears as a whole or not at all."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vision.config import ConfigError


def check_new(output: Path) -> None:
    """Refuse to overwrite anything: a file, or a folder that is not empty."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output: {output} already exists; remove it or choose another.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which a renaming puts in place at the end. Beside it, in its parent, there
    is room for files that are not kept.
    """
    check_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"output: {folder} cannot be written: {reason}.") from error
    with scratch as name:
        part = Path(name) / "part"  # with the usual permissions, unlike its parent
        part.mkdir()
        yield part
        part.rename(folder)
