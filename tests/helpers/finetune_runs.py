"""What the tests of fine-tuning share: a small run to start from, and runs that start from it."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_runs import SMALL, SMALL_MODELS, SMALL_SHAPES, words
from torch import Tensor

from vision.checkpoints.files.reading import find_file
from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.cli.composition import compose
from vision.config import parse
from vision.training import loop
from vision.training.configs import TrainConfig
from vision.training.loop import train

TUNED = {
    "head": ["tune=head", "augment=none"],
    "uncached": ["tune=head", "tune.cache=false"],
    "partial": ["tune=partial", "tune.blocks=1"],
    "lora": ["tune=lora", "tune.rank=2", "tune.targets=[q,k,v,proj,fc1,fc2]"],
    "bitfit": ["tune=bitfit"],
}
"""Every way to train less than everything."""


def base_run(folder: Path, *more: str, model: str = "vit_mini") -> Path:
    """Train a small model for a few steps; returns the run's folder."""
    values, _ = compose("train", words(folder, "duration=6steps", *more, model=model))
    assert train(parse(TrainConfig, values)) == 0
    return folder / "run"


def tuned_config(folder: Path, source: Path | str, *more: str, data: bool = True) -> TrainConfig:
    """A run of 12 steps from the weights of a source, with the model that they belong to."""
    shapes = SMALL_SHAPES if data else []
    settings = ["model=auto", f"init={source}", *shapes, *SMALL, "duration=12steps"]
    more = (f"output={folder}", "name=run", *more)
    values, _ = compose("train", [*settings, *more])
    return parse(TrainConfig, values)


def explicit_model(model: str) -> list[str]:
    """The settings that name a small model in place of model=auto."""
    return [f"model={model}", *SMALL_MODELS[model]]


def weights_of(run: Path) -> dict[str, Tensor]:
    """The weights of a run's best checkpoint, as stored."""
    return read_checkpoint(find_file(run), prefix="model.").tensors


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: Sequence[int]) -> None:
    """Ask the process to stop in each of these steps, once."""
    left = list(steps)
    original = loop.forward_backward

    def stopping(task, module, parts, scaler, step):  # type: ignore[no-untyped-def]
        if left and step == left[0]:
            del left[0]
            signal.raise_signal(signal.SIGTERM)
        return original(task, module, parts, scaler, step)

    monkeypatch.setattr(loop, "forward_backward", stopping)
