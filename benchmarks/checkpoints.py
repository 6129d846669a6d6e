"""Time and memory to open a large checkpoint into a model, against timm's `load_checkpoint`.

    python benchmarks/checkpoints.py --quick     # a small model: does everything run?
    python benchmarks/checkpoints.py             # ViT-L, a few minutes, an idle machine

A file of random weights is made on the spot in timm's names, as safetensors and as `.pth`. A
contender gets a model that exists already and opens the file into it:

- timm: `timm.models.load_checkpoint(model, path)`;
- vision: `load_weights(model, path)`, which also converts the names, checks every shape, refuses
  what is not finite and makes a report. The model is on the meta device, as in `vision.load`: its
  parameters become looks into the file;
- vision, over values: the same for a model that has values already, as in training. Most of the
  difference is the time that the system takes to get their memory back;
- vision, read only: `read_raw` and `unwrap`, with every byte looked at.

The time to make the models is nobody's here; timm draws weights first, `vision.load` does not.

Every measurement is a fresh process, the contenders take turns, the table has medians over rounds.
*time* is the wall time of the opening alone. *memory* is how far the peak of resident memory rises
above what the process has with its model, as a multiple of the file's size; pages of a mapped file
count, although the system takes them back when it needs them. The file is in the system's cache.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CONTENDERS = ("timm", "vision", "vision, over values", "vision, read only")
BARS = {"time": 0.7, "memory": 1.1}
"""Highest ratio of this project's time to timm's, and of its extra memory to the file's size."""
MODELS = {"large": "vit_large_patch16_224", "quick": "vit_tiny_patch16_224"}


def make_files(folder: Path, name: str) -> list[Path]:
    """The same random weights in both formats, as timm's own users store them."""
    import safetensors.torch
    import timm
    import torch

    torch.manual_seed(0)
    weights = timm.create_model(name).state_dict()
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save({"state_dict": weights, "epoch": 1}, folder / "model.pth")
    return [folder / "model.safetensors", folder / "model.pth"]


def measure(contender: str, path: Path, name: str) -> dict[str, float]:
    """Open the file once, in this process."""
    import timm

    model: Any
    if contender == "timm":
        from timm.models import load_checkpoint

        model = timm.create_model(name)

        def run() -> None:
            load_checkpoint(model, str(path))
    else:
        from vision.checkpoints.files.containers import unwrap
        from vision.checkpoints.files.reading import nonfinite, read_raw
        from vision.checkpoints.open import load_weights

        model = own_model(name, "meta" if contender == "vision" else "cpu")

        def run() -> None:
            if contender == "vision, read only":
                weights = unwrap(read_raw(path))
                assert not nonfinite(weights.tensors)
            else:
                load_weights(model, path)

    touch(model)
    reset_peak()
    before = resident("VmRSS")
    start = time.perf_counter()
    run()
    elapsed = time.perf_counter() - start
    return {"time": elapsed, "memory": (resident("VmHWM") - before) / path.stat().st_size}


def own_model(name: str, device: str) -> Any:
    """This project's model of the same shape."""
    from vision.cli.composition import compose
    from vision.config import parse
    from vision.models.build import build_model
    from vision.models.configs import ModelConfig

    choice = "vit_large" if "large" in name else "vit_tiny"
    values, _ = compose("train", [f"model={choice}", "model.patch_size=16"])
    config: Any = parse(ModelConfig, values["model"])  # type: ignore[arg-type]
    return build_model(config, (224, 224), channels=3, classes=1000, device=device)


def touch(model: Any) -> None:
    """Let torch's threads, and every page of the model, be there before anything is measured."""
    import torch

    torch.ones(2**22).add_(0)
    for parameter in model.parameters():
        parameter.data.add_(0)


def reset_peak() -> None:
    """Start the system's record of the peak anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(key: str) -> int:
    """Bytes of memory of this process: VmRSS now, VmHWM at its peak (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; this benchmark needs Linux.")


def in_process(contender: str, path: Path, name: str) -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--worker", contender, str(path), name]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{contender} failed on {path.name}:\n{run.stderr}")
    result: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return result


def run_all(name: str, rounds: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Every figure of every round, by file and contender."""
    figures: dict[str, dict[str, dict[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in make_files(Path(folder), name):
            found = figures[path.name] = {c: {"time": [], "memory": []} for c in CONTENDERS}
            path.read_bytes()  # into the system's cache, for everyone
            for turn in range(rounds):
                shift = turn % len(CONTENDERS)
                for contender in CONTENDERS[shift:] + CONTENDERS[:shift]:
                    for figure, value in in_process(contender, path, name).items():
                        found[contender][figure].append(value)
    return figures


def show(figures: dict[str, dict[str, dict[str, list[float]]]], bars: bool) -> bool:
    """Print the table; whether all bars hold."""
    table = Table("file", "contender", "time ms", "/ timm", "memory / file size")
    good = True
    for file, contenders in figures.items():
        reference = statistics.median(contenders["timm"]["time"])
        for contender, found in contenders.items():
            seconds, memory = (statistics.median(found[key]) for key in ("time", "memory"))
            spread = f"{1000 * min(found['time']):.0f}–{1000 * max(found['time']):.0f}"
            ratio = seconds / reference
            marks = ("", "")
            if bars and contender == "vision":
                held = (ratio <= BARS["time"], memory <= BARS["memory"])
                good = good and all(held)
                limits = zip(held, BARS.values(), strict=True)
                marks = tuple(f" ({'≤' if ok else 'OVER'} {bar})" for ok, bar in limits)
            milliseconds = f"{1000 * seconds:.0f} ({spread})"
            row = (f"{ratio:.2f}{marks[0]}", f"{memory:.2f}{marks[1]}")
            table.add_row(file, contender, milliseconds, *row)
    Console().print(table)
    return good


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, no bars")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/checkpoints.json"))
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        contender, path, name = arguments.worker
        print(json.dumps(measure(contender, Path(path), name)))
        return
    name = MODELS["quick" if arguments.quick else "large"]
    figures = run_all(name, 1 if arguments.quick else arguments.rounds)
    good = show(figures, bars=not arguments.quick)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.processor() or platform.machine(), "python": sys.version}
    arguments.output.write_text(
        json.dumps({"model": name, **machine, "figures": figures}, indent=1)
    )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
