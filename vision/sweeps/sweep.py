"""Sweeps: many runs of one command, each in a folder named by what it was given.

outputs/<sweep>/<setting=value,…>/ is an ordinary run. A sweep has no state of its own: started
again, it leaves out the runs that are finished and goes on with the others.
"""

import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from vision.config import ConfigError, UserError
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import (
    PREEMPTED,
    Run,
    StopRequest,
    open_run,
    run_name,
    stop_requests,
)

LONGEST_NAME = 150
"""File systems allow 255 bytes."""


@dataclass(frozen=True)
class Point:
    """One job as the command line gave it."""

    swept: Mapping[str, Any]
    """The settings that were given several values, with the value in this job."""
    config: TrainConfig
    chosen: Mapping[str, str]
    """The choice made in every group, such as {"model": "vit_mini"}."""


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep."""

    name: str
    """Of its folder within the sweep's."""
    config: TrainConfig

    @property
    def folder(self) -> Path:
        """Where the run is stored."""
        return Path(self.config.output) / self.config.name


def plan_sweep(
    points: Sequence[Point], base: Mapping[str, Any], base_choices: Mapping[str, str]
) -> list[SweepRun]:
    """The runs of a sweep, each with its folder; refused if two of them are the same.

    The sweep's own name, unless given, follows from the settings with one value (`base`), so that
    further values of a setting that is swept already join the same sweep.
    """
    swept = points[0].swept
    if "name" in swept:
        raise ConfigError("name: the name is the sweep's; give it one value.")
    parts = [base_choices[group] for group in ("model", "data") if group not in swept]
    automatic = run_name(base, "-".join(["sweep", *parts]))
    jobs = []
    for point in points:
        name = automatic if point.config.name == "auto" else point.config.name
        folder = Run(Path(point.config.output) / name)
        if folder.status():
            raise ConfigError(f"name: {folder.folder} is a single run; choose another name.")
        own = job_name(point.swept)
        jobs.append(SweepRun(own, point.config.model_copy(update={"name": f"{name}/{own}"})))
    twice = [str(folder) for folder, n in Counter(job.folder for job in jobs).items() if n > 1]
    if twice:
        raise ConfigError(f"two jobs of the sweep are the same run: {', '.join(twice)}.")
    return jobs


def job_name(swept: Mapping[str, Any]) -> str:
    """`optimizer.learning_rate=0.001,seed=0`: the same for the same values, in whatever order and
    notation they were given, and never the same for others. A value that has signs which are
    awkward in a file name gets a digest.
    """
    name = ",".join(f"{key.replace('/', '.')}={_shown(swept[key])}" for key in sorted(swept))
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 7]}-{_digest(name)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"))
    if isinstance(value, str) and not _is_json(value):  # the text "3" is not the number 3
        text = value
    if re.fullmatch(r"[\w.+-]+", text, flags=re.ASCII):
        return text
    plain = re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII).strip("-")
    return "-".join(filter(None, [plain, _digest(text)]))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def run_sweep(jobs: Sequence[SweepRun]) -> int:
    """Run what is not finished, one job after the other, each in a process of its own.

    A job that fails does not stop the others. SIGTERM, SIGINT and SIGUSR1 stop the sweep after the
    present job has saved. Returns 0 if all are finished, 75 if the sweep was stopped, else 1.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "a sweep starts its own processes: start it without torchrun. For several processes "
            "in each job: hydra/launcher=submitit_local hydra.launcher.tasks_per_node=2."
        )
    todo = unfinished(jobs)
    finished = len(jobs) - len(todo)
    failed: dict[str, int] = {}
    interrupted: list[str] = []
    print(f"{counted(jobs)}, {finished} finished already.", flush=True)
    with stop_requests() as stop:
        for number, job in enumerate(todo, finished + 1):
            if stop:
                break
            print(f"\n[{number}/{len(jobs)}] {job.folder}", flush=True)
            code = _in_own_process(job, stop)
            if code == 0:
                finished += 1
            elif code == PREEMPTED or stop:
                interrupted.append(job.name)
            else:
                failed[job.name] = code
    left = len(jobs) - finished - len(failed)
    print(f"\nOf {counted(jobs)}: {finished} finished, {len(failed)} failed, {left} left.")
    for name, code in failed.items():
        print(f"  failed with exit code {code}: {name}")
    if failed or left:
        print("The same command leaves out what is finished and goes on with the rest.")
    parents = sorted({str(job.folder.parent) for job in jobs})
    print(f"Compare with: vision compare {' '.join(parents)}", flush=True)
    if stop or interrupted:
        return PREEMPTED
    return 1 if failed else 0


def counted(jobs: Sequence[SweepRun]) -> str:
    """`1 job`, `2 jobs`."""
    return f"{len(jobs)} job{'' if len(jobs) == 1 else 's'}"


def unfinished(jobs: Sequence[SweepRun]) -> list[SweepRun]:
    """The jobs that are not finished; refused, all at once, if a folder has other settings."""
    todo, mistakes = [], []
    for job in jobs:
        try:
            _, decision = open_run(job.config, "")
        except ConfigError as error:
            mistakes.append(str(error))
        else:
            if decision != "finished":
                todo.append(job)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return todo


def _in_own_process(job: SweepRun, stop: StopRequest) -> int:
    """Train, and hand on a request to stop. Returns the exit code, −n after signal n.

    Memory, threads and the state of torch go with the process; what runs is the config that was
    parsed, whatever has become of YAML files meanwhile.
    """
    process: BaseProcess = get_context("spawn").Process(target=_train, args=(job.config,))
    process.start()
    told = False
    try:
        while process.is_alive():
            process.join(0.2)
            if stop and not told:
                process.terminate()  # SIGTERM: saves, then exits
                told = True
    finally:
        if process.is_alive():  # a second interrupt
            process.kill()
            process.join()
    assert process.exitcode is not None
    return process.exitcode


def _train(config: TrainConfig) -> None:
    """The body of a job's process."""
    from vision.training.loop import train

    try:
        code = train(config, label="")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    sys.exit(code)
