"""TensorBoard, whose only door this is."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vision.config import ConfigError
from vision.training.configs import TrainConfig
from vision.training.run.run_settings import flat

FOLDER = "tensorboard"


def check_board() -> None:
    """Refuse a run that asks for TensorBoard where the package is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "log.tensorboard=true needs the package: pip install 'vit-swin[tensorboard]'."
        )


def open_board(run: Path, step: int) -> Any:
    """A writer into the run's folder; what an earlier start wrote after `step` is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run / FOLDER), purge_step=step + 1 if step else None)


def add_settings(board: Any, config: TrainConfig, results: Mapping[str, float | None]) -> None:
    """The settings with the results that they led to, for TensorBoard's table of runs."""
    settings = flat(config.model_dump(mode="json"))
    shown = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in settings.items()}
    numbers = {f"best/{name}": value for name, value in results.items() if value is not None}
    board.add_hparams(shown, numbers, run_name=".")
