"""This project's models against those of timm, torchvision and (where installed) transformers.

    python benchmarks/models.py --quick              # a minute or two: does everything run?
    python benchmarks/models.py --figures exact      # kernels, bytes and peak memory: no noise
    python benchmarks/models.py                      # all of it; most of an hour, idle machine

Two kinds of figures, for a forward pass (evaluation mode, no gradients; this project's models
inside `static_bias`) and for a training step (forward, cross-entropy, backward; no dropout, no
stochastic depth):

- *exact*: kernels of one step; bytes that they read and write outside matrix products, per image;
  the peak of live tensor bytes (parameters not counted). On a GPU this is what decides. They are
  counted for eager models, see `counting.py`.
- *timed*: CPU time with one thread, wall time with two. In every round each contender runs once,
  in turn; a process gives medians over its rounds, the table medians over processes. "vision /
  fastest" is the ratio to the fastest peer, taken in each process, in brackets its range over
  processes. "timm / itself" is a second timm model against the first: what differs from 1 there is
  noise, and so is as much anywhere else. "products" is the time of the bare matrix products of this
  model, as many as the step has: what is left to gain is what lies above it.

Bars stand beside the figures, with what came of them. `--output` takes everything as JSON.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import torch
from contenders import CASES, OURS, REFERENCE, Case, contenders
from counting import Count, PeakMemory
from rich.console import Console
from rich.table import Table
from timing import AGAIN, batch_of, timed, timed_row, training_step
from torch import nn

from vision.models.layers import static_bias

MODES = ("forward", "training")
FIGURES = {"kernels": "kernels", "bytes": "MB per image", "peak": "peak MiB"}

EXACT_BARS: dict[tuple[str, str], dict[str, float]] = {
    ("vit_small", "forward"): {"kernels": 1.00, "bytes": 1.00},
    ("vit_small", "training"): {"kernels": 1.00, "bytes": 1.00, "peak": 1.00},
    ("swin_tiny", "forward"): {"kernels": 0.55, "bytes": 0.65},
    ("swin_tiny", "training"): {"kernels": 0.88, "bytes": 0.90, "peak": 1.00},
    ("swinv2_tiny", "forward"): {"kernels": 0.70, "bytes": 0.80},
    ("swinv2_tiny_224", "forward"): {"kernels": 0.70, "bytes": 0.80},
}
"""Highest ratio to timm at a batch of 8."""

TIMED_BAR = 1.03
TIMED_BARS = {("swin_tiny", "forward", 1): 0.98}
"""Highest ratio to the fastest peer: in general, and by model, mode and threads."""

Figures = dict[str, dict[str, Any]]
"""By contender."""


def exact(case: Case, mode: str, batch: int) -> Figures:
    """Kernels, bytes and peak memory of every contender."""
    images, labels = batch_of(case, batch)
    figures: Figures = {}
    for name, build in contenders().items():
        model = build(case).train(mode == "training")

        def run(model: nn.Module = model) -> None:
            if mode == "training":
                training_step(model, images, labels)
                model.zero_grad()
            else:
                model(images)

        with torch.set_grad_enabled(mode == "training"), ExitStack() as stack:
            if mode == "forward":
                stack.enter_context(static_bias(model))
            with Count() as count:
                run()
            with PeakMemory() as memory:
                run()
        figures[name] = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "kernels": count.kernels,
            "bytes": count.bytes / batch,
            "peak": memory.peak,
            "by_operation": dict(count.by_operation.most_common()),
            "bytes_by_operation": dict(count.bytes_by_operation.most_common()),
        }
    return figures


def worker(arguments: argparse.Namespace) -> None:
    """One process of the timed part: prints its medians as JSON."""
    results = {
        f"{model}/{mode}": timed(
            CASES[model], mode, arguments.worker, arguments.batch, arguments.rounds
        )
        for model in arguments.models
        for mode in _modes(arguments)
    }
    print(json.dumps(results))


def run_workers(
    arguments: argparse.Namespace, console: Console
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """After each process, the medians of all processes so far, by model, mode and threads."""
    order = product(arguments.models, _modes(arguments), arguments.threads)
    results: dict[str, list[dict[str, Any]]] = {f"{m}/{mode}/{t}": [] for m, mode, t in order}
    for process in range(arguments.processes):
        for threads in arguments.threads:
            load = os.getloadavg()[0]
            console.log(
                f"process {process + 1} of {arguments.processes}, {threads} thread(s), "
                f"load average {load:.1f}"
            )
            command = [sys.executable, __file__, "--worker", str(threads), *sys.argv[1:]]
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            finished = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            for row, medians in json.loads(finished.stdout.splitlines()[-1]).items():
                results[f"{row}/{threads}"].append(medians)
            yield {row: processes for row, processes in results.items() if processes}


def verdict(value: float, bar: float | None) -> tuple[str, str]:
    """A bar and what came of it, as cells of a table."""
    if bar is None:
        return "", ""
    return f"≤ {bar:.2f}", "[green]reached[/]" if value <= bar else "[red]missed[/]"


def exact_table(results: dict[str, Figures], batch: int) -> Table:
    """A row for each model, mode and figure."""
    table = Table(title=f"Exact, batch {batch}")
    for title in ("model", "step", "figure"):
        table.add_column(title)
    names = list(next(iter(results.values())))
    for title in (*names, f"{OURS} / {REFERENCE}", "bar", ""):
        table.add_column(title, justify="right")
    units = {"kernels": 1, "bytes": 1e6, "peak": 2**20}
    for row, figures in results.items():
        model, mode = row.split("/")
        for figure, title in FIGURES.items():
            ratio = figures[OURS][figure] / figures[REFERENCE][figure]
            values = (f"{figures[name][figure] / units[figure]:,.4g}" for name in names)
            bar = EXACT_BARS.get((model, mode), {}).get(figure) if batch == 8 else None
            case = CASES[model]
            table.add_row(
                f"{case.title} {case.size}",
                mode,
                title,
                *values,
                f"{ratio:.4f}",
                *verdict(ratio, bar),
            )
        table.add_section()
    return table


def timed_table(results: dict[str, dict[str, Any]], batch: int) -> Table:
    """A row for each model, mode and number of threads."""
    table = Table(title=f"Timed, ms per image, batch {batch}")
    for title in ("model", "step", "time"):
        table.add_column(title)
    names = [n for n in next(iter(results.values()))["milliseconds"] if n != AGAIN]
    for title in (*names, "timm / itself", "vision / fastest", "bar", ""):
        table.add_column(title, justify="right")
    for row, figures in results.items():
        model, mode, threads = row.split("/")
        case, ratio, itself = CASES[model], figures["ratio"], figures["itself"]
        bar = TIMED_BARS.get((model, mode, int(threads)), TIMED_BAR) if batch == 8 else None
        table.add_row(
            f"{case.title} {case.size}",
            mode,
            "CPU, 1 thread" if threads == "1" else f"wall, {threads} threads",
            *(f"{figures['milliseconds'][name]:.1f}" for name in names),
            f"{itself['median']:.3f}\n[{itself['least']:.3f} {itself['most']:.3f}]",
            f"{ratio['median']:.3f}\n[{ratio['least']:.3f} {ratio['most']:.3f}]",
            *verdict(ratio["median"], bar),
        )
    return table


def _modes(arguments: argparse.Namespace) -> list[str]:
    return [*MODES, *(f"{mode} compiled" for mode in MODES if arguments.compile)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--figures", choices=["exact", "timed", "all"], default="all")
    parser.add_argument("--threads", nargs="+", type=_positive, default=[1, 2])
    parser.add_argument("--compile", action="store_true", help="also time torch.compile's models")
    parser.add_argument("--processes", type=_positive, default=5)
    parser.add_argument("--rounds", type=_positive, default=5)
    parser.add_argument("--batch", type=_positive, default=8, help="bars are for 8")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/models.json"))
    parser.add_argument("--quick", action="store_true", help="one process, one round, batch 2")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.processes, arguments.rounds, arguments.batch = 1, 1, 2
    try:  # now, not after hours of measuring
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.open("a").close()
    except OSError as error:
        parser.error(f"--output: cannot write {arguments.output}: {error.strerror}")
    return arguments


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {number}")
    return number


def main() -> None:
    """Measure, print, write."""
    arguments = parse_arguments()
    if arguments.worker:
        worker(arguments)
        return
    console = Console()
    console = console if console.width >= 150 else Console(width=150)
    results: dict[str, Any] = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "batch": arguments.batch,
    }
    if arguments.figures != "timed":
        results["exact"] = {
            f"{model}/{mode}": exact(CASES[model], mode, arguments.batch)
            for model in arguments.models
            for mode in MODES
        }
        console.print(exact_table(results["exact"], arguments.batch))
    if arguments.figures != "exact":
        for measured in run_workers(arguments, console):
            results["timed"] = {row: timed_row(p, arguments.batch) for row, p in measured.items()}
            # After every process, so that a run of hours that is stopped was not in vain.
            arguments.output.write_text(json.dumps(results, indent=1))
        console.print(timed_table(results["timed"], arguments.batch))
    arguments.output.write_text(json.dumps(results, indent=1))
    console.print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
