"""A run's folder of checkpoints: one file per stored step, and the best one under its own name."""

import errno
import os
import re
from pathlib import Path

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.native.header import read_record
from vision.files import replacing, sync_folder, temporary_name, write_all

BEST = "best.safetensors"
_STEP = re.compile(r"step_(\d+)\.safetensors")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_CHUNK = 16 * 2**20


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is stored."""
    return folder / f"step_{step:08d}.safetensors"


def latest(folder: Path) -> list[Path]:
    """Every checkpoint of a run, newest first. The best one comes last: it is as old as its step
    or older, but still there when all others are unreadable.
    """
    steps = [path for _, path in _steps(folder)]
    best = folder / BEST
    return [*steps, best] if best.exists() else steps


def mark_best(path: Path) -> Path:
    """Make `best.safetensors` beside `path` the same checkpoint, atomically.

    It becomes a second name of the same file, which takes no space and outlives the first; a copy
    where the file system has no hard links.
    """
    best = path.with_name(BEST)
    try:
        if not _link(path, best):
            _copy(path, best)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be made the best checkpoint: {error.strerror or error}. "
            f"The best one before it is untouched.",
            error.errno,
        ) from error
    return best


def prune(folder: Path, keep: int, step: int) -> list[Path]:
    """Remove all but the last `keep` checkpoints up to `step`, the one just stored, and return what
    was removed. The best one is never touched.

    A file after `step` is one that the run could not resume from: it neither counts nor is touched,
    else it would push out good ones. For the same reason a file with an unreadable header does not
    count.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}, but at least the last checkpoint must stay.")
    kept, removed = 0, []
    for number, path in _steps(folder):
        if number > step:
            continue
        if kept < keep:
            kept += _has_readable_header(path)
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be removed: {error.strerror or error}.", error.errno
            ) from error
        removed.append(path)
    return removed


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """The numbered checkpoints, newest first."""
    found = [(_STEP.fullmatch(path.name), path) for path in folder.glob("step_*.safetensors")]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def _has_readable_header(path: Path) -> bool:
    try:
        read_record(path)
    except CheckpointError:
        return False
    return True


def _link(path: Path, best: Path) -> bool:
    """Make `best` a second name of the file; False where that is impossible."""
    temporary = temporary_name(best)
    try:
        os.link(path, temporary)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    try:
        temporary.replace(best)
    finally:  # also after success: renaming one name of a file to another of it keeps both
        temporary.unlink(missing_ok=True)
    sync_folder(best.parent)
    return True


def _copy(path: Path, best: Path) -> None:
    with path.open("rb") as source, replacing(best) as target:
        while chunk := source.read(_CHUNK):
            write_all(target, chunk)
