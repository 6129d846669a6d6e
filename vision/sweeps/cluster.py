"""Jobs of a sweep handed over to a cluster. submitit's only door; see docs/decisions/0004.

Every task of a job runs `train` in its own process: no torchrun in between, so that the cluster's
signals reach the training itself.
"""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from vision.config import ConfigError, parse
from vision.sweeps.sweep import SweepRun, counted, unfinished
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import PREEMPTED

OWN = ("submitit_folder", "max_num_timeout")
"""Settings of Hydra's launcher that go to the executor's constructor."""
COMMON = (
    "timeout_min",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "mem_gb",
    "nodes",
    "name",
    "stderr_to_stdout",
)
"""Settings that every executor has; the names of others start with the executor's."""
WAITING = ("PENDING", "RUNNING", "REQUEUED", "SUSPENDED", "CONFIGURING", "COMPLETING", "RESIZING")
"""States of a Slurm job that will still do something."""


def submit_sweep(jobs: Sequence[SweepRun], cluster: str, settings: Mapping[str, Any]) -> int:
    """Hand over the jobs that are neither finished nor with the cluster already. Returns 0.

    `cluster` is an executor of submitit (slurm, local), `settings` those of Hydra's launcher.
    """
    import submitit

    folder = jobs[0].folder.parent / ".submitit"
    # What refers to Hydra's own settings (${hydra.…}) was not given.
    given = {k: v for k, v in settings.items() if not str(v).startswith("${") and v is not None}
    given = {"submitit_folder": str(folder / "%j"), "name": folder.parent.name, **given}
    try:
        executor = submitit.AutoExecutor(
            given["submitit_folder"],
            cluster=cluster,
            **{f"{cluster}_{k}": given[k] for k in OWN[1:] if k in given},
        )
        executor.update_parameters(
            **{k if k in COMMON else f"{cluster}_{k}": v for k, v in given.items() if k not in OWN}
        )
    except (ValueError, TypeError, NameError, RuntimeError) as error:
        raise ConfigError(f"hydra/launcher: submitit says: {error}") from error
    todo = unfinished(jobs)
    record = _Record(folder / "jobs.json", cluster)
    new = [job for job in todo if not record.waits(job)]
    print(
        f"{counted(jobs)}: {len(jobs) - len(todo)} finished already, {len(todo) - len(new)} with "
        f"the cluster already, {len(new)} handed over."
    )
    if not new:
        return 0
    arguments = [json.dumps(job.config.model_dump(mode="json")) for job in new]
    try:
        submitted = executor.map_array(ClusterJob(), arguments)
    except (submitit.core.utils.FailedJobError, OSError) as error:
        raise ConfigError(f"hydra/launcher: the jobs were not taken: {error}") from error
    record.add(new, submitted)
    for job, handle in zip(new, submitted, strict=True):
        print(f"  {handle.job_id}  {job.folder}  {handle.paths.stdout}")
    print("The same command hands over again what ended before it was finished.")
    print(f"Compare with: vision compare {folder.parent}")
    return 0


class ClusterJob:
    """What a task of a job calls. submitit stores it with pickle in the sweep's folder."""

    def __call__(self, settings: str) -> int:
        """Train; when the job's time is nearly over, save and have it put into the queue again."""
        import submitit

        from vision.training.loop import train

        environment = submitit.JobEnvironment()
        if environment.num_tasks > 1:
            submitit.helpers.TorchDistributedEnvironment().export(
                set_cuda_visible_devices=False, overwrite=True
            )
        config = parse(TrainConfig, json.loads(settings))
        number = getattr(signal, f"SIG{environment.USR_SIG}")
        warned = False

        def warn(number: int, frame: FrameType | None) -> None:
            nonlocal warned
            warned = True
            signal.raise_signal(signal.SIGTERM)  # which `train` answers after its step

        requeue = signal.signal(number, warn)
        try:
            code = train(config, label="")
        finally:
            signal.signal(number, requeue)
        if warned and code == PREEMPTED:
            signal.raise_signal(number)  # now that all is saved: submitit's own answer to it
        return code

    def checkpoint(self, settings: str) -> Any:
        """What submitit puts into the queue again: the same, since a run knows where it stands."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, settings)


class _Record:
    """Which run was handed over as which job, so that none is trained twice at the same time."""

    def __init__(self, file: Path, cluster: str) -> None:
        self.file = file
        self.cluster = cluster
        self.jobs: dict[str, str] = {}
        if file.exists():
            self.jobs = json.loads(file.read_text(encoding="utf-8"))

    def waits(self, job: SweepRun) -> bool:
        """Whether the job is in the queue or runs."""
        key = f"{self.cluster} {job.name}"
        return key in self.jobs and _is_active(self.cluster, self.file.parent, self.jobs[key])

    def add(self, jobs: Sequence[SweepRun], submitted: Sequence[Any]) -> None:
        self.jobs |= {
            f"{self.cluster} {job.name}": handle.job_id
            for job, handle in zip(jobs, submitted, strict=True)
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.jobs, indent=1) + "\n", encoding="utf-8")


def _is_active(cluster: str, folder: Path, job_id: str) -> bool:
    if cluster == "slurm":
        import submitit

        state: str = submitit.SlurmJob(folder=folder / "%j", job_id=job_id).state
        return state.partition(" ")[0] in WAITING
    # A local job's number is that of its process, or by now that of another one.
    try:
        if Path("/proc").is_dir():
            return b"submitit" in Path(f"/proc/{job_id}/cmdline").read_bytes()
        os.kill(int(job_id), 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    return True
