"""`hydra/launcher=local`: the jobs of a sweep on this machine, each in a process of its own."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hydra import version
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.vision_launchers.sweep_jobs import SweepJob, compose_jobs

OUTPUT = "output.log"
"""File in a run's folder with the output of a job that runs side by side with others."""


@dataclass
class LocalLauncherConfig:
    """Settings of `hydra/launcher=local`."""

    _target_: str = "hydra_plugins.vision_launchers.local.LocalProcessLauncher"
    parallel: int = 1
    """Number of jobs side by side. Each gets one of the visible GPUs, in turn."""


ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalLauncherConfig)


class LocalProcessLauncher(Launcher):
    """Runs every job in a process of its own, which takes memory, threads and the state of torch
    with it, with the settings that were composed when the sweep started.

    A job that fails does not stop the others. SIGTERM, SIGINT and SIGUSR1 stop the sweep after the
    running jobs have saved. Finished runs return their objective without a process.
    """

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what the jobs need."""
        from vision.config import ConfigError

        if self.parallel < 1:
            raise ConfigError(f"hydra.launcher.parallel: {self.parallel} should be at least 1.")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "a sweep starts its own processes: start it without torchrun. For several "
                "processes per run: hydra/launcher=submitit_local hydra.launcher.tasks_per_node=2."
            )
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run a batch of jobs. Raises RunPreemptedError if the sweep was stopped."""
        from vision.sweeps.outcome import RunPreemptedError

        jobs = compose_jobs(self.hydra_context, self.config, job_overrides, initial_job_idx)
        results = [_stored_result(job) for job in jobs]
        finished = sum(result is not None for result in results)
        print(f"{_counted(jobs)}, {finished} finished already.", flush=True)
        stopped = self._run(jobs, results)
        _summarise(jobs, results)
        if stopped:
            raise RunPreemptedError("the sweep was stopped; the same command resumes it.")
        return [result for result in results if result is not None]

    def _run(self, jobs: Sequence[SweepJob], results: list[JobReturn | None]) -> bool:
        """Run the jobs without a result; returns whether the sweep was stopped."""
        from vision.training.run.run_folder import stop_requests

        waiting = [n for n, result in enumerate(results) if result is None]
        free = list(range(self.parallel))
        running: dict[int, JobProcess] = {}
        started = len(jobs) - len(waiting)
        with stop_requests() as stop:
            gpus = visible_gpus() if self.parallel > 1 else []
            try:
                while running or (waiting and not stop):
                    while waiting and free and not stop:
                        number, slot = waiting.pop(0), free.pop(0)
                        started += 1
                        print(f"\n[{started}/{len(jobs)}] {jobs[number].folder}", flush=True)
                        gpu = gpus[slot % len(gpus)] if gpus else None
                        running[number] = JobProcess(self, jobs[number], slot, gpu)
                    for number, process in list(running.items()):
                        if stop:
                            process.stop()
                        if process.ended():
                            results[number] = process.result(bool(stop))
                            free.append(process.slot)
                            del running[number]
                    time.sleep(0.1)
            finally:
                for process in running.values():  # after a second interrupt
                    process.kill()
        return bool(stop) or None in results


class JobProcess:
    """The process of a job."""

    def __init__(
        self, launcher: LocalProcessLauncher, job: SweepJob, slot: int, gpu: str | None
    ) -> None:
        self.job = job
        self.slot = slot
        self._asked = False
        self._received: JobReturn | None = None
        spawn = get_context("spawn")
        self._connection, theirs = spawn.Pipe(duplex=False)
        output = job.folder / OUTPUT if launcher.parallel > 1 else None
        hydra = (JobRuntime.instance().get("name"), str(version.getbase()))
        self._process = spawn.Process(
            target=_run_in_process,
            args=(theirs, launcher.hydra_context, launcher.task_function, job.config, *hydra),
            kwargs={"gpu": gpu, "output": output},
        )
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """Ask the job, once, to save and exit."""
        if not self._asked:
            self._process.terminate()
            self._asked = True

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.join()

    def ended(self) -> bool:
        """Receive the result, if it is there; returns whether the process has ended."""
        alive = self._process.is_alive()
        if self._received is None and self._connection.poll():
            try:
                self._received = self._connection.recv()
            except EOFError:
                self._process.join()
                return True
        return not alive

    def result(self, stopping: bool) -> JobReturn | None:
        """The result; None for a run that was stopped and is to be resumed."""
        from vision.sweeps.outcome import RunFailedError
        from vision.training.run.run_folder import PREEMPTED

        if self._received is not None:
            return self._received
        code = self._process.exitcode
        if code == PREEMPTED or stopping:
            return None
        result = _job_return(self.job, JobStatus.FAILED)
        result.return_value = RunFailedError(f"the process ended with exit code {code}")
        return result


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[:count] if given else [str(n) for n in range(count)]


def _stored_result(job: SweepJob) -> JobReturn | None:
    """The result of a run that is finished already; refused if it had other settings."""
    from vision.config import parse
    from vision.sweeps.outcome import read_outcome
    from vision.training.configs import TrainConfig
    from vision.training.run.run_folder import Run

    run = Run(job.folder)
    if run.status().get("status") != "finished":
        return None
    config = parse(TrainConfig, job.settings)
    run.decision(config)
    result = _job_return(job, JobStatus.COMPLETED)
    result.return_value = read_outcome(run, config).objective
    return result


def _job_return(job: SweepJob, status: JobStatus) -> JobReturn:
    return JobReturn(
        overrides=job.overrides,
        cfg=OmegaConf.create(job.settings),
        hydra_cfg=OmegaConf.masked_copy(job.config, "hydra"),
        working_dir=str(Path.cwd()),
        task_name=JobRuntime.instance().get("name"),
        status=status,
    )


def _summarise(jobs: Sequence[SweepJob], results: Sequence[JobReturn | None]) -> None:
    finished = sum(r is not None and r.status is JobStatus.COMPLETED for r in results)
    failed = [j for j, r in zip(jobs, results, strict=True) if r and r.status is JobStatus.FAILED]
    left = len(jobs) - finished - len(failed)
    print(f"\nOf {_counted(jobs)}: {finished} finished, {len(failed)} failed, {left} left.")
    for job in failed:
        print(f"  failed: {job.folder.name}")
    if failed or left:
        print("The same command skips the finished runs and resumes the others.")
    sweeps = sorted(
        {str(job.folder.parent) for job in jobs if (job.folder / "status.json").exists()}
    )
    if sweeps:
        print(f"Compare with: vision compare {' '.join(sweeps)}", flush=True)


def _counted(jobs: Sequence[SweepJob]) -> str:
    """`1 run`, `2 runs`."""
    return f"{len(jobs)} run{'' if len(jobs) == 1 else 's'}"


def _run_in_process(
    connection: Connection,
    context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    name: str,
    version_base: str,
    gpu: str | None,
    output: Path | None,
) -> None:
    """Run a job and send its result; a run that was stopped sends none and exits with code 75."""
    from vision.config import UserError
    from vision.sweeps.outcome import RunFailedError, RunPreemptedError
    from vision.training.run.run_folder import PREEMPTED

    preempted = False

    def task(settings: DictConfig) -> Any:
        nonlocal preempted
        try:
            return task_function(settings)
        except RunPreemptedError:
            preempted = True
            raise
        except RunFailedError:
            raise
        except Exception as error:  # in the job's own output; not every error can be pickled
            lines = [f"error: {error}"] if isinstance(error, UserError) else None
            print("".join(lines or traceback.format_exception(error)), file=sys.stderr, flush=True)
            raise RunFailedError(str(error)) from None

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
    result = run_job(
        task_function=task,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        hydra_context=context,
    )
    if preempted:
        sys.exit(PREEMPTED)
    connection.send(result)


def _end_with_parent() -> None:
    """End this process at once when the one of the sweep was killed: a run that nobody waits for
    would hold its lock against the next start of the sweep.
    """
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
