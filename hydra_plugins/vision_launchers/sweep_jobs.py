"""Jobs of a sweep as both launchers see them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write


@dataclass(frozen=True)
class SweepJob:
    """A job with its settings as they were when the sweep started."""

    overrides: list[str]
    config: DictConfig
    """The settings of the command, and those of Hydra as `hydra`."""
    folder: Path

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved settings of the command."""
        HydraConfig.instance().set_config(self.config)
        names = [str(name) for name in self.config if name != "hydra"]
        values = OmegaConf.to_container(OmegaConf.masked_copy(self.config, names), resolve=True)
        assert isinstance(values, dict)
        return {str(name): value for name, value in values.items()}


def compose_jobs(
    context: HydraContext, config: DictConfig, batch: Sequence[Sequence[str]], first: int
) -> list[SweepJob]:
    """Compose the settings of every job, from YAML files that may change afterwards."""
    setup_globals()
    jobs = []
    for number, overrides in enumerate(batch, first):
        job = context.config_loader.load_sweep_config(config, list(overrides))
        with open_dict(job):
            job.hydra.job.id = job.hydra.job.num = number
        HydraConfig.instance().set_config(job)  # for references such as ${hydra:job.num}
        with read_write(job.hydra):
            job.hydra.sweep.subdir = str(job.hydra.sweep.subdir)
        folder = Path(job.hydra.sweep.dir, job.hydra.sweep.subdir)
        jobs.append(SweepJob(list(overrides), job, folder))
    return jobs
