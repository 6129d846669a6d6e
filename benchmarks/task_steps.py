"""The cost of a step of a task beside that of its parts, for `training.py`.

Steps take turns within each round, in one process with one thread; figures are medians of CPU time
over rounds, and ratios those within a round.
"""

import io
import statistics
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from training_loops import training_config

from vision.checkpoints.open import open_model
from vision.data.sources.shapes import CLASSES
from vision.models.configs import TimmConfig
from vision.training.job import TrainingJob, build_job
from vision.training.run.distributed import World
from vision.training.run.run_folder import Run
from vision.training.run.stop import StopRequest
from vision.training.step import forward_backward, update

DISTILL_BAR = 1.05
TEACHER = "resnet18"
SIZE, BATCH = 64, 32


def distillation_step(folder: Path, rounds: int) -> dict[str, Any]:
    """A step with a teacher against the step of the student and the teacher's forward pass."""
    weights = folder / "teacher.safetensors"
    save_file(timm.create_model(TEACHER, num_classes=len(CLASSES)).state_dict(), weights)
    taught = ["task=distill", f"task.teacher={weights}", f"task.teacher_model={TEACHER}"]
    taught.append(f"task.teacher_image_size={SIZE}")
    config = TimmConfig(
        kind="timm", name=TEACHER, drop_path=None, checkpoint_activations=False, pretrained=None
    )
    teacher = open_model(weights, model=config, image_size=SIZE).model
    images = torch.randn(BATCH, 3, SIZE, SIZE)
    steps = {
        "student": a_step(folder / "student", []),
        "teacher": torch.no_grad()(lambda: teacher(images)),
        "distillation": a_step(folder / "distillation", taught),
    }
    seconds = cpu_seconds(steps, rounds)
    ratios = [
        both / (student + alone)
        for student, alone, both in zip(*(seconds[name] for name in steps), strict=True)
    ]
    return {
        "title": f"DeiT-Ti/16 with a distillation token, {TEACHER} as teacher, {SIZE} px, "
        f"batch {BATCH}",
        "milliseconds": {name: statistics.median(s) * 1e3 for name, s in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "bar": DISTILL_BAR,
    }


def a_step(folder: Path, more: list[str]) -> Callable[[], object]:
    """One step of a run on the embedded data set, always with the same batch."""
    words = ["model=vit_tiny", "model.distillation_token=true", f"data.image_size={SIZE}"]
    words += ["data.train_samples=64", "data.val_samples=8", f"batch_size={BATCH}", "device=cpu"]
    words += ["loader.workers=0", f"output={folder}", "name=run", *more]
    config = training_config(words)
    with redirect_stdout(io.StringIO()):
        job: TrainingJob = build_job(
            config,
            Run(folder / "run"),
            World(0, 1, torch.device("cpu")),
            StopRequest(),
            None,
        )
    batch = next(job.task.training_batches(job.order, 0, BATCH))

    def step() -> None:
        forward_backward(job.task, job.module, [batch], job.state.scaler, 0)
        update(job.state, config)

    return step


def cpu_seconds(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU time of each step in every round, after one that warms up."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before = time.process_time()
            steps[name]()
            if turn:
                found[name].append(time.process_time() - before)
    return found
