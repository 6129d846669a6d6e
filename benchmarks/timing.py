"""Times of the contenders of `models.py`, in rounds in which everyone runs once."""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from contenders import OURS, REFERENCE, Case, contenders
from counting import Products, Replay
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vision.models.layers import static_bias

AGAIN, PRODUCTS = "timm again", "products"
"""Beside the contenders: the reference once more, and the bare matrix products."""


def batch_of(case: Case, batch: int) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, case.size, case.size, generator=generator)
    return images, torch.randint(1000, (batch,), generator=generator)


def training_step(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> None:
    """Forward, cross-entropy, backward."""
    F.cross_entropy(model(images), labels).backward()


def timed(case: Case, mode: str, threads: int, batch: int, rounds: int) -> dict[str, float]:
    """Seconds of every contender, of timm once more and of the bare products: medians of rounds.

    A mode of "… compiled" compiles every model.
    """
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    images, labels = batch_of(case, batch)
    training, compiled = mode.startswith("training"), mode.endswith("compiled")
    builders = contenders()
    builders[AGAIN] = builders[REFERENCE]
    torch.compiler.reset()
    with torch.set_grad_enabled(training), ExitStack() as stack:
        runs: dict[str, Callable[[], None]] = {}
        models: dict[str, nn.Module] = {}
        for name, build in builders.items():
            model = models[name] = build(case).train(training)
            if not training:
                stack.enter_context(static_bias(model))
            runs[name] = _run(torch.compile(model) if compiled else model, images, labels, training)
        with sdpa_kernel(SDPBackend.MATH), Products() as recorded:
            _run(models[OURS], images, labels, training)()
        runs[PRODUCTS] = Replay(recorded.products)
        return _interleaved(runs, list(models.values()), clock, rounds)


def _run(
    model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, training: bool
) -> Callable[[], None]:
    def run() -> None:
        if training:
            training_step(model, images, labels)
        else:
            model(images)

    return run


def _interleaved(
    runs: dict[str, Callable[[], None]],
    models: list[nn.Module],
    clock: Callable[[], float],
    rounds: int,
) -> dict[str, float]:
    """Median time of each run over rounds in which everyone runs once, the first one in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    gc.collect()
    gc.disable()
    for turn in range(-1, rounds):  # the first round warms up
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = clock()
            runs[name]()
            elapsed = clock() - start
            if turn >= 0:
                times[name].append(elapsed)
            for model in models:
                model.zero_grad()
    gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def timed_row(processes: list[dict[str, float]], batch: int) -> dict[str, Any]:
    """Milliseconds per image, and ratios: medians over processes."""
    milliseconds = {
        name: statistics.median(p[name] for p in processes) * 1000 / batch for name in processes[0]
    }
    peers = set(milliseconds) - {OURS, AGAIN, PRODUCTS}
    fastest = min(peers, key=lambda name: milliseconds[name])

    def ratio(name: str, to: str) -> dict[str, float]:
        ratios = [process[name] / process[to] for process in processes]
        return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}

    return {
        "milliseconds": milliseconds,
        "fastest": fastest,
        "ratio": ratio(OURS, fastest),
        "itself": ratio(AGAIN, REFERENCE),
        "processes": processes,
    }
