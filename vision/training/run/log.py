"""The numbers of a run: `metrics.jsonl`, and copies for wandb, whose only door this is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision.config import ConfigError
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import writing

if TYPE_CHECKING:
    from PIL.Image import Image


class Log:
    """The numbers of a run. Without a path nothing is written: only the main process has one."""

    def __init__(self, path: Path | None, wandb_run: Any = None) -> None:
        self.path, self.wandb_run = path, wandb_run
        if path is not None:
            with writing(path):
                self.file = path.open("a", encoding="utf-8")

    def write(self, step: int, split: str, numbers: Mapping[str, float]) -> None:
        """Write a line of JSON and hand it to the operating system."""
        if self.path is None:
            return
        with writing(self.path):
            self.file.write(json.dumps({"step": step, "split": split, **numbers}) + "\n")
            self.file.flush()
        if self.wandb_run is not None:
            self.wandb_run.log({"step": step, **{f"{split}/{k}": v for k, v in numbers.items()}})

    def image(self, step: int, name: str, image: "Image | None") -> None:
        """Log an image, to wandb alone."""
        if self.wandb_run is not None and image is not None:
            import wandb

            self.wandb_run.log({"step": step, name: wandb.Image(image)})

    def close(self, exit_code: int = 0) -> None:
        """Write everything that is buffered."""
        try:
            if self.path is not None:
                with writing(self.path):  # tries once more what a full disk did not take
                    self.file.close()
        finally:
            if self.wandb_run is not None:
                self.wandb_run.finish(exit_code=exit_code)


def start_wandb(config: TrainConfig, folder: Path, run_id: str | None) -> Any:
    """A new wandb run or the one with this id; None where wandb is disabled."""
    mode = config.log.wandb
    if mode == "disabled":
        return None
    import wandb

    try:
        run = wandb.init(
            project=config.log.project,
            name=folder.name,
            id=run_id,
            dir=folder,
            config=config.model_dump(mode="json"),
            mode=mode,
            # Offline, only `wandb sync` will know what the run has already.
            resume="allow" if mode == "online" else None,
        )
    except wandb.Error as error:
        raise ConfigError(
            f"log.wandb={mode}: {error} Run `wandb login`, or use log.wandb=offline."
        ) from error
    # wandb's own step must increase from call to call, but a resumed run repeats some steps.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run
