"""Training runs small enough for tests: a tiny ViT on a few tiny images, for a few steps."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import latest
from vision.cli.composition import compose
from vision.config import parse
from vision.training.configs import TrainConfig

SMALL_MODELS = {
    "vit_mini": ["model.width=16", "model.depth=2", "model.heads=2"],
    "swin_mini": ["model.width=16", "model.depths=[2,2]", "model.heads=[1,2]"],
    "swinv2_mini": ["model.width=16", "model.depths=[2,2]", "model.heads=[1,2]"],
    "timm": ["model.name=resnet10t"],
}

SMALL_SHAPES = ["data.train_samples=40", "data.val_samples=24"]

SMALL = [
    "data.image_size=16",
    "batch_size=8",
    "max_batch_per_device=null",  # without estimates for every size
    "duration=4epochs",
    "schedule.warmup=2steps",
    "checkpoint.every=3steps",
    "evaluate_every=7steps",
    "log.every=1steps",
    "log.curves=false",
    "loader.workers=0",
    "device=cpu",
]

RICH = ["augment=deit", "augment.repeats=2", "ema=0.9", "model.drop_path=0.2", "model.dropout=0.1"]
"""Everything random that a run can have: augmentation, mixing, dropout, drop path; and an average.
"""


def words(folder: Path, *more: str, model: str = "vit_mini", shapes: bool = True) -> list[str]:
    """The overrides of a small run in a folder; without `shapes` the data is left to the caller."""
    shape = [f"model={model}", *SMALL_MODELS[model], *(SMALL_SHAPES if shapes else [])]
    return [*shape, *SMALL, f"output={folder}", "name=run", *more]


def small_config(folder: Path, *more: str, model: str = "vit_mini") -> TrainConfig:
    """The same, parsed."""
    small = [word for word in words(folder, model=model) if not word.startswith("output=")]
    values = composed(*small, *more)
    return parse(TrainConfig, values | {"output": str(folder)})


def composed(*given: str) -> dict[str, Any]:
    """The settings of a training. Many runs differ in their folder alone, and composing takes as
    long as some of them: the same words are composed once.
    """
    return copy.deepcopy(_composed(*given))


@cache
def _composed(*given: str) -> dict[str, Any]:
    return compose("train", given)[0]


def last_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint of the run in a folder."""
    return read_checkpoint(latest(folder / "run" / "checkpoints")[0]).tensors


def metrics(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl for one split."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["split"] == split]


def status(folder: Path) -> dict[str, Any]:
    """How the run in a folder stands."""
    values: dict[str, Any] = json.loads((folder / "run" / "status.json").read_text())
    return values


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Both checkpoints hold the same tensors, bit for bit."""
    assert first.keys() == second.keys()
    different = [name for name in first if not first[name].equal(second[name])]
    assert not different, f"{len(different)} of {len(first)} differ, such as {different[:3]}"


def assert_same_run(whole: Path, other: Path) -> None:
    """The same tensors to the bit, the same numbers in the log, and the same best step."""
    assert status(other)["status"] == "finished"
    assert status(other)["best"] == status(whole)["best"]
    assert_same_bits(last_tensors(whole), last_tensors(other))
    for split in ("train", "val", "val_ema"):
        expected, found = metrics(whole, split), metrics(other, split)
        for event in (*expected, *found):
            event.pop("images_per_second", None)
        assert found == expected


def folder_of_images(root: Path, images: int) -> Path:
    """A folder with two classes that is not split yet."""
    for label, color in (("dark", 40), ("light", 200)):
        (root / label).mkdir(parents=True, exist_ok=True)
        for number in range(images):
            Image.new("RGB", (20, 24), (color, color, number)).save(root / label / f"{number}.png")
    return root
