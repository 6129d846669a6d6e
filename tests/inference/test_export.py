"""Exports run without this project and give the same answers."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from untrained_runs import a_run

import vision
from vision.cli.app import main
from vision.inference.export import ExportError, largest_difference

FAMILIES = {
    "vit": (),
    "swin": ("model=swin_mini", "model.width=24", "model.window=3"),
    "swin_v2": ("model=swinv2_mini", "model.width=24", "model.window=3"),
    "conv_stem": ("model=vit_fast", "model.width=24", "model.heads=2"),
}


QUICK = [("vit", "onnx"), ("swin_v2", "torch_export"), ("swin", "safetensors")]
"""Every family and every format once; the other pairs take longer than they tell."""
EXPORTS = [
    pytest.param(family, kind, marks=() if (family, kind) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for kind in ("onnx", "torch_export", "safetensors")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of every family."""
    folder = tmp_path_factory.mktemp("runs")
    return {family: a_run(folder / family, *words) for family, words in FAMILIES.items()}


def umask() -> int:
    """What new files of this process lack."""
    before = os.umask(0)
    os.umask(before)
    return before


def photo(folder: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    path = folder / "photo.jpg"
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize(("family", "kind"), EXPORTS)
def test_export_runs_by_its_own_readme_and_gives_the_same_class(
    runs: dict[str, Path], family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    folder, run = tmp_path / kind, runs[family]
    assert main(["export", f"checkpoint={run}", f"format={kind}", f"output={folder}"]) == 0
    assert "largest difference" in capsys.readouterr().out
    image = photo(folder)
    monkeypatch.chdir(folder)
    text = folder.joinpath("README.md").read_text()
    names: dict[str, object] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    logits = np.asarray(names["logits"])
    loaded = vision.load(run)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.split(maxsplit=1)[1] == loaded.predict(image).label
    assert {oct(path.stat().st_mode & 0o777) for path in folder.glob("[!p]*")} == {
        oct(0o666 & ~umask())
    }
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask()
    shares = np.exp(logits[0] - logits[0].max())
    assert shares.max() / shares.sum() == pytest.approx(loaded.predict(image).probability, abs=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_as_safetensors_holds_weights_preprocessing_and_classes(
    runs: dict[str, Path], family: str, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    folder, run = tmp_path / "out", runs[family]
    assert main(["export", f"checkpoint={run}", "format=safetensors", f"output={folder}"]) == 0
    loaded = vision.load(run)
    stored = load_file(folder / "model.safetensors")
    expected = loaded.model.state_dict()
    assert set(stored) == set(expected)
    assert all((stored[name] == expected[name].numpy()).all() for name in expected)
    assert folder.joinpath("classes.txt").read_text().split() == list(loaded.classes)
    assert json.loads(folder.joinpath("preprocess.json").read_text())["image_size"] == [24, 24]


@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_export_that_differs_from_its_model_is_not_written(
    tmp_path: Path,
    difference: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("vision.inference.export.largest_difference", lambda *_: difference)
    run, folder = a_run(tmp_path / "run"), tmp_path / "out"
    words = [f"checkpoint={run}", "format=safetensors", f"output={folder}"]
    assert main(["export", *words]) == 1
    assert "nothing was written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_largest_difference_sees_other_probabilities_and_other_shapes(tmp_path: Path) -> None:
    loaded = vision.load(a_run(tmp_path / "run"))
    assert largest_difference(loaded, lambda images: loaded.model(images) + 3) < 1e-6
    assert largest_difference(loaded, lambda images: 2 * loaded.model(images)) > 1e-3
    assert math.isnan(largest_difference(loaded, lambda images: loaded.model(images) * math.nan))
    with pytest.raises(ExportError, match="the export gives"):
        largest_difference(loaded, lambda images: loaded.model(images)[:, :2])


def test_export_over_existing_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run")
    tmp_path.joinpath("kept.txt").write_text("mine")
    words = [f"checkpoint={run}", "format=safetensors", f"output={tmp_path}"]
    assert main(["export", *words]) == 2
    assert "already exists" in capsys.readouterr().err
    assert tmp_path.joinpath("kept.txt").read_text() == "mine"
