"""Files that are read only if they are regular, and replaced as a whole: at any instant there is
the old content or the new one.

The new content goes to a temporary file in the same folder, is forced to the disk and renamed over
the old one. A process that dies before the renaming leaves its temporary file behind; the next
writer removes it. A living writer holds a lock on its temporary file, which dies with the process,
so two writers in one folder (a job that was requeued too early) never remove each other's work.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_ABANDONED_AFTER = 3600
"""Seconds without a write, on a file system without locks."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
_CHUNK = 64 * 2**20


def exists(path: str) -> bool:
    """Whether there is something at a path; False, too, for a name that no file can have."""
    return os.path.exists(path)  # noqa: PTH110 (Path.exists raises for a name that is too long)


def open_file(path: Path | str) -> BufferedReader:
    """Open a regular file to read. Opening a FIFO may wait for ever, and reading a device may never
    end: both are an OSError that names the file, like every other failure.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    raise OSError(errno.EINVAL, "Not a regular file (a FIFO or a device)", str(path))


def read_file(path: Path | str) -> bytes:
    """Return the content of a regular file."""
    with open_file(path) as file:
        return file.read()


def spreadsheet_cell(value: Any) -> Any:
    """A cell of a CSV file for people: a text that a spreadsheet would run as a formula gets an
    apostrophe before it. Numbers are left as they are.
    """
    if not isinstance(value, str) or not value.startswith(_FORMULA) or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"


def files_below(folder: Path) -> list[Path]:
    """All files below a folder, sorted; an OSError if a folder cannot be read (`rglob` would skip
    it).
    """

    def refuse(error: OSError) -> None:
        raise error

    walk = os.walk(folder, onerror=refuse)
    return sorted(Path(place, name) for place, _, names in walk for name in names)


def unwritable(path: Path, folder: bool | None) -> str:
    """The reason why a file or a folder cannot be written, as far as it is known before; or ""."""
    if folder is not None and exists(str(path)) and path.is_dir() != folder:
        return "it is a file, not a folder." if folder else "it is a folder; name a file in it."
    place = path
    while not exists(str(place)) and place != place.parent:
        place = place.parent
    if place != path and not place.is_dir():
        return f"{place} is not a folder."
    if not os.access(place, os.W_OK):
        return f"permission denied for {place}."
    return ""


@contextmanager
def replacing(path: Path) -> Iterator[FileIO]:
    """A file to write that takes the place of `path` when the block ends without an exception."""
    remove_leftovers(path.parent)
    file = _create(path)
    temporary = Path(os.fsdecode(file.name))
    try:
        with file:
            yield file
            os.fsync(file.fileno())
            temporary.replace(path)  # while the lock is held
    except BaseException:
        # What failed is the news. If the file cannot be removed either, the next writer will.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace the content of a file, which is made if it does not exist."""
    with replacing(path) as file:
        write_all(file, text.encode())


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write every byte: a single call may write less, as on a disk that is nearly full."""
    rest = memoryview(data)
    while rest.nbytes:
        rest = rest[file.write(rest[:_CHUNK]) :]


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what writers that died left in a folder, and say what was removed."""
    removed = []
    for path in folder.glob(".*.partial"):
        if _LEFTOVER.fullmatch(path.name) and _is_abandoned(path):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def temporary_name(path: Path) -> Path:
    """A free name beside `path` by which a leftover is recognised."""
    # From the system's randomness: a seeded generator would move on with every checkpoint.
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, so that a renaming outlives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot sync a folder, and need not
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _create(path: Path) -> FileIO:
    """A new temporary file for `path`, locked."""
    while True:
        file = FileIO(temporary_name(path), "x")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another writer took it for a leftover before it was locked


def _is_abandoned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except (FileNotFoundError, PermissionError):  # gone meanwhile, or another user's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_AFTER
    finally:
        os.close(descriptor)
    return True
