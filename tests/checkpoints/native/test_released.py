"""Checkpoints of every released version open with the same logits, and their runs are resumed.

python tests/checkpoints/native/test_released.py    # store those of this version, at a release
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers"))  # as a script
from small_runs import metrics, small_config, status

from vision import __version__
from vision.checkpoints.native.checkpoint_folder import latest, step_path
from vision.checkpoints.open import open_model
from vision.training.loop import train

RELEASED = Path(__file__).parents[1] / "released"
RUNS = {
    "vit": ("vit_mini", ["ema=0.9"]),
    "vit_lora": ("vit_mini", ["tune=lora"]),
    "vit_conv_stem": ("vit_mini", ["model.stem=conv_whitened", "optimizer.name=muon"]),
    "swin": ("swin_mini", ["model.width=8"]),
    "swin_v2": ("swinv2_mini", ["model.width=8"]),
}
STEPS = 4


def settings(name: str) -> list[str]:
    return [f"duration={2 * STEPS}steps", f"checkpoint.every={STEPS}steps", *RUNS[name][1]]


def logits(path: Path) -> list[float]:
    """The logits of one image, in double precision: the same to many digits on every processor."""
    opened = open_model(path)
    image = torch.linspace(-2, 2, 3 * 16 * 16, dtype=torch.float64).sin().reshape(1, 3, 16, 16)
    with torch.inference_mode():
        return opened.model.double().eval()(image)[0].tolist()


@pytest.mark.parametrize("file", sorted(RELEASED.rglob("*.safetensors")), ids=lambda f: f.stem)
def test_checkpoint_of_a_released_version_has_its_logits(file: Path) -> None:
    stored = json.loads((file.parent / "logits.json").read_text())
    assert logits(file) == pytest.approx(stored[file.stem], abs=1e-9)


@pytest.mark.parametrize("file", sorted(RELEASED.rglob("*.safetensors")), ids=lambda f: f.stem)
def test_run_of_a_released_version_is_resumed(file: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    shutil.copy(file, step_path(checkpoints, STEPS))
    config = small_config(tmp_path, *settings(file.stem), model=RUNS[file.stem][0])
    assert train(config) == 0
    assert status(tmp_path)["status"] == "finished"
    assert latest(checkpoints)[0] == step_path(checkpoints, 2 * STEPS)
    assert [event["step"] for event in metrics(tmp_path)] == [*range(STEPS + 1, 2 * STEPS + 1)]


def store() -> None:
    """Store a checkpoint of each kind, in the middle of its run, and its logits."""
    folder = RELEASED / __version__
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, (model, _) in RUNS.items():
        with tempfile.TemporaryDirectory() as place:
            config = small_config(Path(place), *settings(name), "checkpoint.keep=9", model=model)
            assert train(config) == 0
            path = step_path(Path(place) / "run" / "checkpoints", STEPS)
            found[name] = logits(Path(shutil.copy(path, folder / f"{name}.safetensors")))
    (folder / "logits.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    store()
