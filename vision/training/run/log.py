"""Where numbers go: `metrics.jsonl` first, which is the truth; wandb gets copies. wandb's only
door.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision.config import ConfigError
from vision.training.configs import LogConfig
from vision.training.run.run_folder import RunFileError

if TYPE_CHECKING:
    from PIL.Image import Image


class Log:
    """The numbers of a run, written by its main process."""

    def __init__(self, path: Path, wandb_run: Any = None) -> None:
        self.path = path
        try:
            self.file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise RunFileError(path, error) from error
        self.wandb_run = wandb_run

    def write(self, step: int, split: str, numbers: Mapping[str, float]) -> None:
        """One event: a line of JSON, handed to the system before the run goes on."""
        line = json.dumps({"step": step, "split": split, **numbers}) + "\n"
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as error:
            raise RunFileError(self.path, error) from error
        if self.wandb_run is not None:
            self.wandb_run.log({"step": step, **{f"{split}/{k}": v for k, v in numbers.items()}})

    def image(self, step: int, name: str, image: "Image") -> None:
        """An image, for wandb alone."""
        if self.wandb_run is not None:
            import wandb

            self.wandb_run.log({"step": step, name: wandb.Image(image)})

    def close(self, exit_code: int = 0) -> None:
        """Hand over everything."""
        try:
            self.file.close()
        except OSError as error:  # what a full disk did not take is tried once more here
            raise RunFileError(self.path, error) from error
        finally:
            if self.wandb_run is not None:
                self.wandb_run.finish(exit_code=exit_code)


def start_wandb(
    config: LogConfig, name: str, folder: Path, settings: Mapping[str, Any], run_id: str | None
) -> Any:
    """A wandb run, or the one with this id again; None where wandb is disabled."""
    if config.wandb == "disabled":
        return None
    import wandb

    try:
        run = wandb.init(
            project=config.project,
            name=name,
            id=run_id,
            dir=folder,
            config=dict(settings),
            mode=config.wandb,
            # Offline there is nobody to ask what the run has already; `wandb sync` will.
            resume="allow" if config.wandb == "online" else None,
        )
    except wandb.Error as error:
        raise ConfigError(
            f"log.wandb={config.wandb}: {error} Run `wandb login`, or use log.wandb=offline."
        ) from error
    # wandb's own count of steps must grow from call to call; a resumed run takes some steps again.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run
