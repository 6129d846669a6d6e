"""A run's folder of checkpoints: one file per stored step, and the best one under its own name.

The record of each says which step was the best when it was stored. A run that is resumed from any
of them, after a kill at any instant, thus gets back the best checkpoint that it had by then.
"""

import errno
import os
import re
from pathlib import Path

from vision.checkpoints.errors import CheckpointError, system_errors
from vision.checkpoints.native.header import Record, read_record
from vision.files import replacing, sync_folder, temporary_name, write_all

FOLDER = "checkpoints"
"""Of a run."""
BEST = "best.safetensors"
_STEP = re.compile(r"step_(\d+)\.safetensors")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_CHUNK = 16 * 2**20


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is stored."""
    return folder / f"step_{step:08d}.safetensors"


def run_of(file: Path) -> Path | None:
    """The folder of the run that a checkpoint belongs to; None if it is elsewhere."""
    return file.parent.parent if file.parent.name == FOLDER else None


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
    failure = f"{path} cannot be made the best checkpoint"
    with system_errors(failure, "The best one before it is untouched."):
        if not _link(path, best):
            _copy(path, best)
    return best


def recorded_best(folder: Path, record: Record) -> int | None:
    """The step that was the best of a run when it stored this record; None: there was none yet."""
    if "best_step" in record or record["best"] is None:
        return record.get("best_step")
    # A version that did not record it wrote the checkpoint, and perhaps was killed before it marked
    # it as the best.
    best = _readable_record(folder / BEST)
    evaluated = record["evaluated"] == record["step"]
    if evaluated and (best is None or best["best"] != record["best"]):
        return int(record["step"])
    return None if best is None else int(best["step"])


def restore_best(folder: Path, step: int | None) -> bool:
    """Make `best.safetensors` the checkpoint of a step, or remove it if there is no best step yet.
    False if that checkpoint is gone.
    """
    if step is None:
        (folder / BEST).unlink(missing_ok=True)
        return True
    best = _readable_record(folder / BEST)
    if best is not None and best["step"] == step:
        return True
    path = step_path(folder, step)
    if _readable_record(path) is None:
        return False
    mark_best(path)
    return True


def prune(folder: Path, keep: int, step: int) -> list[Path]:
    """Remove all but the last `keep` checkpoints up to `step`, the one just stored, and those that
    were the best when these were stored; return what was removed. The best one is never touched.

    A file after `step` is one that the run could not resume from: it neither counts nor is touched,
    else it would push out good ones. For the same reason a file with an unreadable header does not
    count.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}, but at least the last checkpoint must stay.")
    kept, removed = 0, []
    best: set[int | None] = set()
    for number, path in _steps(folder):
        if number > step:
            continue
        if kept < keep:
            record = _readable_record(path)
            if record is not None:
                kept += 1
                best.add(record.get("best_step"))
            continue
        if number in best:
            continue
        with system_errors(f"{path} cannot be removed"):
            path.unlink(missing_ok=True)
        removed.append(path)
    return removed


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """The numbered checkpoints, newest first."""
    found = [(_STEP.fullmatch(path.name), path) for path in folder.glob("step_*.safetensors")]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def _readable_record(path: Path) -> Record | None:
    """The record of a checkpoint; None if there is no file, or none with a readable header."""
    try:
        return read_record(path)
    except CheckpointError:
        return None


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
