"""CPU time of a step of masked pretraining against a supervised one of the same encoder."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from task_steps import cpu_seconds
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


def masked_step(folder: Path, rounds: int, size: tuple[int, int] = SIZE) -> dict[str, Any]:
    """A step of MAE at 75 % hidden patches against a supervised one, and the size of its decoder.

    Nothing is written to the folder.
    """
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
    seconds = cpu_seconds(steps, rounds)
    ratios = [m / s for m, s in zip(seconds["masked"], seconds["supervised"], strict=True)]
    whole = _macs(lambda: supervised(images))
    kept = masks.flatten(1).byte().argsort(dim=1, stable=True)[:, : masked.visible]
    seen = _macs(lambda: masked.encoder.forward_visible(images, kept))
    decoder = (_macs(lambda: masked(images, masks)) - seen) / whole
    return {
        "title": f"MAE with ViT-Ti/16, {size[0]} px, batch {BATCH}; a decoder of {decoder:.1%} of "
        f"the encoder's MACs (≤ {DECODER_BAR:.0%})",
        "milliseconds": {name: 1e3 * statistics.median(s) for name, s in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "bar": STEP_BAR,
        "decoder_share": decoder,
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
