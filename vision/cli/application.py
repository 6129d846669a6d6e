"""The Hydra application of a command: Hydra's options, its words, and the job that it calls.

Hydra composes the settings and starts the job. Before that they are composed and parsed strictly
(those of a sweep in sweep_checks.py): a mistake costs a fraction of a second and no folder.
"""

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import chdir, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from vision.cli.app import COMMANDS, Choices, Command, uncollected
from vision.cli.composition import check_settings, checked, composer, first_line, plain, quoted
from vision.cli.listing import CONFIGS, command_help
from vision.cli.sweep_checks import check_sweep
from vision.config import ConfigError, UserError, suggest
from vision.files import exists
from vision.sweeps.cluster import IN_CLUSTER, cluster_job
from vision.sweeps.outcome import Objective, RunFailedError, RunPreemptedError, read_outcome
from vision.training.configs import TrainConfig
from vision.training.run.lock import refuse_if_locked
from vision.training.run.run_folder import PREEMPTED, Run, find_run
from vision.training.run.stop import Stopped, say_stopped, stopped_at_once

_SWITCH: dict[str, Any] = {"action": "store_true"}
_VALUE: dict[str, Any] = {}
MODES = {
    "--run -r": _SWITCH,
    "--multirun -m": _SWITCH,
    "--cfg -c": {"choices": ("job", "hydra", "all")},
    "--info -i": {"nargs": "?", "const": "all"},
    "--shell-completion -sc": _SWITCH,
}
OPTIONS = MODES | {
    "--help -h": _SWITCH,
    "--hydra-help": _SWITCH,
    "--version": _SWITCH,
    "--resolve": _SWITCH,
    "--package -p": _VALUE,
    "--config-path -cp": _VALUE,
    "--config-name -cn": _VALUE,
    "--config-dir -cd": _VALUE,
    "--experimental-rerun": _VALUE,
}
"""Hydra's command line: name and short form of each option, for argparse. One mode is allowed."""


def read_options(words: Sequence[str], home: Path) -> tuple[argparse.Namespace, list[str]]:
    """Options of Hydra, with `given` as they were typed, and overrides."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    modes = parser.add_mutually_exclusive_group()
    for names, how in OPTIONS.items():
        (modes if names in MODES else parser).add_argument(*names.split(), **how)
    try:
        options, overrides = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        plan = "hydra/launcher=plan shows the settings of all jobs and starts none."
        both = "--cfg" in str(error) and "--multirun" in str(error)
        raise ConfigError(f"{error}. {plan if both else ''}".rstrip()) from error
    for word in overrides:
        if word.startswith("-"):
            known = [names.split()[0] for names in OPTIONS]
            raise ConfigError(f"unknown option '{word}'. {suggest(word, known)}")
    options.given = [word for word in words if word not in overrides]
    if options.config_path:
        options.config_path = str(home / options.config_path)
        options.given += ["--config-path", options.config_path]
    for name in ("dir", "path"):
        folder = getattr(options, f"config_{name}")
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"--config-{name}: the folder '{folder}' does not exist.")
        if folder and (odd := _irregular_yaml(Path(folder))):
            raise ConfigError(f"--config-{name}: {odd} is not a regular file (a FIFO or a device).")
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve is for --cfg: write --cfg job --resolve.")
    return options, overrides


def _irregular_yaml(folder: Path) -> Path | None:
    """A YAML file that Hydra would wait for, or read without end; looked for among the first names
    alone, since the folder may be one with data sets and runs in it.
    """
    names = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    yaml = (path for path in islice(names, 10_000) if path.suffix == ".yaml")
    return next((path for path in yaml if exists(str(path)) and not path.is_file()), None)


class RefusedError(ConfigError):
    """Hydra does not take the words as they are typed: one may be below a setting that is null."""


@dataclass(frozen=True)
class Application:
    """The Hydra application of a command."""

    name: str
    options: argparse.Namespace

    def run(self, words: list[str]) -> None:
        """Print help, or check the words and call Hydra."""
        options, command = self.options, COMMANDS[self.name]
        if not options.shell_completion:
            words = _with_paths(command, words)
            words = [*command.implied(words), *words]
        if options.help:
            self._print_help(words)
            return
        if options.info:
            logging.raiseExceptions = False  # Hydra logs to stdout; its reader may close it
        settings, lenient = list[str](), words
        if not (
            options.shell_completion
            or options.hydra_help
            or options.version
            or options.experimental_rerun
        ):
            with uncollected():
                lenient, settings = self._check(words)
        try:
            self._call_hydra([*words, *settings])
        except RefusedError:
            self._call_hydra([*lenient, *settings])

    def _check(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """The words in a form that Hydra never refuses, and words for the folder of the run or
        sweep; refused with all mistakes.
        """
        command, settings = COMMANDS[self.name], dict[str, Any]()
        with composer(*self._yaml(words)) as yaml:
            lenient, composed, mistakes = yaml.compose_usable(words)
            overrides = yaml.read(lenient)[0]
            several = self.options.multirun or composed.hydra.mode == RunMode.MULTIRUN
            mistakes += [
                f"{o.input_line}: a run takes one value; --multirun is for several."
                for o in overrides
                if o.is_sweep_override() and not several
            ]
            try:
                if self.options.cfg or self.options.info:
                    checked(command, *plain(composed, complete=False))
                elif several:
                    settings = check_sweep(command, yaml, composed, overrides)
                elif command.config is TrainConfig:
                    settings = _check_run(command, composed)
                else:
                    check_settings(command, composed)
            except ConfigError as error:
                mistakes.append(str(error))
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        return lenient, [f"{key}={quoted(value)}" for key, value in settings.items()]

    def _yaml(self, words: Sequence[str]) -> tuple[str, list[str], list[Path]]:
        """The YAML that options and words name, for `composer`."""
        folders = (self.options.config_path or CONFIGS, self.options.config_dir)
        search = [word for word in words if word.startswith("hydra.searchpath=")]
        name = self.options.config_name or self.name
        return name, search, [Path(folder) for folder in folders if folder]

    def _print_help(self, words: Sequence[str]) -> None:
        with composer(*self._yaml(words)) as yaml:
            values, chosen = yaml.settings(words, complete=False)
            groups = {g: yaml.options(g) for g in chosen if not g.startswith("hydra/")}
        command = COMMANDS[self.name]
        print(command_help(self.name, command.summary, command.config, values, groups))

    def _call_hydra(self, words: Sequence[str]) -> None:
        """Hydra with these words as its command line, and with errors left to us."""
        before, sys.argv = sys.argv, [sys.argv[0], *self.options.given, *words]
        job = Job(self.name)
        application = hydra.main(
            config_path=str(CONFIGS), config_name=self.name, version_base="1.3"
        )
        stderr: Any = _StandardError()
        try:
            with env_override({"HYDRA_FULL_ERROR": "1"}), redirect_stderr(stderr):
                application(job)()
        except ConfigCompositionException as error:
            raise RefusedError(first_line(error)) from error
        except HydraException as error:
            raise ConfigError(first_line(error)) from error
        except Exception as error:
            if job.called or isinstance(error, UserError | BrokenPipeError):
                raise
            if isinstance(error, OSError) and error.filename is None:  # a full disk, while writing
                raise RunFailedError(f"Hydra cannot write its files: {error.strerror}.") from error
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
                raise ConfigError(f"output: {error.filename} cannot be used: {reason}.") from error
            text = f"Hydra: {first_line(error)}"
            if self.options.multirun:  # a job in another process, or its launcher
                raise RunFailedError(text) from error
            raise ConfigError(text) from error  # settings below hydra
        finally:
            sys.argv = before


def _check_run(command: Command, composed: DictConfig) -> dict[str, Any]:
    """Parse the settings of a run and decide whether it is new, to be resumed, finished or refused.

    Returns Hydra's settings for it: a run that is refused or finished keeps its files as they are.
    """
    values, chosen = plain(composed)
    config = checked(command, values, chosen)
    assert isinstance(config, TrainConfig)
    folder = composed.hydra.run.dir
    run = find_run(config, chosen) if folder == "auto" else Run(Path(folder))
    place = {"hydra.run.dir": str(run.folder)}
    first_process = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
    if run.decision(config) == "finished" or not first_process:
        return {**place, "hydra.output_subdir": None, "hydra.job_logging.root": None}
    refuse_if_locked(run)
    return place


class _StandardError:
    """Standard error without the line that Hydra writes before it raises the error of a job."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, unless it is Hydra's."""
        hydras = text.startswith("Error executing job with overrides: ")
        return len(text) if hydras else self._stream.write(text)


def _with_paths(command: Command, words: Sequence[str]) -> list[str]:
    """Overrides; plain paths become one of them, for a command that takes paths.

    The name of a file that exists is meant as it is, whatever its characters: the folder of a
    sweep's run may be a=1,b=2.
    """
    paths, listed, overrides = [], "", []
    for word in words:
        key, equals, value = word.partition("=")
        setting = key.lstrip("+~")
        setting = setting.partition(".")[0] if key.startswith("~") else setting
        named = setting in command.config.model_fields or key.startswith("hydra/")
        exact = quoted(value) if set("=,") & set(value) and exists(value) else value
        if command.paths and not named and (not equals or "/" in key or exists(word)):
            paths.append(word)
        elif key == command.paths:
            listed = exact
        else:
            overrides.append(f"{key}{equals}{exact}")
    if paths:
        both = [listed.removeprefix("[").removesuffix("]"), *map(quoted, paths)]
        listed = f"[{','.join(filter(None, both))}]"
    return [*overrides, f"{command.paths}={listed}"] if listed else overrides


@dataclass
class Job:
    """The function of a command that Hydra calls, here or in a process of a launcher."""

    command: str
    called: bool = False

    def __call__(self, settings: DictConfig) -> Objective | None:
        """Run the command with composed settings; returns the objective of a training."""
        self.called = True
        own = HydraConfig.get()
        folder = Path(own.runtime.output_dir)
        trains = COMMANDS[self.command].config is TrainConfig
        try:
            # Relative paths mean the folder of the call, also with hydra.job.chdir=true.
            with (
                chdir(own.runtime.cwd),
                cluster_job() if IN_CLUSTER in os.environ else nullcontext(),
            ):
                return self._run(settings, folder, dict(own.runtime.choices))
        except (RunPreemptedError, RunFailedError):
            raise
        except Exception as error:
            if own.mode != RunMode.MULTIRUN:
                raise
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            label = own.sweep.subdir if trains else " ".join(own.overrides.task)
            raise RunFailedError(f"{label}: {kind}{error}") from error
        finally:
            if trains and own.mode != RunMode.MULTIRUN:
                _remove_unless_started(folder, own.output_subdir or ".hydra")

    def _run(self, settings: DictConfig, folder: Path, chosen: Choices) -> Objective | None:
        command = COMMANDS[self.command]
        config = checked(command, plain(settings)[0], chosen)
        if isinstance(config, TrainConfig):  # Hydra's folder of a run is the run's folder
            if folder.is_relative_to(Path.cwd()):
                folder = folder.relative_to(Path.cwd())
            place = {"output": str(folder.parent), "name": folder.name}
            config = config.model_copy(update=place)
        try:
            with stopped_at_once() if isinstance(config, TrainConfig) else nullcontext():
                code = command.run(config)
        except Stopped as request:  # while torch was imported
            say_stopped(str(request))
            code = PREEMPTED
        if code == PREEMPTED:
            raise RunPreemptedError("stopped and saved; the same command resumes")
        if code:
            raise RunFailedError  # the command has said why
        if isinstance(config, TrainConfig):
            return read_outcome(Run(folder), config).objective
        return None


def _remove_unless_started(folder: Path, settings: str) -> None:
    """A run that failed or was stopped before it started leaves no folder behind."""
    if not any((folder / name).exists() for name in ("status.json", ".lock")):
        shutil.rmtree(folder / settings, ignore_errors=True)
        with suppress(OSError):  # there is more in the folder
            folder.rmdir()
