"""Runs of a sweep submitted to a cluster. submitit's only door; see docs/decisions/0004.

Every task of a job runs `train` in its own process, without torchrun, so that the cluster's signals
reach the training itself.
"""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from vision.config import ConfigError, parse
from vision.files import write_text
from vision.sweeps.sweep import SweepRun, counted, unfinished
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import PREEMPTED

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
ACTIVE = ("PENDING", "RUNNING", "REQUEUED", "SUSPENDED", "CONFIGURING", "COMPLETING", "RESIZING")
"""States of a Slurm job that has not ended."""


def submit_sweep(runs: Sequence[SweepRun], cluster: str, settings: Mapping[str, Any]) -> int:
    """Submit the runs that are neither finished nor submitted already. Returns 0.

    `cluster` is an executor of submitit (slurm, local), `settings` those of Hydra's launcher.
    """
    import submitit

    folder = runs[0].folder.parent / ".submitit"
    # References to Hydra's own settings (${hydra.…}) are defaults of its launcher.
    given = {k: v for k, v in settings.items() if not str(v).startswith("${") and v is not None}
    given = {"name": folder.parent.name, **given}
    logs = given.pop("submitit_folder", folder / "%j")
    timeouts = {f"{cluster}_{k}": given.pop(k) for k in ("max_num_timeout",) if k in given}
    try:
        executor = submitit.AutoExecutor(logs, cluster=cluster, **timeouts)
        executor.update_parameters(
            **{k if k in COMMON else f"{cluster}_{k}": v for k, v in given.items()}
        )
    except (ValueError, TypeError, NameError, RuntimeError) as error:
        raise ConfigError(f"hydra/launcher: submitit says: {error}") from error
    todo = unfinished(runs)
    record = folder / "jobs.json"
    jobs = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    keys = {run.name: f"{cluster} {run.name}" for run in todo}
    new = [r for r in todo if not _is_active(cluster, folder, jobs.get(keys[r.name]))]
    print(
        f"{counted(runs)}: {len(runs) - len(todo)} finished already, {len(todo) - len(new)} "
        f"submitted already, {len(new)} submitted now."
    )
    if not new:
        return 0
    arguments = [json.dumps(run.config.model_dump(mode="json")) for run in new]
    try:
        submitted = executor.map_array(ClusterJob(), arguments)
    except (submitit.core.utils.FailedJobError, OSError) as error:
        raise ConfigError(f"hydra/launcher: the jobs were not accepted: {error}") from error
    for run, job in zip(new, submitted, strict=True):
        jobs[keys[run.name]] = job.job_id
        print(f"  {job.job_id}  {run.folder}  {job.paths.stdout}")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(record, json.dumps(jobs, indent=1) + "\n")
    print("The same command submits again what ended before it was finished.")
    print(f"Compare with: vision compare {folder.parent}")
    return 0


class ClusterJob:
    """The function that the tasks of a job call, pickled by submitit into the sweep's folder."""

    def __call__(self, settings: str) -> int:
        """Train; shortly before the job's time limit, save and let submitit requeue the job."""
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
            signal.raise_signal(signal.SIGTERM)  # `train` saves after its step

        requeue = signal.signal(number, warn)
        try:
            code = train(config, label="")
        finally:
            signal.signal(number, requeue)
        if warned and code == PREEMPTED:
            signal.raise_signal(number)  # everything is saved: submitit requeues
        return code

    def checkpoint(self, settings: str) -> Any:
        """The job that submitit requeues: the same, since a run resumes by itself."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, settings)


def _is_active(cluster: str, folder: Path, job_id: str | None) -> bool:
    """Whether a job waits or runs, so that submitting its run again would train it twice."""
    if job_id is None:
        return False
    if cluster == "slurm":
        import submitit

        state: str = submitit.SlurmJob(folder=folder / "%j", job_id=job_id).state
        return state.partition(" ")[0] in ACTIVE
    # A local job's number is that of its process, or of a later one that got the same number.
    try:
        if Path("/proc").is_dir():
            return b"submitit" in Path(f"/proc/{job_id}/cmdline").read_bytes()
        os.kill(int(job_id), 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    return True
