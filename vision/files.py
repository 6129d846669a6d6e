"""Files that are read only if they are regular, and replaced as a whole: at any instant there is
the old content or the new one.

The new content goes to a temporary file in the same folder, is forced to the disk and renamed over
the old one. A process that dies before the renaming leaves its temporary file behind; the next
writer removes it. A living writer holds a lock on its temporary file, which dies with the process,
so two writers in one folder (a job that was requeued too early) never remove each other's work. On
a file system without locks the name of the file says whose it is.
"""

import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self

NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
"""Errors of a file system without locks."""
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}(?:-(\w+-\d+-\d+))?\.partial")
_ABANDONED_AFTER = 3600
"""Seconds without a write, by a process of another machine on a file system without locks."""
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


class ProcessIdentity(NamedTuple):
    """What distinguishes a process from all others, past and present."""

    machine: str
    """The machine since it was last started, and the numbering of its processes: in a container
    there is another one."""
    pid: int
    start: int
    """When the process started, in the machine's own count; 0 where that is unknown."""

    @classmethod
    def read(cls, text: str) -> Self:
        """The process with this text."""
        machine, pid, start = text.split("-")
        return cls(machine, int(pid), int(start))

    @property
    def text(self) -> str:
        """The identity as a part of a file's name."""
        return f"{self.machine}-{self.pid}-{self.start}"

    @property
    def has_ended(self) -> bool | None:
        """None for a process of another machine, or of this one before it was started again."""
        if self.machine != this_machine():
            return None
        start = _start_of(self.pid)
        return start is None or (0 not in (start, self.start) and start != self.start)


def this_process() -> ProcessIdentity:
    """The identity of the calling process."""
    return ProcessIdentity(this_machine(), os.getpid(), _start_of(os.getpid()) or 0)


@cache
def this_machine() -> str:
    """A digest that differs between machines, their starts, and their containers."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # both on Linux alone
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return f"{zlib.crc32(' '.join(parts).encode()):08x}"


def _start_of(pid: int) -> int | None:
    """When a process started, in ticks of the machine, or 0 where that cannot be read; None if no
    process has this number.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # another user's
        pass
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return None if state in ("Z", "X") else int(fields[18])


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
        if (found := _LEFTOVER.fullmatch(path.name)) and _is_abandoned(path, found[1]):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def temporary_name(path: Path) -> Path:
    """A free name beside `path` by which a leftover is recognised."""
    # From the system's randomness: a seeded generator would move on with every checkpoint.
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}-{this_process().text}.partial")


def make_folder(folder: Path) -> None:
    """Make a folder and those above it where they are missing, and force their names to the disk.
    Raises an OSError where that is impossible.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, so that a renaming outlives a power failure."""
    sync_file(folder)


def sync_file(path: Path) -> None:
    """Force what any process has written into a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
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
            if error.errno not in NO_LOCKS:
                file.close()
                raise
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another writer took it for a leftover before it was locked


def _is_abandoned(path: Path, writer: str | None) -> bool:
    """Whether the writer of a temporary file has ended; by the file's age where that is unknown."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except (FileNotFoundError, PermissionError):  # gone meanwhile, or another user's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        if writer and (ended := ProcessIdentity.read(writer).has_ended) is not None:
            return ended
        return _now_in(path.parent) - os.fstat(descriptor).st_mtime > _ABANDONED_AFTER
    finally:
        os.close(descriptor)
    return True


def _now_in(folder: Path) -> float:
    """The time by the clock that stamps the files of a folder, which may be a server's."""
    probe = temporary_name(folder / "clock")
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def file_version(name: str) -> str:
    """Size and time of a file, which change with its content; empty where there is no such file."""
    try:
        found = Path(name).stat()
    except (OSError, ValueError):
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"
