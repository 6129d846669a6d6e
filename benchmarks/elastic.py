"""Cost of `elastic` beside plain DDP, for ViT-S over gloo:

    torchrun --nproc-per-node=2 benchmarks/elastic.py [--steps 20] [--batch 16]

A step is forward, backward and the sum of gradients over processes. The three ways take turns; what
is shown are medians, of time and of the main process's CPU time, which counts no waiting and means
more on a busy machine; and the memory of the sums of gradients beside the weights.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from model_settings import model_config

from vision.models.build import build_model
from vision.training.elastic import VirtualRanks
from vision.training.run.distributed import World, last_part_only, parallelize, world

BARS = {"elastic, V = R": 1.10, "elastic, V = 2R": 1.20}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_small")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="images of a step, all processes")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node=2 benchmarks/elastic.py")
    torch.set_num_threads(1)
    with world("cpu") as processes:
        ways = _ways(arguments.model, arguments.batch // processes.size, processes)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(arguments.steps + 1):
            for name, step in ways.items():
                processes.wait()
                before, used = time.perf_counter(), time.process_time()
                step()
                if number:  # the first step warms up
                    times[name].append((time.perf_counter() - before, time.process_time() - used))
        if processes.main:
            _print(
                {name: [*map(statistics.median, zip(*t, strict=True))] for name, t in times.items()}
            )
    return 0


def _ways(name: str, images: int, processes: World) -> dict[str, Callable[[], None]]:
    size = processes.size
    batch = torch.randn(images, 3, 224, 224)
    labels = torch.zeros(images, dtype=torch.int64)

    def way(parts: int) -> Callable[[], None]:
        model = build_model(model_config(name), (224, 224), channels=3, classes=1000)
        virtual = VirtualRanks(model, processes, parts)
        return lambda: _step(model, virtual, batch, labels, parts)

    plain = build_model(model_config(name), (224, 224), channels=3, classes=1000)
    parallelized = parallelize(plain, "ddp", processes)
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    if processes.main:
        for parts in (1, 2):
            held = parts.bit_length() * 4 * parameters / 2**20
            print(
                f"V = {parts * size}: up to {held:.0f} MiB for sums of gradients; DDP's buckets: "
                f"{4 * parameters / 2**20:.0f} MiB"
            )
    return {
        "DDP": lambda: _step(plain, parallelized, batch, labels, 1),
        "elastic, V = R": way(1),
        "elastic, V = 2R": way(2),
    }


def _step(model: nn.Module, module: nn.Module, batch: Tensor, labels: Tensor, parts: int) -> None:
    for number in range(parts):
        with last_part_only(module, last=number == parts - 1):
            loss = F.cross_entropy(module(batch[number::parts]), labels[number::parts])
            (loss / parts).backward()
        if isinstance(module, VirtualRanks):
            module.collect(loss.detach().reshape(1))
    model.zero_grad(set_to_none=True)


def _print(medians: dict[str, list[float]]) -> None:
    for name, (seconds, used) in medians.items():
        ratio, of_cpu = seconds / medians["DDP"][0], used / medians["DDP"][1]
        bar = f" (bar {BARS[name]:.2f})" if name in BARS else ""
        print(
            f"{name:16} {seconds:7.3f} s  {ratio:5.2f} × DDP{bar}; "
            f"{used:7.3f} s of CPU time, {of_cpu:5.2f} ×"
        )


if __name__ == "__main__":
    sys.exit(main())
