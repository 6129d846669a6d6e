"""Start-up: CPU time of a prediction for one image, from the shell and from Python.

    python benchmarks/startup.py

Medians of processes that end after the work; bars in CPU seconds (user and system) on one thread.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

BARS = {"vision predict": 3.0, "vision.load": 2.5}
"""Largest CPU seconds."""


def commands(run: Path, image: Path) -> dict[str, list[str]]:
    """What is measured: torch alone, and both ways to a prediction."""
    return {
        "import torch": ["-c", "import torch"],
        "vision predict": ["-m", "vision", "predict", f"checkpoint={run}", f"images={image}"],
        "vision.load": ["-c", f"import vision; vision.load({str(run)!r})"],
    }


def cpu_seconds(words: list[str]) -> float:
    """CPU time of a Python process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, help="a run; by default a small one is trained")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = options.checkpoint or Path(folder) / "run"
        if options.checkpoint is None:
            small = ["duration=2steps", "schedule.warmup=0steps", "batch_size=16", "device=cpu"]
            small += ["loader.workers=0", "data.train_samples=64", "data.val_samples=16"]
            words = ["-m", "vision", "train", *small, f"output={folder}", "name=run"]
            subprocess.run([sys.executable, *words], check=True, capture_output=True)
        image = Path(folder) / "photo.jpg"
        Image.new("RGB", (640, 480), (200, 120, 40)).save(image)
        named = commands(run, image)
        times: dict[str, list[float]] = {name: [] for name in named}
        for _ in range(1 + options.rounds):  # the first one fills the caches of the system
            for name, words in named.items():
                times[name].append(cpu_seconds(words))
    results = {name: statistics.median(found[1:]) for name, found in times.items()}
    for name, seconds in results.items():
        bar = f"  at most {BARS[name]:.1f}" if name in BARS else ""
        print(f"{name:16}{seconds:6.2f} s{bar}")
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
