"""Files of a run that are missing or damaged: checkpoints are what counts, nothing is repeated or
lost in silence, and messages name the file and what to do.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from finetune_runs import stop_after
from small_runs import (
    assert_same_bits,
    folder_of_images,
    last_tensors,
    metrics,
    small_config,
    status,
    words,
)

import vision.files
from vision.cli.app import main
from vision.config import ConfigError
from vision.training.loop import train
from vision.training.run.run_folder import PREEMPTED, Run
from vision.training.run.run_settings import changes, run_name

SETTINGS = ["duration=8steps", "checkpoint.every=2steps", "evaluate_every=4steps"]


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `out` with a run that was stopped after its fifth step."""
    with monkeypatch.context() as patch:
        stop_after(patch, [4])
        assert train(small_config(tmp_path / "out", *SETTINGS)) == PREEMPTED
    return tmp_path / "out"


def resume(folder: Path, *more: str) -> int:
    return train(small_config(folder, *SETTINGS, *more))


def assert_as_undisturbed(folder: Path) -> None:
    """The run ended in the weights and the numbers of one that was never touched."""
    whole = folder.parent / "whole"
    assert resume(whole) == 0
    assert_same_bits(last_tensors(whole), last_tensors(folder))
    for split in ("train", "val"):
        found, expected = ([e["loss"] for e in metrics(f, split)] for f in (folder, whole))
        assert found == expected


@pytest.mark.parametrize("missing", [["status.json"], ["status.json", "config.json"]])
def test_run_without_status_or_settings_is_resumed_from_its_checkpoint_and_says_so(
    stopped: Path, missing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.loads((stopped / "run" / "config.json").read_text())
    for name in missing:
        (stopped / "run" / name).unlink()
    capsys.readouterr()
    assert resume(stopped) == 0
    output = capsys.readouterr().out
    assert "after step 5" in output
    assert all(f"{stopped / 'run' / name} was missing" in output for name in missing)
    assert json.loads((stopped / "run" / "config.json").read_text()) == before
    assert status(stopped)["status"] == "finished"
    assert_as_undisturbed(stopped)


def test_run_without_status_and_settings_still_refuses_other_settings(stopped: Path) -> None:
    for name in ("status.json", "config.json"):
        (stopped / "run" / name).unlink()
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate: .* → 0.5"):
        resume(stopped, "optimizer.learning_rate=0.5")
    with pytest.raises(ConfigError, match="exists"):
        resume(stopped, "on_existing=refuse")


def test_finished_run_without_status_is_not_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(tmp_path / "out") == 0
    before = metrics(tmp_path / "out")
    (tmp_path / "out" / "run" / "status.json").unlink()
    assert resume(tmp_path / "out") == 0
    assert metrics(tmp_path / "out") == before
    assert status(tmp_path / "out")["status"] == "finished"


def test_run_killed_before_its_first_checkpoint_starts_again_without_repeated_numbers(
    stopped: Path,
) -> None:
    for file in (stopped / "run" / "checkpoints").iterdir():
        file.unlink()
    for name in ("status.json", "config.json"):
        (stopped / "run" / name).unlink()
    assert resume(stopped) == 0
    assert (stopped / "run" / "config.json").exists()
    assert_as_undisturbed(stopped)


@pytest.mark.parametrize("name", ["status.json", "config.json"])
def test_damaged_status_or_settings_name_the_file_and_removing_it_helps(
    stopped: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, config = stopped / "run" / name, small_config(stopped, *SETTINGS)
    contents = ["", "{", "[]", '"x"', "\0\0", "[" * 9999]
    for content in [*contents, '{"status": 5}'] if name == "status.json" else contents:
        file.write_text(content)
        with pytest.raises(ConfigError, match=f"{file} is damaged: .*Remove this one file"):
            Run(stopped / "run").decision(config)
    capsys.readouterr()
    assert main(["train", *words(stopped, *SETTINGS)]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert f"{file} is damaged" in message
    file.unlink()
    assert resume(stopped) == 0
    assert "after step 5" in capsys.readouterr().out


def test_damaged_numbers_name_the_line_and_removing_it_helps(stopped: Path) -> None:
    file = stopped / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1][5:], "7", *lines[2:]]) + "\n")
    with pytest.raises(ConfigError, match=rf"{file}, line 2 is damaged .*remove it"):
        resume(stopped)
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        Run(stopped / "run").events()
    file.write_text("\n".join(lines) + "\n")
    assert resume(stopped) == 0
    assert_as_undisturbed(stopped)


def test_numbers_after_the_checkpoint_are_repeated_however_damaged(stopped: Path) -> None:
    file = stopped / "run" / "metrics.jsonl"
    later = json.dumps({"step": 6, "split": "train", "loss": 9.0})
    with file.open("a") as stream:
        stream.write(f"\0\0\0\n{later}\n{later[:-9]}")
    assert resume(stopped) == 0
    assert_as_undisturbed(stopped)


def test_skipped_images_outlive_a_resume_and_are_counted_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = folder_of_images(tmp_path / "images", 20)
    (images / "dark" / "0.png").write_text("not an image")
    data = ["data=folder", f"data.root={images}", "data.val_fraction=0.2"]
    data += ["data.on_error=skip", "data.max_error_share=0.5"]
    arguments = words(tmp_path, *SETTINGS, *data, shapes=False)
    with monkeypatch.context() as patch:
        stop_after(patch, [5])
        assert main(["train", *arguments]) == PREEMPTED
    run = Run(tmp_path / "run")
    (first,) = (run.folder / "skipped-0.jsonl").read_text().splitlines()
    (images / "dark" / "0.png").write_bytes((images / "dark" / "1.png").read_bytes())
    for number in range(8):  # more than one of them is in the batches that are left
        (images / "light" / f"{number}.png").write_text("not an image")
    assert main(["train", *arguments]) == 0
    after = (run.folder / "skipped-0.jsonl").read_text().splitlines()
    assert first in after and len(after) > 2
    assert f"{len(after)} images could not be read" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", ".", "..", "../../x", "a/../../b", "/tmp/x", "a/..", "./."])
def test_name_that_is_not_a_folder_below_the_output_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert main(["train", *words(tmp_path / "out"), f"name={name}"]) == 2
    message = capsys.readouterr().err
    assert f"name: '{name}'" in message or (not name and "name: should have" in message)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not list((tmp_path / "out").iterdir())


def test_files_and_folders_of_a_run_are_forced_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of new folders as well; numbers before the checkpoint that they lead to."""
    synced: list[Path] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr(vision.files.os, "fsync", fsync)
    assert train(small_config(tmp_path / "a" / "out", "duration=2steps")) == 0
    run = tmp_path / "a" / "out" / "run"
    assert {tmp_path, tmp_path / "a", run.parent, run, run / "metrics.jsonl"} <= set(synced)
    partial: Any = [path.name.split(".json")[0] for path in synced if path.suffix == ".partial"]
    assert {".status", ".config"} <= set(partial)
    checkpoint = next(n for n, path in enumerate(synced) if path.name.startswith(".step_"))
    assert run / "metrics.jsonl" in synced[:checkpoint]
    last_status = max(n for n, path in enumerate(synced) if path.name.startswith(".status"))
    assert run in synced[last_status:]


def test_run_of_a_version_without_a_setting_keeps_its_name_and_is_resumed(tmp_path: Path) -> None:
    settings = small_config(tmp_path).model_dump(mode="json")
    older = {name: value for name, value in settings.items() if name != "task"}
    assert run_name(older, "x") == run_name(settings, "x")
    assert changes(older, settings) == []
    assert changes(older, settings | {"task": {"kind": "other"}}) != []
