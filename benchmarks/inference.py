"""Latency and throughput of one model, run in four ways: eager, compiled, exported, ONNX.

    python benchmarks/inference.py --quick
    python benchmarks/inference.py --models vit_small swin_tiny --batch 1 8
    python benchmarks/inference.py --checkpoint outputs/…

Every way runs once in each round, in turn, with one thread; the table has medians over the rounds:
milliseconds of a batch, pictures per second, and the ratio to eager. Before anything is timed, the
answers of all ways are compared. Compiling takes a minute or two for each model and batch size.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from vision.checkpoints.native import write_checkpoint
from vision.cli import compose
from vision.config import parse
from vision.inference.load import Loaded, load
from vision.models.build import build_model
from vision.models.swin import static_bias
from vision.training.configs import TrainConfig

WAYS = ("eager", "compiled", "exported", "onnx")
Run = Callable[[Tensor], Tensor]


def a_checkpoint(name: str, folder: Path) -> Path:
    """A checkpoint of a model with random weights, for pictures of 224 pixels and 1,000 classes."""
    overrides = [f"model={name}", "data.image_size=224"]
    config = parse(TrainConfig, compose("train", overrides)[0])
    model = build_model(config.model, (224, 224), classes=1000)  # type: ignore[arg-type]
    record = {
        "config": config.model_dump(mode="json"),
        "classes": [str(number) for number in range(1000)],
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


def ways(loaded: Loaded, folder: Path, wanted: list[str]) -> dict[str, Run]:
    """The model in every way that it can be run."""
    import onnxruntime

    model: nn.Module = loaded.model.requires_grad_(False)
    example = torch.zeros(3, loaded.preprocess.channels, *loaded.preprocess.image_size)
    dynamic = ({0: torch.export.Dim("batch")},)
    runs: dict[str, Run] = {"eager": model}
    if "compiled" in wanted:
        runs["compiled"] = torch.compile(model)
    if "exported" in wanted:
        program = torch.export.export(model, (example,), dynamic_shapes=dynamic)
        runs["exported"] = program.module()
    if "onnx" in wanted:
        exported = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            dynamic_shapes=dynamic,
            input_names=["images"],
            verbose=False,
        )
        assert exported is not None
        exported.save(folder / "model.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = onnxruntime.InferenceSession(folder / "model.onnx", options)
        runs["onnx"] = lambda images: torch.from_numpy(
            session.run(None, {"images": images.numpy()})[0]
        )
    return runs


def measure(runs: dict[str, Run], images: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of a batch, and the largest difference to eager, of every way."""
    expected = runs["eager"](images)
    differences = {  # the first call of each also compiles
        name: (run(images) - expected).abs().max().item() for name, run in runs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.process_time()
            runs[name](images)
            times[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        name: {
            "seconds": seconds,
            "pictures_per_second": len(images) / seconds,
            "ratio": seconds / medians["eager"],
            "difference": differences[name],
        }
        for name, seconds in medians.items()
    }


def table(results: dict[str, dict[str, dict[str, float]]]) -> Table:
    """For a terminal."""
    result = Table(title="Inference, CPU time, one thread")
    for title in ("model", "batch", "way"):
        result.add_column(title)
    for title in ("ms per batch", "pictures/s", "time / eager", "largest difference of a logit"):
        result.add_column(title, justify="right")
    for row, figures in results.items():
        model, batch = row.split("/")
        for way, values in figures.items():
            result.add_row(
                model,
                batch,
                way,
                f"{1000 * values['seconds']:.1f}",
                f"{values['pictures_per_second']:.1f}",
                f"{values['ratio']:.3f}",
                f"{values['difference']:.1e}",
            )
        result.add_section()
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["vit_small", "swin_tiny"])
    parser.add_argument("--checkpoint", help="measure this one instead of random weights")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/inference.json"))
    parser.add_argument("--quick", action="store_true", help="a small model, batch 1, one round")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.batch, arguments.rounds = ["vit_mini"], [1], 1
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        folder = Path(scratch)
        sources = {name: a_checkpoint(name, folder) for name in arguments.models}
        if arguments.checkpoint:
            sources = {Path(arguments.checkpoint).name: Path(arguments.checkpoint)}
        for name, source in sources.items():
            loaded = load(source)
            size = (loaded.preprocess.channels, *loaded.preprocess.image_size)
            with static_bias(loaded.model):
                runs = ways(loaded, folder, arguments.ways)
                for batch in arguments.batch:
                    images = torch.randn(batch, *size, generator=torch.Generator().manual_seed(0))
                    results[f"{name}/{batch}"] = measure(runs, images, arguments.rounds)
    console = Console()
    (console if console.width >= 120 else Console(width=120)).print(table(results))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1))
    console.print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
