"""CPU time of a step of masked pretraining against a supervised one of the same encoder."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from vision.cli.composition import compose
from vision.config import parse
from vision.models.build import build_model
from vision.models.layers import Classifier
from vision.models.reconstruction import MaskedModel
from vision.training.configs import TrainConfig
from vision.training.tasks.configs import MaskedConfig
from vision.training.tasks.masked_model import masked_model

SIZE, BATCH, CLASSES = (224, 224), 8, 1000
STEP_BAR, DECODER_BAR = 0.45, 0.1
DECODER = ("task.decoder.width=96", "task.decoder.depth=2", "task.decoder.heads=3")


def measure_masked(rounds: int, size: tuple[int, int] = SIZE) -> dict[str, Any]:
    """Medians over rounds in which both take turns; a first round warms up."""
    values, _ = compose("train", ["model=vit_tiny", "task=masked", *DECODER])
    config = parse(TrainConfig, values)
    assert isinstance(config.task, MaskedConfig) and config.model.kind == "vit"
    images = torch.randn(BATCH, 3, *size)
    supervised = build_model(config.model, size, classes=CLASSES)
    masked = masked_model(config.task, build_model(config.model, size, classes=0), size, 3, seed=0)
    masks = _masks(masked)
    targets = torch.randint(CLASSES, (BATCH,))

    def supervised_loss() -> torch.Tensor:
        return F.cross_entropy(supervised(images), targets)

    def masked_loss() -> torch.Tensor:
        return masked.losses(masked(images, masks), images, masks).mean()

    steps = {
        "supervised": _step(supervised, supervised_loss),
        "masked": _step(masked, masked_loss),
    }
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            before = time.process_time()
            steps[name]()
            if turn:
                found[name].append(time.process_time() - before)
    ratios = [m / s for m, s in zip(found["masked"], found["supervised"], strict=True)]
    whole = _macs(lambda: supervised(images))
    kept = masks.flatten(1).byte().argsort(dim=1, stable=True)[:, : masked.visible]
    seen = _macs(lambda: masked.encoder.forward_visible(images, kept))
    return {
        "supervised_milliseconds": 1e3 * statistics.median(found["supervised"]),
        "masked_milliseconds": 1e3 * statistics.median(found["masked"]),
        "ratio": statistics.median(ratios),
        "decoder_share": (_macs(lambda: masked(images, masks)) - seen) / whole,
    }


def _masks(model: MaskedModel) -> torch.Tensor:
    """Masks of three quarters of the patches."""
    rows, columns = model.encoder.grid
    order = torch.rand(BATCH, rows * columns).argsort(dim=1)
    return (order >= model.visible).reshape(BATCH, rows, columns)


def _step(model: Classifier, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _macs(run: Callable[[], object]) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() / 2
