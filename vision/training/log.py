"""Where numbers go: `metrics.jsonl` first, which is the truth; wandb gets copies. wandb's only
door.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vision.training.configs import LogConfig


class Log:
    """The numbers of a run, written by its main process."""

    def __init__(self, file: Path, wandb_run: Any = None) -> None:
        self.file = file.open("a", encoding="utf-8")
        self.wandb_run = wandb_run

    def write(self, step: int, split: str, numbers: Mapping[str, float]) -> None:
        """One event: a line of JSON, on the disk before the run goes on."""
        self.file.write(json.dumps({"step": step, "split": split, **numbers}) + "\n")
        self.file.flush()
        if self.wandb_run is not None:
            self.wandb_run.log({f"{split}/{k}": v for k, v in numbers.items()}, step=step)

    def close(self, exit_code: int = 0) -> None:
        """Hand over everything."""
        self.file.close()
        if self.wandb_run is not None:
            self.wandb_run.finish(exit_code=exit_code)


def start_wandb(
    config: LogConfig, name: str, folder: Path, settings: Mapping[str, Any], run_id: str | None
) -> Any:
    """A wandb run, or the one with this id again; None where wandb is disabled."""
    if config.wandb == "disabled":
        return None
    import wandb

    return wandb.init(
        project=config.project,
        name=name,
        id=run_id,
        dir=folder,
        config=dict(settings),
        mode=config.wandb,
        resume="allow",
    )
