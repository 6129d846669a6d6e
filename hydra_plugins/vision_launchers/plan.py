"""`hydra/launcher=plan`: show the jobs of a sweep and start none."""

from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, read_write


@dataclass
class PlanLauncherConfig:
    """Settings of `hydra/launcher=plan`: none."""

    _target_: str = "hydra_plugins.vision_launchers.plan.PlanLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="plan", node=PlanLauncherConfig)


class PlanLauncher(Launcher):
    """Prints the settings of every job as a YAML document."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what composing the jobs needs."""
        self.hydra_context = hydra_context
        self.config = config.copy()
        # Sweepers write multirun.yaml into the folder of the sweep before they launch.
        self.folder = TemporaryDirectory()
        with read_write(config.hydra):
            config.hydra.sweep.dir = self.folder.name

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Print a batch of jobs."""
        from vision.cli.sweep_checks import compose_jobs, differences

        jobs = compose_jobs(self.hydra_context, self.config, job_overrides, initial_job_idx)
        for job, own in zip(jobs, differences(job_overrides), strict=True):
            print("--- #", *(own or job.overrides))
            print(OmegaConf.to_yaml(job.settings), end="")
        return [JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED) for job in jobs]
