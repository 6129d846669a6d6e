"""Sweeps: many runs of one command, each in a folder named after its settings.

outputs/<sweep>/<setting=value,…>/ is an ordinary run. A sweep has no state of its own: the same
command skips the runs that are finished and resumes the others.
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
from pathlib import Path
from typing import Any

from vision.config import ConfigError, UserError
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import PREEMPTED, Run, StopRequest, run_name, stop_requests

LONGEST_NAME = 150
"""Characters in a folder's name; file systems allow 255 bytes."""


@dataclass(frozen=True)
class Point:
    """One run as given on the command line."""

    swept: Mapping[str, Any]
    """The settings with several values, with the value in this run."""
    config: TrainConfig
    chosen: Mapping[str, str]
    """The choice made in every group, such as {"model": "vit_mini"}."""


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep."""

    name: str
    """Name of its folder within the sweep's."""
    config: TrainConfig

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.output) / self.config.name


def plan_sweep(
    points: Sequence[Point], base: Mapping[str, Any], base_choices: Mapping[str, str]
) -> list[SweepRun]:
    """The runs of a sweep, each with its folder; refused if two of them are the same.

    Unless given, the name of the sweep follows from the settings with one value (`base`), so that
    further values of a swept setting join the same sweep.
    """
    swept = points[0].swept
    if "name" in swept:
        raise ConfigError("name: the name is the sweep's; give it one value.")
    parts = [base_choices[group] for group in ("model", "data") if group not in swept]
    automatic = run_name(base, "-".join(["sweep", *parts]))
    runs = []
    for point in points:
        sweep = automatic if point.config.name == "auto" else point.config.name
        folder = Path(point.config.output) / sweep
        if Run(folder).status():
            raise ConfigError(f"name: {folder} is a single run; choose another name.")
        name = sweep_run_name(point.swept)
        runs.append(SweepRun(name, point.config.model_copy(update={"name": f"{sweep}/{name}"})))
    twice = [str(folder) for folder, n in Counter(run.folder for run in runs).items() if n > 1]
    if twice:
        raise ConfigError(f"two runs of the sweep are the same: {', '.join(twice)}.")
    return runs


def sweep_run_name(swept: Mapping[str, Any]) -> str:
    """`optimizer.learning_rate=0.001,seed=0`: the same for the same values in any order and
    notation, and different for different values. A value with characters that are awkward in a
    file name gets a digest.
    """
    name = ",".join(f"{key.replace('/', '.')}={_shown(swept[key])}" for key in sorted(swept))
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 7]}-{_digest(name)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"))
    if isinstance(value, str):
        try:
            json.loads(value)  # the text "3" must not be taken for the number 3
        except ValueError:
            text = value
    if re.fullmatch(r"[\w.+-]+", text, flags=re.ASCII):
        return text
    plain = re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII).strip("-")
    return "-".join(filter(None, [plain, _digest(text)]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def run_sweep(runs: Sequence[SweepRun]) -> int:
    """Train the runs that are not finished, one after the other, each in a process of its own.

    A run that fails does not stop the others. SIGTERM, SIGINT and SIGUSR1 stop the sweep after the
    present run has saved. Returns 0 if all are finished, 75 if the sweep was stopped, else 1.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "a sweep starts its own processes: start it without torchrun. For several processes "
            "per run: hydra/launcher=submitit_local hydra.launcher.tasks_per_node=2."
        )
    todo = unfinished(runs)
    finished = len(runs) - len(todo)
    failed: dict[str, int] = {}
    interrupted = False
    print(f"{counted(runs)}, {finished} finished already.", flush=True)
    with stop_requests() as stop:
        for number, run in enumerate(todo, finished + 1):
            if stop:
                break
            print(f"\n[{number}/{len(runs)}] {run.folder}", flush=True)
            code = _in_own_process(run, stop)
            if code == 0:
                finished += 1
            elif code == PREEMPTED or stop:
                interrupted = True
            else:
                failed[run.name] = code
    left = len(runs) - finished - len(failed)
    print(f"\nOf {counted(runs)}: {finished} finished, {len(failed)} failed, {left} left.")
    for name, code in failed.items():
        print(f"  failed with exit code {code}: {name}")
    if failed or left:
        print("The same command skips the finished runs and resumes the others.")
    parents = sorted({str(run.folder.parent) for run in runs})
    print(f"Compare with: vision compare {' '.join(parents)}", flush=True)
    if stop or interrupted:
        return PREEMPTED
    return 1 if failed else 0


def counted(runs: Sequence[SweepRun]) -> str:
    """`1 run`, `2 runs`."""
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}"


def unfinished(runs: Sequence[SweepRun]) -> list[SweepRun]:
    """The runs that are not finished; refused, all at once, where a folder has other settings."""
    todo, mistakes = [], []
    for run in runs:
        try:
            if Run(run.folder).decision(run.config) != "finished":
                todo.append(run)
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return todo


def _in_own_process(run: SweepRun, stop: StopRequest) -> int:
    """Train, and pass on a request to stop. Returns the exit code, −n after signal n.

    The process takes memory, threads and the state of torch with it, and trains with the parsed
    config, even if YAML files have changed since.
    """
    process = get_context("spawn").Process(target=_train, args=(run.config,))
    process.start()
    asked = False
    try:
        while process.is_alive():
            process.join(0.2)
            if stop and not asked:
                process.terminate()  # SIGTERM: saves, then exits
                asked = True
    finally:
        if process.is_alive():  # a second interrupt
            process.kill()
            process.join()
    assert process.exitcode is not None
    return process.exitcode


def _train(config: TrainConfig) -> None:
    from vision.training.loop import train

    try:
        code = train(config, label="")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    sys.exit(code)
