"""Latency and throughput of a model run in several ways: eager, compiled, exported, ONNX.

    python benchmarks/inference.py --quick            # half a minute: does everything run?
    python benchmarks/inference.py --models vit_small swin_tiny --batch 1 8
    python benchmarks/inference.py --checkpoint outputs/…

"exported" and "onnx" (fp32, fp16, int8) are the files that `vision export` writes, here whatever
their accuracy; "compiled" is torch.compile for each batch size separately; eager and compiled run
inside `static_bias`, as evaluation does. Before anything is timed, the outputs of all ways are
compared with eager's. Then every way runs once per round, each round starting with another one, all
with the same number of threads (`--threads`). The table shows medians over the rounds: CPU and wall
time of a batch, images per second of wall time, the ratio of CPU times to eager in the same round
with its range, and how many times as fast as "onnx" in the same round each way is. "eager again" is
the same model a second time: its deviation from 1 is noise. On a busy machine wall times include
waiting; the ratios do not.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vision.checkpoints.native.checkpoint import write_checkpoint
from vision.cli.composition import compose
from vision.config import parse
from vision.data.sources.build_source import describe
from vision.inference.configs import ExportConfig
from vision.inference.export import export
from vision.inference.onnx_files import OnnxModel
from vision.inference.predict import Loaded, load
from vision.models.build import build_model
from vision.models.layers import static_bias
from vision.training.configs import TrainConfig

WAYS = ("eager", "eager again", "compiled", "exported", "onnx", "onnx fp16", "onnx int8")
WARM_UP = 2
Run = Callable[[Tensor], Tensor]
Figures = dict[str, dict[str, float]]


def a_checkpoint(name: str, folder: Path) -> Path:
    """A checkpoint of a model with random weights, for images of 224 pixels and 1,000 classes."""
    few = ["data.train_samples=16", "data.val_samples=8"]  # for the ranges of int8
    overrides = [f"model={name}", "data.image_size=224", *few]
    config = parse(TrainConfig, compose("train", overrides)[0])
    model = build_model(config.model, (224, 224), classes=1000)  # type: ignore[arg-type]
    names = describe(config.data).classes or ()
    record = {
        "config": config.model_dump(mode="json"),
        "classes": [*names, *(str(number) for number in range(1000 - len(names)))],
        "channels": 3,
        "step": 0,
        "preprocess": {
            "image_size": [224, 224],
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
            "interpolation": "bicubic",
            "crop_ratio": 0.875,
        },
    }
    path = folder / f"{name}.safetensors"
    write_checkpoint(path, {f"model.{k}": v for k, v in model.state_dict().items()}, record)
    return path


def exported(loaded: Loaded, kind: str, folder: Path, precision: str = "fp32") -> Path:
    """The file that `vision export` writes and verifies."""
    place = f"output={folder / kind}-{precision}"
    any_loss = ["max_accuracy_loss=1", "loader.workers=0"]
    words = ["checkpoint=-", f"format={kind}", f"precision={precision}", place, *any_loss]
    return export(loaded, parse(ExportConfig, compose("export", words)[0])).file


def ways(loaded: Loaded, folder: Path, wanted: list[str], threads: int) -> dict[str, Run]:
    """The model in every way that is wanted, and eager."""
    model = loaded.model.requires_grad_(False)
    runs: dict[str, Run] = {"eager": model}
    for way in wanted:
        match way:
            case "eager again":
                runs[way] = model
            case "compiled":
                runs[way] = torch.compile(model, dynamic=False)
            case "exported":
                program = torch.export.load(exported(loaded, "torch_export", folder))
                runs[way] = program.module()
            case "onnx" | "onnx fp16" | "onnx int8":
                precision = way.removeprefix("onnx").strip() or "fp32"
                runs[way] = OnnxModel(exported(loaded, "onnx", folder, precision), threads)
    return runs


def measure(runs: dict[str, Run], images: Tensor, rounds: int) -> Figures:
    """Medians over the rounds and the largest difference from eager of every way."""
    expected = runs["eager"](images)
    differences: dict[str, float] = {}
    for name, run in runs.items():  # the first call of each also compiles
        for _ in range(WARM_UP):
            differences[name] = (run(images) - expected).abs().max().item()
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter(), time.process_time()
            runs[name](images)
            cpu[name].append(time.process_time() - start[1])
            wall[name].append(time.perf_counter() - start[0])
    figures = {}
    for name in names:
        ratios = [own / eager for own, eager in zip(cpu[name], cpu["eager"], strict=True)]
        figures[name] = {
            "cpu_seconds": statistics.median(cpu[name]),
            "wall_seconds": statistics.median(wall[name]),
            "images_per_second": len(images) / statistics.median(wall[name]),
            "ratio": statistics.median(ratios),
            "lowest_ratio": min(ratios),
            "highest_ratio": max(ratios),
            "difference": differences[name],
        }
        if "onnx" in cpu:
            faster = [onnx / own for own, onnx in zip(cpu[name], cpu["onnx"], strict=True)]
            figures[name]["times_onnx"] = statistics.median(faster)
    return figures


def table(results: dict[str, Figures], threads: int, rounds: int) -> Table:
    """The figures as a table for a terminal."""
    times = f"{threads} thread{'' if threads == 1 else 's'}, medians of {rounds} rounds"
    result = Table(title=f"Inference on the CPU, {times}")
    for title in ("model", "batch", "way"):
        result.add_column(title)
    numbers = (
        "CPU ms",
        "wall ms",
        "images/s",
        "CPU / eager \\[range]",
        "× onnx",
        "logits differ by",
    )
    for title in numbers:
        result.add_column(title, justify="right")
    for row, figures in results.items():
        model, batch = row.rsplit("/", 1)
        for way, values in figures.items():
            span = f"{values['lowest_ratio']:.2f}–{values['highest_ratio']:.2f}"
            result.add_row(
                model,
                batch,
                way,
                f"{1000 * values['cpu_seconds']:.1f}",
                f"{1000 * values['wall_seconds']:.1f}",
                f"{values['images_per_second']:.1f}",
                f"{values['ratio']:.3f} \\[{span}]",
                f"{values['times_onnx']:.2f}" if "times_onnx" in values else "",
                f"{values['difference']:.1e}",
            )
        result.add_section()
    return result


def machine() -> dict[str, str]:
    """The machine and the versions that the figures belong to."""
    import onnxruntime

    return {
        "processor": platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["vit_small", "swin_tiny"])
    parser.add_argument("--checkpoint", help="measure this one instead of random weights")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/inference.json"))
    parser.add_argument("--quick", action="store_true", help="a small model, batch 1, two rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.batch, arguments.rounds = ["vit_mini"], [1], 2
    torch.set_num_threads(arguments.threads)
    results: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        folder = Path(scratch)
        names = [] if arguments.checkpoint else arguments.models
        sources = {name: a_checkpoint(name, folder) for name in names}
        if arguments.checkpoint:
            sources = {Path(arguments.checkpoint).name: Path(arguments.checkpoint)}
        for name, source in sources.items():
            loaded = load(source)
            size = (loaded.preprocess.channels, *loaded.preprocess.image_size)
            runs = ways(loaded, folder / f"{name}-exports", arguments.ways, arguments.threads)
            with static_bias(loaded.model):
                for batch in arguments.batch:
                    images = torch.randn(batch, *size, generator=torch.Generator().manual_seed(0))
                    results[f"{name}/{batch}"] = measure(runs, images, arguments.rounds)
    report: dict[str, Any] = {
        "machine": machine(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "results": results,
    }
    console = Console()
    shown = table(results, arguments.threads, arguments.rounds)
    (console if console.width >= 120 else Console(width=120)).print(shown)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1))
    console.print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
