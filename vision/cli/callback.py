"""Strictness before Hydra makes a folder or starts a job: settings are parsed, runs decided on.

Hydra swallows the exceptions of a callback, so a mistake leaves it as `Ended`, a SystemExit.
"""

import atexit
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from vision.cli.commands import COMMANDS, Choices, Command
from vision.cli.composition import Composer, Jobs, expand, plain, quoted
from vision.cli.synonyms import remedy
from vision.config import ConfigError, parse
from vision.sweeps.cluster import cluster_settings
from vision.sweeps.points import point_folder
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import Run, find_run, run_name


class Ended(SystemExit):
    """The application ends with an error that has not been printed yet."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1)
        self.error = error


@contextmanager
def _ending() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Ended(error) from error


class CheckSettings(Callback):
    """Checks the settings of a command, and finds the folder of a training run or sweep."""

    def __init__(self, command: str) -> None:
        self._name = command  # alone is pickled for the process of a job

    @property
    def command(self) -> Command:
        """The command whose settings are checked."""
        return COMMANDS[self._name]

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Parse the settings; decide whether a run is new, to be resumed, finished or refused."""
        with _ending():
            values, chosen = plain(config)
            settings = checked(self.command, values, chosen)
            if not isinstance(settings, TrainConfig):
                return
            run = find_run(settings, _label(chosen))
            if config.hydra.run.dir != "auto":
                run = Run(Path(config.hydra.run.dir))
            decision = run.decision(settings)
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.run.dir = str(run.folder)
                if decision == "finished" or not _is_first_process():  # writes nothing
                    config.hydra.output_subdir = None
                    config.hydra.job_logging = {"version": 1, "root": None}

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Hand the error of a job to the command line, before Hydra prints its own text. A run that
        failed before it started leaves no folder behind.
        """
        job_return: JobReturn = kwargs["job_return"]
        if job_return.status is JobStatus.FAILED:
            folder = Path(config.hydra.runtime.output_dir)
            started = any((folder / name).exists() for name in ("status.json", ".lock"))
            if self.command.config is TrainConfig and not started:
                shutil.rmtree(folder / (config.hydra.output_subdir or ".hydra"), ignore_errors=True)
                with suppress(OSError):  # there is more in the folder
                    folder.rmdir()
            with _ending(), redirect_stderr(StringIO()):
                _ = job_return.return_value

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Parse the settings of all jobs that are known beforehand, and find the sweep's folder."""
        with _ending():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ConfigError(
                    "a sweep starts its own processes: start it without torchrun. For several "
                    "processes per run: hydra/launcher=submitit_local "
                    "hydra.launcher.tasks_per_node=2."
                )
            given = _words(config.hydra.overrides.hydra)
            composer = Composer(config.hydra.job.config_name, tuple(given))
            known = config.hydra.runtime.choices["hydra/sweeper"] == "basic"
            params = OmegaConf.select(config, "hydra.sweeper.params") or {}
            words = [f"{key}={value}" for key, value in params.items()]
            words += _words(config.hydra.overrides.task)
            jobs = expand(composer.read(words)[0], known)
            points = check_jobs(self.command, composer, jobs)
            pinned: dict[str, Any] = {
                "hydra.job.config.override_dirname.exclude_keys": [
                    *config.hydra.job.config.override_dirname.exclude_keys,
                    *jobs.fixed,
                ]
            }
            launcher = config.hydra.runtime.choices["hydra/launcher"]
            pinned |= cluster_settings(launcher, given)
            if config.hydra.sweep.dir == "auto":
                pinned["hydra.sweep.dir"] = self._sweep_folder(composer, jobs)
            _pin(config, pinned)
            if self.command.config is TrainConfig and known:
                _check_runs(points, pinned)

    def _sweep_folder(self, composer: Composer, jobs: Jobs) -> str:
        """Folder of a sweep; its name follows from the settings with one value, so that further
        values of a swept setting join the same sweep.
        """
        if self.command.config is not TrainConfig:  # which is to leave nothing behind
            folder = tempfile.mkdtemp(prefix="vision-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            return folder
        if "name" in jobs.swept:
            raise ConfigError("name: the name is the sweep's; give it one value.")
        values, chosen = plain(composer.compose(list(jobs.fixed.values())), complete=False)
        name = values["name"]
        if name == "auto":
            name = run_name(values, "-".join(filter(None, ["sweep", _label(chosen, jobs.swept)])))
        sweep = Path(values["output"]) / name
        if Run(sweep).status():
            raise ConfigError(f"name: {sweep} is a single run; choose another name.")
        return str(sweep)


def checked(command: Command, values: Mapping[str, Any], chosen: Choices) -> Any:
    """The config of a command; names of settings in other tools are answered with ours."""
    return parse(command.config, values, partial(remedy, command.config, chosen))


@dataclass(frozen=True)
class Point:
    """One job of a sweep."""

    composed: DictConfig
    config: Any


def check_jobs(command: Command, composer: Composer, jobs: Jobs) -> list[Point]:
    """The jobs of a sweep with their parsed configs; refused if one of them has a mistake."""
    points, mistakes = [], dict[str, list[str]]()
    for words in jobs.words:
        try:
            composed = composer.compose(words)
            points.append(Point(composed, checked(command, *plain(composed))))
        except ConfigError as error:
            swept = [word for word in words if word not in jobs.fixed.values()]
            mistakes.setdefault(str(error), []).append(" ".join(swept))
    if mistakes:
        raise ConfigError(
            "\n".join(
                text
                if len(found) == len(jobs.words)
                else f"in {len(found)} of {len(jobs.words)} jobs, such as {found[0]}:\n{text}"
                for text, found in mistakes.items()
            )
        )
    return points


def _check_runs(points: Sequence[Point], pinned: Mapping[str, Any]) -> None:
    """Refuse equal points, and runs that were started with other settings."""
    folders, mistakes = Counter[Path](), []
    for number, point in enumerate(points):
        config = point.composed
        for key, value in {**pinned, "hydra.job.num": number, "hydra.job.id": str(number)}.items():
            OmegaConf.update(config, key, value)
        run = Run(Path(config.hydra.sweep.dir) / config.hydra.sweep.subdir)
        folders[run.folder] += 1
        try:
            run.decision(point.config)
        except ConfigError as error:
            mistakes.append(str(error))
    twice = [str(folder) for folder, n in folders.items() if n > 1]
    if twice:
        mistakes.insert(0, f"two runs of the sweep are the same: {', '.join(twice)}.")
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def _pin(config: DictConfig, settings: Mapping[str, Any]) -> None:
    """Set Hydra's settings for the sweep and for its jobs, which are composed anew from words."""
    with read_write(config.hydra), open_dict(config.hydra):
        for key, value in settings.items():
            OmegaConf.update(config, key, value)
            config.hydra.overrides.hydra.append(f"{key}={quoted(value)}")


def _label(chosen: Choices, without: Sequence[str] = ()) -> str:
    """Names of model and data, for the name of a run that has none of its own."""
    return "-".join(chosen[group] for group in ("model", "data") if group not in without)


def _is_first_process() -> bool:
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def _words(overrides: ListConfig) -> list[str]:
    """Overrides as they were given, with references such as ${hydra.job.num} left as they are."""
    return list(map(str, OmegaConf.to_container(overrides, resolve=False) or ()))


def _point_name(sweep: str, words: ListConfig, fixed: Sequence[str]) -> str:
    """Resolve ${point_name:folder of the sweep,words of a job,settings with one value}."""
    overrides = OverridesParser.create().parse_overrides(_words(words))
    swept = {o.key_or_group: o.value() for o in overrides if o.key_or_group not in fixed}
    return point_folder(Path(sweep), swept)


# Every process that runs jobs imports this module: the callback is pickled along with them.
OmegaConf.register_new_resolver("point_name", _point_name, replace=True)
