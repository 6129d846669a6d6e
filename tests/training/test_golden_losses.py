"""The first losses of small fixed runs, stored with the project: a change that alters what a run
learns is noticed, however small.

    python tests/training/test_golden_losses.py  # store them again: with a release, or on purpose

They are exact on the same torch, processor and BLAS with one thread, and hold to 1e-4 elsewhere.
"""

import hashlib
import json
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))  # as a script
from small_runs import metrics, small_config

from vision.training.loop import train

FILE = Path(__file__).with_name("golden_losses.json")
SETTINGS = ["duration=6steps", "evaluate_every=6steps", "ema=0.9", "model.drop_path=0.2"]
MUON = ["optimizer.name=muon", "optimizer.learning_rate=0.02", "optimizer.rest_learning_rate=2e-3"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "vit": ("vit_mini", []),
    "vit in bf16": ("vit_mini", ["precision=bf16"]),
    "vit with a conv stem and muon": ("vit_mini", ["model.stem=conv_whitened", *MUON]),
    "swin": ("swin_mini", []),
    "swin_v2": ("swinv2_mini", []),
}


def losses(name: str, folder: Path) -> list[float]:
    """The losses of the steps, then those of the evaluations of the weights and their average."""
    model, more = RUNS[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert train(small_config(folder, *SETTINGS, *more, model=model)) == 0
    finally:
        torch.set_num_threads(threads)
    splits = ("train", "val", "val_ema")
    return [event["loss"] for split in splits for event in metrics(folder, split)]


def environment() -> dict[str, str]:
    """Everything that the last bits may depend on."""
    about, libraries = Path("/proc/cpuinfo"), torch.__config__.show()
    features = about.read_text() if about.exists() else platform.processor()
    names = re.findall(r"(?:model name|flags)\s*: (.*)", features) or [features]
    blas = re.search(r"BLAS_INFO=(\w+)", libraries)
    return {
        "torch": torch.__version__,
        "processor": names[0],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "blas": blas[1] if blas else "unknown",
        "threads": "1",
        "digest": hashlib.sha256(f"{sorted(set(names))} {libraries}".encode()).hexdigest(),
    }


@pytest.mark.parametrize("name", RUNS)
def test_first_losses_are_those_that_were_stored(name: str, tmp_path: Path) -> None:
    stored: dict[str, Any] = json.loads(FILE.read_text())
    found, expected = losses(name, tmp_path), stored["losses"][name]
    assert found == pytest.approx(expected, abs=2e-3 if "bf16" in name else 1e-4)
    if stored["environment"] == environment():
        assert found == expected


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        stored = {name: losses(name, Path(folder, str(n))) for n, name in enumerate(RUNS)}
    FILE.write_text(json.dumps({"environment": environment(), "losses": stored}, indent=1) + "\n")
