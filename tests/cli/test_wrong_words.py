"""Wrong words on the command line: seeded ones in great number, and those that once failed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from wrong_words import BASE, has_one_type, odd_values, settings_of, wrong_types

from vision.cli.app import COMMANDS, main
from vision.cli.composition import checked, compose, composer
from vision.config import ConfigError

ROOT = Path(__file__).parents[2]
QUICK = ("train", "predict", "info")
"""Commands whose words are tried in every run of the tests."""
WRONG_WORDS = ROOT / "tests" / "helpers" / "wrong_words.py"


def _try(command: str, seed: int, number: int, folder: Path) -> None:
    """Try wrong words of a command in a process of its own, and check all that came of them."""
    (folder / "photos").mkdir()
    (folder / "run").mkdir()
    (folder / "photo.jpg").touch()
    before = sorted(folder.rglob("*"))
    result = subprocess.run(
        [sys.executable, WRONG_WORDS, command, str(seed), str(number)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    tried = json.loads(result.stdout)
    faults = [
        one
        for one in tried
        if one["torch"]
        or (one["ran"] and one["wrong"]["sure"])
        or not (one["ran"] or (one["code"] == 2 and one["wrong"]["named"] in one["message"]))
        or len(one["message"]) > 20_000
    ]
    assert faults == []
    assert sum(one["ran"] for one in tried) < 0.4 * number
    if not any(one["ran"] for one in tried):
        assert sorted(folder.rglob("*")) == before
    assert len(tried) == number


@pytest.mark.parametrize(
    "command",
    [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in BASE],
)
def test_wrong_words_are_refused_by_name_without_traceback_or_torch(
    command: str, tmp_path: Path
) -> None:
    _try(command, seed=0, number=25, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("command", BASE)
def test_thousands_of_wrong_words_are_refused(command: str, seed: int, tmp_path: Path) -> None:
    _try(command, seed, number=100, folder=tmp_path)


def _with(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    name, dot, rest = key.partition(".")
    return {**values, name: _with(values[name], rest, value) if dot else value}


@pytest.mark.parametrize(
    "command", [c if c == "prepare" else pytest.param(c, marks=pytest.mark.slow) for c in BASE]
)
def test_every_odd_value_of_every_setting_is_taken_or_refused_by_name(command: str) -> None:
    """All of them, which composing with Hydra would be too slow for: parsed alone."""
    settings, _ = settings_of(command)
    values, chosen = compose(command, BASE[command])
    with composer(command) as yaml:
        read = {
            word: override.value()
            for word in {*odd_values(), *(w for v in settings.values() for w in wrong_types(v))}
            for override in yaml.read([f"key={word}"])[0]
            if not override.is_sweep_override()
        }
    faults = []
    for key, usual in settings.items():
        wrong = wrong_types(usual) if has_one_type(usual) else []
        for word in read.keys() & {*odd_values(), *wrong_types(usual)}:
            try:
                checked(COMMANDS[command], _with(values, key, read[word]), chosen)
            except ConfigError as error:
                named = key in str(error) and len(str(error)) < 20_000
            else:
                named = word not in wrong
            faults += [] if named else [f"{key}={word[:40]}"]
    assert faults == []


def test_wrong_words_are_tried_for_every_command() -> None:
    assert set(BASE) == set(COMMANDS)


FORMERLY_FAILED = {
    "predict checkpoint=run images=2024": "images",
    "predict checkpoint=run images=null": "images",
    "compare runs=0": "runs",
    "train optimizer.betas.x=0.8": "optimizer.betas.x",
    "train augment.cutmix=1e400": "augment.cutmix",
    "train data.channels=true": "data.channels",
    "train data=webdataset data.root=run data.channels=1.0": "data.channels",
    "train model.heads=2024": "model.heads",
    "train model.width=2023": "model.width",
    "train model=swin_tiny model.heads=[4,4]": "model.heads",
    "train seed=18446744073709551616": "seed",
    "train seed=${nothing}": "seed",
    "train model.depth=${oc.env:NO_SUCH_VARIABLE}": "model.depth",
    f"train seed={'[' * 500}{']' * 500}": "seed",
    f"train seed={'9' * 5000}": "seed",
    f"predict checkpoint=run images={'x' * 300}.jpg": "images",
    f"predict checkpoint={'x' * 300} images=photo.jpg": "checkpoint",
    f"train data=folder data.root={'x' * 300}": "data.root",
    f"visualize checkpoint=run images=photo.jpg data/x={'x' * 300}": "data/x=",
    f"compare runs=[run] ++metric/x={'x' * 300}": "metric/x=",
    "train data=folder data.root=${hydra:nothing}": "data.root",
    "train data=folder data.root=x/${hydra:job.num}": "data.root",
    "data output=x.txt": "output",
    "data output=folder": "output",
    "data output=photo.jpg/x.png": "photo.jpg is not a folder",
    "visualize checkpoint=run images=photo.jpg output=photo.jpg": "output",
    "prepare data.root=folder output=photo.jpg": "output",
    "predict checkpoint=run images=photo.jpg output=folder": "output",
    "compare runs=[run] output=photo.jpg/x": "output",
    "info --config-dir": "--config-dir",
    "info hydra.job_logging.root=5": "root logger",
}


@pytest.mark.parametrize("line", FORMERLY_FAILED)
def test_ordinary_words_that_once_ended_in_tracebacks_or_were_not_named(
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.jpg").touch()
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main(line.split()) == 2
    assert FORMERLY_FAILED[line] in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_list_of_forty_images_is_not_taken_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ",".join(f"photo-{number:04}.jpg" for number in range(40))
    assert main(["predict", "checkpoint=nowhere", f"images=[{names}]"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_image_that_cannot_be_prepared_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "a" / "2.png").write_bytes(b"not an image")
    words = ["data.root=photos", "data.val_fraction=0.25", "output=shards", "workers=0"]
    assert main(["prepare", *words]) == 1
    assert "a/2.png" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_to_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "locked").mkdir(mode=0o500)
    assert main(["data", "output=locked/x.png"]) == 2
    assert "output" in capsys.readouterr().err
