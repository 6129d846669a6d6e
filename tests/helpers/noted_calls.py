"""A callback for Hydra that notes what it sees, named on the command line by tests."""

from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class NoteCalls(Callback):
    """Notes the calls of Hydra; the working directory of a job and what it returned."""

    calls: ClassVar[list[str]] = []
    folders: ClassVar[list[Path]] = []
    returned: ClassVar[list[Any]] = []

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the call."""
        self.calls.append("run_start")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the call."""
        self.calls.append("multirun_start")

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the working directory."""
        self.calls.append("job_start")
        self.folders.append(Path.cwd())

    def on_job_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Note what the job returned."""
        self.calls.append("job_end")
        self.returned.append(kwargs["job_return"].return_value)
