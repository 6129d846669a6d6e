"""The programs under examples/, each run as its first lines say, on small data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from page_commands import ROOT
from served_runs import noise, serving
from untrained_runs import a_run

from vision.cli.app import main

EXAMPLES = ROOT / "examples"
TINY = (
    *("model.width=32", "model.depth=1", "model.heads=2", "duration=1epochs", "batch_size=16"),
    *("loader.workers=0", "device=cpu"),
)
SHAPES = ("data.train_samples=64", "data.val_samples=16")


def run(folder: Path, name: str, *words: str) -> str:
    """What an example prints, with `vision` and `python` of these tests in the path."""
    program = ["bash"] if name.endswith(".sh") else [sys.executable]
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*program, str(EXAMPLES / name), *words],
        cwd=folder,
        env=os.environ | own | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_attention_of_a_timm_model(tmp_path: Path) -> None:
    source = a_run(tmp_path / "run")
    assert main(["convert", f"source={source}", "format=timm", f"output={tmp_path / 'timm'}"]) == 0
    (tmp_path / "photo.png").write_bytes(noise())
    lines = (EXAMPLES / "timm_attention.py").read_text().partition('"""\n\n')[2]
    assert len([line for line in lines.splitlines() if line]) <= 10
    assert "(" in run(tmp_path, "timm_attention.py", str(tmp_path / "timm"), "photo.png")
    assert (tmp_path / "attention.png").stat().st_size > 10_000


def test_server_is_asked(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(noise())
    with serving(f"checkpoint={a_run(tmp_path / 'run')}") as server:
        text = run(tmp_path, "ask_server.py", "photo.png", server.address)
        top = server.post("/predict").json()["top"]
    assert [line.split()[1] for line in text.splitlines()] == [each["label"] for each in top]


@pytest.mark.slow
def test_own_photos(tmp_path: Path) -> None:
    for number in range(10):
        for name in ("cat", "dog"):
            path = tmp_path / "photos" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(noise(60, 60, seed=2 * number + (name == "dog")))
    small = ("model=vit_mini", "data.image_size=24", *TINY)
    run(tmp_path, "own_photos.sh", "photos", *small)
    assert (tmp_path / "outputs/photos/evaluation/val/report.html").is_file()
    assert len(list((tmp_path / "outputs/photos/looks").rglob("*.html"))) == 3


@pytest.mark.slow
def test_sweep(tmp_path: Path) -> None:
    both = ("model=vit_mini", "model.positions=learned,none", "seed=0,1")
    text = run(tmp_path, "sweep.sh", *both, *TINY, *SHAPES)
    assert len(list((tmp_path / "outputs/sweep").glob("*__seed-*/status.json"))) == 4
    assert "±" in text


@pytest.mark.slow
def test_own_dataset(tmp_path: Path) -> None:
    text = run(tmp_path, "own_dataset.py", *TINY, "duration=2epochs")
    assert "outputs/" in text and "horizontal" in text
