"""The task that a config asks for."""

from typing import Any

from vision.models.layers import Classifier
from vision.training.configs import TrainConfig, TuneHeadConfig
from vision.training.run.distributed import World
from vision.training.run.run_folder import Run
from vision.training.tasks.classification import Classification
from vision.training.tasks.probe import Probe
from vision.training.tasks.task import Task, TrainingData


def select_task(
    config: TrainConfig, data: TrainingData, model: Classifier, run: Run, world: World
) -> Task[Any]:
    """A probe on cached features where `tune` says so, else classification of images."""
    cached = isinstance(config.tune, TuneHeadConfig) and config.tune.cache
    return (Probe if cached else Classification)(config, data, model, run, world)
