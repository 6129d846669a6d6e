"""The settings of a small run of every task, for tests of what all tasks share."""

from collections.abc import Callable
from pathlib import Path

from small_runs import SMALL_MODELS
from untrained_runs import a_run

from vision.data.sources.shapes import CLASSES

DISTILLED = ["model.class_token=true", "model.pool=class_token", "model.distillation_token=true"]
"""A ViT with a distillation token."""


def a_teacher(folder: Path, *more: str) -> Path:
    """A run with the classes of `shapes`, for images of 24 × 24 pixels; made once."""
    if not (folder / "teacher").exists():
        a_run(
            folder / "teacher", "model=vit_mini", *SMALL_MODELS["vit_mini"], *more, classes=CLASSES
        )
    return folder / "teacher"


MASKED = [
    "task=masked",
    *("task.decoder.width=16", "task.decoder.depth=1", "task.decoder.heads=2"),
    *("augment.mixup=0", "augment.cutmix=0", "augment.label_smoothing=0"),
]
"""MAE, also with augmentation that mixes otherwise."""
TASKS: dict[str, Callable[[Path], list[str]]] = {
    "classify": lambda folder: [],
    "distill": lambda folder: ["task=distill", f"task.teacher={a_teacher(folder)}"],
    "masked": lambda folder: [*MASKED, "data.image_size=32"],
    "multi_label": lambda folder: ["task=multi_label", "data=shapes_two"],
}
"""By task: the words of a run, whose files are made in a folder."""

OTHER_TASKS = [task for task in TASKS if task != "classify"]
