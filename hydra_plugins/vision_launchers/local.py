"""`hydra/launcher=local`: the jobs of a sweep on this machine, each in a process of its own.

The process takes memory, threads and the state of torch with it. Its settings are those of the
start of the sweep, even if YAML files have changed since.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hydra import version
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from vision.config import ConfigError, UserError, parse
from vision.sweeps.outcome import RunFailedError, RunPreemptedError, read_outcome
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import PREEMPTED, Run, StopRequest, stop_requests

OUTPUT = "output.log"
"""File in a run's folder with the output of a job that runs side by side with others."""


@dataclass
class LocalLauncherConfig:
    """Settings of `hydra/launcher=local`."""

    _target_: str = "hydra_plugins.vision_launchers.local.LocalProcessLauncher"
    parallel: int = 1
    """Number of jobs side by side. Each gets one of the visible GPUs, in turn."""


ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalLauncherConfig)


@dataclass
class SweepJob:
    """A job with its settings as they were when the sweep started."""

    overrides: list[str]
    config: DictConfig
    """The settings of the command, and those of Hydra as `hydra`."""
    folder: Path
    result: JobReturn | None = None

    @property
    def label(self) -> str:
        """The folder; the words, for a command that leaves none behind."""
        stays = self.config.hydra.output_subdir is not None
        return str(self.folder) if stays else " ".join(self.overrides)

    def settings(self) -> dict[str, Any]:
        """The resolved settings of the command."""
        HydraConfig.instance().set_config(self.config)
        names = [str(name) for name in self.config if name != "hydra"]
        values = OmegaConf.to_container(OmegaConf.masked_copy(self.config, names), resolve=True)
        assert isinstance(values, dict)
        return {str(name): value for name, value in values.items()}

    def end(self, status: JobStatus, value: Any) -> None:
        """Set the result of a job that sends none itself."""
        self.result = JobReturn(self.overrides, OmegaConf.create(self.settings()), status=status)
        self.result.return_value = value


def compose_jobs(
    context: HydraContext, config: DictConfig, batch: Sequence[Sequence[str]], first: int
) -> list[SweepJob]:
    """Compose the settings of every job, numbered from `first`."""
    setup_globals()
    jobs = []
    for number, overrides in enumerate(batch, first):
        job = context.config_loader.load_sweep_config(config, list(overrides))
        with open_dict(job):
            job.hydra.job.id = job.hydra.job.num = number
        HydraConfig.instance().set_config(job)  # for references such as ${hydra:job.num}
        sweep = job.hydra.sweep
        with read_write(job.hydra):
            sweep.subdir = str(sweep.subdir)
        jobs.append(SweepJob(list(overrides), job, Path(sweep.dir, sweep.subdir)))
    return jobs


class LocalProcessLauncher(Launcher):
    """A job that fails does not stop the others. SIGTERM, SIGINT and SIGUSR1 stop the sweep after
    the running jobs have saved. Finished runs return their objective without a process.
    """

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what the jobs need."""
        if self.parallel < 1:
            raise ConfigError(f"hydra.launcher.parallel: {self.parallel} should be at least 1.")
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run a batch of jobs. Raises RunPreemptedError if the sweep was stopped."""
        jobs = compose_jobs(self.hydra_context, self.config, job_overrides, initial_job_idx)
        for job in jobs:
            _find_result(job)
        waiting = [job for job in jobs if job.result is None]
        counted = f"{len(jobs)} run{'' if len(jobs) == 1 else 's'}"
        _say(f"{counted}, {len(jobs) - len(waiting)} finished already.")
        with stop_requests() as stop:
            self._run(waiting, len(jobs), stop)
        left = sum(job.result is None for job in jobs)
        if self.config.hydra.runtime.choices["hydra/sweeper"] == "basic":  # others have their own
            _summarise(jobs, counted, left)
        if stop or left:
            raise RunPreemptedError("the sweep was stopped; the same command resumes it.")
        return [job.result for job in jobs if job.result is not None]

    def _run(self, waiting: list[SweepJob], total: int, stop: StopRequest) -> None:
        """Run jobs, `parallel` at a time; those that are stopped keep no result."""
        gpus = visible_gpus() if self.parallel > 1 else []
        free = list(range(self.parallel))
        running: dict[int, JobProcess] = {}
        try:
            while running or (waiting and not stop):
                while waiting and free and not stop:
                    slot = free.pop(0)
                    number = total - len(waiting) + 1
                    job = waiting.pop(0)
                    _say(f"\n[{number}/{total}] {job.label}")
                    running[slot] = JobProcess(self, job, gpus[slot % len(gpus)] if gpus else None)
                for slot, process in list(running.items()):
                    if process.ended(stop):
                        del running[slot]
                        free.append(slot)
                time.sleep(0.1)
        finally:
            for process in running.values():  # after a second interrupt
                process.kill()


class JobProcess:
    """The process of a job."""

    def __init__(self, launcher: LocalProcessLauncher, job: SweepJob, gpu: str | None) -> None:
        self._job = job
        self._asked = False
        spawn = get_context("spawn")
        self._connection, theirs = spawn.Pipe(duplex=False)
        hydra = (JobRuntime.instance().get("name"), str(version.getbase()), launcher.hydra_context)
        output = job.folder / OUTPUT if launcher.parallel > 1 else None
        self._process = spawn.Process(
            target=_run_in_process,
            args=(theirs, *hydra, launcher.task_function, job.config, gpu, output),
        )
        self._process.start()
        theirs.close()

    def ended(self, stop: StopRequest) -> bool:
        """Pass on a request to stop and receive the result; returns whether the process ended."""
        if stop and not self._asked:
            self._process.terminate()  # SIGTERM: saves, then exits
            self._asked = True
        alive = self._process.is_alive()
        if self._job.result is None and self._connection.poll():
            with suppress(EOFError):
                self._job.result = self._connection.recv()
        code = self._process.exitcode
        if not alive and not stop and self._job.result is None and code != PREEMPTED:
            error = RunFailedError(f"the process of the job ended with exit code {code}")
            self._job.end(JobStatus.FAILED, error)
        return not alive

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.join()


def _summarise(jobs: Sequence[SweepJob], counted: str, left: int) -> None:
    failed = [job for job in jobs if job.result and job.result.status is JobStatus.FAILED]
    finished = len(jobs) - len(failed) - left
    _say(f"\nOf {counted}: {finished} finished, {len(failed)} failed, {left} left.")
    for job in failed:
        _say(f"  failed: {job.label}")
    if failed or left:
        _say("The same command skips the finished runs and resumes the others.")
    runs = [job.folder for job in jobs if (job.folder / "status.json").exists()]
    if sweeps := sorted({str(folder.parent) for folder in runs}):
        _say(f"Compare with: vision compare {' '.join(sweeps)}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # stdout is for results


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _find_result(job: SweepJob) -> None:
    """Set the result of a run that is finished; refused if it had other settings."""
    run = Run(job.folder)
    if run.status().get("status") == "finished":
        config = parse(TrainConfig, job.settings())
        run.decision(config)
        job.end(JobStatus.COMPLETED, read_outcome(run, config).objective)


def _run_in_process(
    connection: Connection,
    name: str,
    version_base: str,
    context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    gpu: str | None,
    output: Path | None,
) -> None:
    """Run a job and send its result; a run that was stopped sends none and exits with code 75."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
    setup_globals()
    version.setbase(version_base)
    JobRuntime.instance().set("name", name)
    preempted = False

    def task(settings: DictConfig) -> Any:
        nonlocal preempted
        try:
            return task_function(settings)
        except RunPreemptedError:
            preempted = True
            raise
        except Exception as error:
            cause = error.__cause__ if isinstance(error, RunFailedError) else error
            if isinstance(cause, UserError):
                print(f"error: {cause}", file=sys.stderr)
            else:
                traceback.print_exception(cause)
            raise RunFailedError(str(error)) from None  # not every error can be pickled

    place = ("hydra.sweep.dir", "hydra.sweep.subdir")
    result = run_job(task, config, *place, hydra_context=context)
    if preempted:
        sys.exit(PREEMPTED)
    connection.send(result)


def _end_with_parent() -> None:
    """End this process at once when that of the sweep was killed: a run that nobody waits for
    would hold its lock against the next start of the sweep.
    """
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
