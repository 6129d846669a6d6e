"""A training run as a job of submitit, on Slurm or this machine. submitit's only door.

Every task of a job runs the training in its own process, without torchrun, so that the cluster's
signals reach the training itself.
"""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from getpass import getuser
from pathlib import Path
from types import FrameType
from typing import Literal

from vision.config import ConfigError, shorten
from vision.sweeps.outcome import RunPreemptedError
from vision.training.run.run_folder import PREEMPTED

TIMEOUTS = "hydra.launcher.max_num_timeout"
IN_CLUSTER = "SUBMITIT_EXECUTOR"
"""Variable in the environment of a job of submitit."""


def cluster_settings(launcher: str, given: Iterable[str]) -> dict[str, str]:
    """Settings of Hydra's launcher that differ from the plugin's unless given; refused where
    there is no Slurm.
    """
    if launcher != "submitit_slurm":
        return {}
    if shutil.which("srun") is None:
        raise ConfigError(
            "hydra/launcher=submitit_slurm: srun was not found. Call it on a node of a Slurm "
            "cluster, or choose hydra/launcher=local."
        )
    # A run resumes where it was cut off, so a job may be requeued whenever its time is up.
    return {} if any(TIMEOUTS in word for word in given) else {TIMEOUTS: "1000"}


def refuse_if_queued(sweep: Path) -> None:
    """Refuse a sweep whose jobs an earlier start has left in Slurm's queue: the plugin would submit
    every run once more. It keeps a folder for each job, named after its number.
    """
    logs = sweep / ".submitit"
    if not logs.is_dir():
        return
    shown = _ask_slurm("squeue", "--noheader", "--array", f"--user={getuser()}", "--format=%i")
    if queued := sorted({folder.name for folder in logs.iterdir()} & set(shown.split())):
        raise ConfigError(
            f"jobs of the sweep {sweep} are in Slurm's queue: {shorten(queued)}. Wait until they "
            f"have ended, or cancel them (scancel {queued[0].partition('_')[0]}) and start again. "
            f"Their logs are in {logs}."
        )


@contextmanager
def cluster_job() -> Iterator[None]:
    """Within, each task of a job of submitit is a process of one training, and the warning before
    the time limit makes it save and raise RunPreemptedError; then the job is requeued. The same
    happens if Slurm preempts the job.

    On its own, submitit requeues at once, without saving, and ignores SIGTERM.
    """
    import submitit

    environment = submitit.JobEnvironment()
    if environment.num_tasks > 1:
        submitit.helpers.TorchDistributedEnvironment().export(
            set_cuda_visible_devices=False, overwrite=True
        )
    number = getattr(signal, f"SIG{environment.USR_SIG}")
    warned = False

    def warn(number: int, frame: FrameType | None) -> None:
        nonlocal warned
        warned = True
        signal.raise_signal(signal.SIGTERM)  # training saves after its step

    requeue = signal.signal(number, warn)
    try:
        yield
    except RunPreemptedError:
        signal.signal(number, requeue)
        on_slurm = environment.cluster == "slurm"
        state = _job_state(environment.job_id) if on_slurm and not warned else ""
        if warned or state == "preempted":
            signal.raise_signal(number)  # everything is saved
        elif state == "requeued":
            raise SystemExit(PREEMPTED) from None  # the sweep waits for a result of the next start
        raise
    finally:
        signal.signal(number, requeue)


def _job_state(job: str) -> Literal["preempted", "requeued", ""]:
    """What Slurm is about to do with a job that got SIGTERM, if it is not its end.

    A job with a time of grace (GraceTime) is preempted, but running: Slurm requeues it only if it
    lasts longer than that. One without is completing already and, unlike a cancelled one, has no
    time of its end.
    """
    shown = _ask_slurm("scontrol", "--oneliner", "show", "job", job)
    if re.search(r"JobState=RUNNING .*PreemptTime=\d", shown):
        return "preempted"
    return "requeued" if re.search(r"JobState=COMPLETING .*EndTime=Unknown", shown) else ""


def _ask_slurm(*command: str) -> str:
    """What one of Slurm's programs prints; "" if it does not answer in five attempts."""
    for _ in range(5):  # a busy controller drops connections
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            return result.stdout
        time.sleep(1)
    return ""
