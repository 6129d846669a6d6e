"""A run's folder: which checkpoint is opened, which stay, and which is the best."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from vision.checkpoints.errors import CheckpointError, NewerFormatError
from vision.checkpoints.native import header as record_module
from vision.checkpoints.native.checkpoint import (
    open_latest,
    read_checkpoint,
    write_checkpoint,
)
from vision.checkpoints.native.checkpoint_folder import (
    BEST,
    latest,
    mark_best,
    prune,
    recorded_best,
    restore_best,
    step_path,
)
from vision.checkpoints.native.header import read_record


def store(folder: Path, *steps: int, best: dict[int, int | None] | None = None) -> list[Path]:
    """Checkpoints of these steps; `best` has what was the best step at some of them."""
    paths = [step_path(folder, step) for step in steps]
    for step, path in zip(steps, paths, strict=True):
        record = {"step": step}
        if best is not None:
            record |= {"best_step": best[step]}
        write_checkpoint(path, {"w": torch.full((8,), float(step))}, record)
    return paths


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def spoil(path: Path) -> None:
    """Change one byte of the last tensor: only its checksum can tell."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def no_links(*_: object) -> None:
    raise OSError(errno.EPERM, "not permitted")


def test_latest_orders_by_the_number_of_the_step_and_ends_with_the_best(tmp_path: Path) -> None:
    store(tmp_path, 900, 1200, 123_456_789, 99_999_999)
    mark_best(step_path(tmp_path, 900))
    for other in ("step_x.safetensors", "step_5.safetensors.old", "notes.txt"):
        (tmp_path / other).touch()
    assert [path.name for path in latest(tmp_path)] == [
        "step_123456789.safetensors",
        "step_99999999.safetensors",
        "step_00001200.safetensors",
        "step_00000900.safetensors",
        "best.safetensors",
    ]


def test_open_latest_without_checkpoints_gives_nothing(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") == []
    assert open_latest(tmp_path / "none") is None
    assert open_latest(tmp_path) is None


def test_open_latest_gives_the_newest_without_warning(tmp_path: Path) -> None:
    store(tmp_path, 1, 2)
    opened = open_latest(tmp_path)
    assert opened is not None
    assert opened.path == step_path(tmp_path, 2) and opened.warnings == []
    assert opened.checkpoint.record["step"] == 2 and opened.checkpoint.tensors["w"][0] == 2


def test_open_latest_goes_back_past_unreadable_ones_and_says_why(tmp_path: Path) -> None:
    _, second, third, fourth = store(tmp_path, 1, 2, 3, 4)
    fourth.write_bytes(b"")
    third.write_bytes(third.read_bytes()[:-5])
    spoil(second)
    opened = open_latest(tmp_path)
    assert opened is not None and opened.path.name == "step_00000001.safetensors"
    assert opened.checkpoint.record["step"] == 1
    expected = ["0004.*not complete: 0 bytes", "0003.*not complete", "0002.*checksum of 'w'"]
    assert len(opened.warnings) == 3
    for warning, pattern in zip(opened.warnings, expected, strict=True):
        assert re.search(pattern, warning) and "Went back to step_00000001" in warning


def test_open_latest_takes_the_best_when_no_numbered_one_can_be_read(tmp_path: Path) -> None:
    first, second = store(tmp_path, 1, 2)
    mark_best(first)
    first.unlink()
    spoil(second)
    opened = open_latest(tmp_path)
    assert opened is not None and opened.path.name == "best.safetensors"
    assert opened.checkpoint.record["step"] == 1


def test_open_latest_fails_when_none_can_be_read(tmp_path: Path) -> None:
    for path in store(tmp_path, 1, 2):
        spoil(path)
    with pytest.raises(CheckpointError, match=r"None of the 2 checkpoints.*\n.*0002.*\n.*0001"):
        open_latest(tmp_path)


def test_open_latest_does_not_go_back_past_a_newer_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path, 1)
    with monkeypatch.context() as later:
        later.setattr(record_module, "FORMAT", 9)
        store(tmp_path, 2)
    with pytest.raises(NewerFormatError, match="format 9"):
        open_latest(tmp_path)


def test_best_outlives_the_step_that_it_was(tmp_path: Path) -> None:
    first, second = store(tmp_path, 1, 2)
    best = mark_best(first)
    assert best == tmp_path / "best.safetensors" and best.samefile(first)
    first.unlink()
    assert read_record(best)["step"] == 1
    mark_best(second)
    mark_best(second)
    assert read_record(best)["step"] == 2
    store(tmp_path, 2)  # a resumed run stores a step again: the best one is another file now
    assert read_record(best)["step"] == 2 and not best.samefile(second)
    assert names(tmp_path) == ["best.safetensors", "step_00000002.safetensors"]


def test_best_is_a_copy_where_files_have_one_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    first, second = store(tmp_path, 1, 2)
    mark_best(first)
    best = mark_best(second)
    assert not best.samefile(second) and best.read_bytes() == second.read_bytes()
    assert len(names(tmp_path)) == 3


def test_mark_best_of_a_missing_file_leaves_the_best(tmp_path: Path) -> None:
    best = mark_best(store(tmp_path, 1)[0])
    with pytest.raises(
        CheckpointError, match=r"0007.* cannot be made the best checkpoint: No such"
    ):
        mark_best(step_path(tmp_path, 7))
    assert read_record(best)["step"] == 1
    assert len(names(tmp_path)) == 2


def test_mark_best_that_fails_at_the_renaming_leaves_the_best_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = store(tmp_path, 1, 2)
    best = mark_best(first)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        mark_best(second)
    assert read_record(best)["step"] == 1
    assert len(names(tmp_path)) == 3


def test_prune_keeps_the_last_ones_and_the_best(tmp_path: Path) -> None:
    paths = store(tmp_path, 1, 2, 3, 4, 5)
    mark_best(paths[0])
    assert prune(tmp_path, keep=2, step=5) == [paths[2], paths[1], paths[0]]
    assert names(tmp_path) == [
        "best.safetensors",
        "step_00000004.safetensors",
        "step_00000005.safetensors",
    ]
    assert read_checkpoint(tmp_path / "best.safetensors").record["step"] == 1
    assert prune(tmp_path, keep=9, step=5) == []


def test_prune_never_removes_the_one_just_stored_for_a_newer_one_that_is_spoilt(
    tmp_path: Path,
) -> None:
    paths = store(tmp_path, 1, 2, 3, 9)
    spoil(paths[3])
    assert prune(tmp_path, keep=1, step=3) == [paths[1], paths[0]]
    assert latest(tmp_path) == [paths[3], paths[2]]


def test_prune_does_not_count_one_that_is_cut_short(tmp_path: Path) -> None:
    paths = store(tmp_path, 1, 2, 3, 4)
    paths[2].write_bytes(paths[2].read_bytes()[:100])
    assert prune(tmp_path, keep=2, step=4) == [paths[0]]
    assert latest(tmp_path) == [paths[3], paths[2], paths[1]]


def test_prune_keeps_what_was_the_best_when_a_kept_one_was_stored(tmp_path: Path) -> None:
    paths = store(tmp_path, 1, 2, 3, 4, best={1: None, 2: 2, 3: 2, 4: 4})
    assert prune(tmp_path, keep=2, step=4) == [paths[0]]
    assert prune(tmp_path, keep=1, step=4) == [paths[2], paths[1]]


@pytest.mark.parametrize("links", [True, False])
def test_restored_best_is_that_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    first, second = store(tmp_path, 1, 2)
    best = tmp_path / BEST
    for step in (1, 2, 2, 1):
        assert restore_best(tmp_path, step)
        assert read_record(best)["step"] == step
    spoilt = second.read_bytes()[:100]
    second.write_bytes(spoilt)
    assert not restore_best(tmp_path, 2)
    assert not restore_best(tmp_path, 3)
    assert read_record(best)["step"] == 1  # untouched
    best.write_bytes(spoilt)
    if links:
        store(tmp_path, 1)
    assert restore_best(tmp_path, 1)
    assert read_record(best)["step"] == 1
    assert restore_best(tmp_path, None) and restore_best(tmp_path, None)
    assert names(tmp_path) == [first.name, second.name]


def test_best_step_of_a_record_without_one_is_that_of_the_best_or_its_own(tmp_path: Path) -> None:
    assert recorded_best(tmp_path, {"step": 5, "best": 0.1, "best_step": 3}) == 3
    assert recorded_best(tmp_path, {"step": 5, "best": None, "best_step": None}) is None
    assert recorded_best(tmp_path, {"step": 5, "best": None}) is None
    evaluated = {"step": 5, "best": 0.1, "evaluated": 5}
    assert recorded_best(tmp_path, evaluated) == 5  # killed before it was marked
    write_checkpoint(tmp_path / BEST, {}, {"step": 3, "best": 0.2, "evaluated": 3})
    assert recorded_best(tmp_path, evaluated) == 5
    assert recorded_best(tmp_path, {"step": 5, "best": 0.2, "evaluated": 5}) == 3
    assert recorded_best(tmp_path, {"step": 5, "best": 0.2, "evaluated": 3}) == 3


def test_prune_of_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep = 0"):
        prune(tmp_path, keep=0, step=1)
