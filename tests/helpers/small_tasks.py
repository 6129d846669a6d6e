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


TASKS: dict[str, Callable[[Path], list[str]]] = {
    "classify": lambda folder: [],
    "distill": lambda folder: ["task=distill", f"task.teacher={a_teacher(folder)}"],
}
"""By task: the words of a run, whose files are made in a folder."""

OTHER_TASKS = [task for task in TASKS if task != "classify"]
