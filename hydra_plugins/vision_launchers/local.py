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
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from hydra import version
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from vision.config import ConfigError, UserError, parse
from vision.data.workers import end_with_parent
from vision.sweeps.outcome import RunFailedError, RunPreemptedError, read_outcome
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import PREEMPTED, Run
from vision.training.run.stop import StopRequest, stop_requests

if TYPE_CHECKING:
    from vision.cli.sweep_checks import SweepJob

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
        self.name = JobRuntime.instance().get("name")
        self.version_base = str(version.getbase())

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run a batch of jobs. Raises RunPreemptedError if the sweep was stopped, and in a plain
        sweep RunFailedError, without a message, after it has listed the jobs that failed.
        """
        from vision.cli.sweep_checks import compose_jobs

        jobs = compose_jobs(self.hydra_context, self.config, job_overrides, initial_job_idx)
        results = {n: result for n, job in enumerate(jobs) if (result := _stored_result(job))}
        counted = f"{len(jobs)} run{'' if len(jobs) == 1 else 's'}"
        _say(f"{counted}, {len(results)} finished already.")
        with stop_requests() as stop:
            self._run(jobs, results, stop)
        left = len(jobs) - len(results)
        failed = [jobs[n] for n, result in results.items() if result.status is JobStatus.FAILED]
        plain = self.config.hydra.runtime.choices["hydra/sweeper"] == "basic"
        if plain:  # other sweepers have a summary of their own
            finished = len(results) - len(failed)
            _say(f"\nOf {counted}: {finished} finished, {len(failed)} failed, {left} left.")
            for job in failed:
                logged = self.parallel > 1 and _keeps_folder(job)
                _say(f"  failed: {_label(job)}{f', see {OUTPUT} there' if logged else ''}")
            if failed or left:
                _say("The same command skips the finished runs and resumes the others.")
            runs = [job.folder for job in jobs if (job.folder / "status.json").exists()]
            if sweeps := sorted({str(folder.parent) for folder in runs}):
                _say(f"Compare with: vision compare {' '.join(sweeps)}")
        if stop or left:
            raise RunPreemptedError("the sweep was stopped; the same command resumes it.")
        if plain and failed:
            raise RunFailedError
        return [results[n] for n in range(len(jobs))]

    def _run(
        self, jobs: Sequence["SweepJob"], results: dict[int, JobReturn], stop: StopRequest
    ) -> None:
        """Add the results of the other jobs, `parallel` at a time; those stopped have none."""
        waiting = [n for n in range(len(jobs)) if n not in results]
        gpus = visible_gpus() if self.parallel > 1 else []
        running: dict[int, tuple[int, JobProcess]] = {}
        try:
            while running or (waiting and not stop):
                for slot in range(self.parallel):
                    if slot in running:
                        number, process = running[slot]
                        if process.ended(stop):
                            del running[slot]
                            if process.result is not None:
                                results[number] = process.result
                    elif waiting and not stop:
                        place = len(jobs) - len(waiting) + 1
                        number = waiting.pop(0)
                        _say(f"\n[{place}/{len(jobs)}] {_label(jobs[number])}")
                        gpu = gpus[slot % len(gpus)] if gpus else None
                        running[slot] = number, JobProcess(self, jobs[number], gpu)
                time.sleep(0.1)
        finally:
            for _, process in running.values():  # after a second interrupt
                process.kill()

    def run_in_process(self, job: "SweepJob", gpu: str | None, connection: Connection) -> None:
        """Run a job in this process and send its result; a run that was stopped sends none and
        exits with code 75.
        """
        threading.Thread(target=end_with_parent, daemon=True).start()
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        if self.parallel > 1 and _keeps_folder(job):
            job.folder.mkdir(parents=True, exist_ok=True)
            with (job.folder / OUTPUT).open("a") as file:
                os.dup2(file.fileno(), sys.stdout.fileno())
                os.dup2(file.fileno(), sys.stderr.fileno())
        setup_globals()
        version.setbase(self.version_base)
        JobRuntime.instance().set("name", self.name)
        preempted = False

        def task(settings: DictConfig) -> Any:
            nonlocal preempted
            try:
                return self.task_function(settings)
            except RunPreemptedError:
                preempted = True
                raise
            except Exception as error:
                cause = error.__cause__ if isinstance(error, RunFailedError) else error
                if isinstance(cause, UserError):
                    _say(f"error: {cause}")
                else:
                    traceback.print_exception(cause)
                raise RunFailedError(str(error)) from None  # not every error can be pickled

        place = ("hydra.sweep.dir", "hydra.sweep.subdir")
        result = run_job(task, job.config, *place, hydra_context=self.hydra_context)
        if preempted:
            sys.exit(PREEMPTED)
        connection.send(result)


class JobProcess:
    """The process of a job."""

    def __init__(self, launcher: LocalProcessLauncher, job: "SweepJob", gpu: str | None) -> None:
        self._job = job
        self._asked = False
        self.result: JobReturn | None = None
        """None for a job that was stopped."""
        spawn = get_context("spawn")
        self._connection, theirs = spawn.Pipe(duplex=False)
        self._process = spawn.Process(target=launcher.run_in_process, args=(job, gpu, theirs))
        self._process.start()
        theirs.close()

    def ended(self, stop: StopRequest) -> bool:
        """Pass on a request to stop and receive the result; returns whether the process ended."""
        if stop and not self._asked:
            self._process.terminate()  # SIGTERM: saves, then exits
            self._asked = True
        alive = self._process.is_alive()
        if self.result is None and self._connection.poll():
            with suppress(EOFError):
                self.result = self._connection.recv()
        code = self._process.exitcode
        if not alive and not stop and self.result is None and code != PREEMPTED:
            error = RunFailedError(f"the process of the job ended with exit code {code}")
            _say(f"error: {_label(self._job)}: {error}")
            self.result = _result(self._job, JobStatus.FAILED, error)
        return not alive

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.join()


def _result(job: "SweepJob", status: JobStatus, value: Any) -> JobReturn:
    """The result of a job that sends none itself."""
    result = JobReturn(job.overrides, OmegaConf.create(job.settings), status=status)
    result.return_value = value
    return result


def _stored_result(job: "SweepJob") -> JobReturn | None:
    """The result of a run that is finished; refused if it had other settings."""
    run = Run(job.folder)
    if run.status().get("status") != "finished":
        return None
    config = parse(TrainConfig, job.settings)
    run.decision(config)
    return _result(job, JobStatus.COMPLETED, read_outcome(run, config).objective)


def _keeps_folder(job: "SweepJob") -> bool:
    """Whether the command leaves a folder behind."""
    return job.config.hydra.output_subdir is not None


def _label(job: "SweepJob") -> str:
    """The folder; the words, for a command that leaves none behind."""
    return str(job.folder) if _keeps_folder(job) else " ".join(job.overrides)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # stdout is for results


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
