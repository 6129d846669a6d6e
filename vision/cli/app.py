"""The command line: every `vision <command> [setting=value ...]` is a Hydra application.

Hydra reads the options, composes the settings from YAML and starts the job. Before that a callback
parses them strictly (see callback.py): a mistake costs a fraction of a second and no folder.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, chdir, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.errors import CompactHydraException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from vision.cli.callback import Ended, check_jobs, checked
from vision.cli.commands import COMMANDS, Choices, Command
from vision.cli.composition import Composer, composer, expand, first_line, plain, quoted
from vision.cli.help import command_help
from vision.cli.listing import CONFIGS, listing, overview
from vision.config import ConfigError, UserError, field_paths, suggest
from vision.sweeps.cluster import IN_CLUSTER, cluster_job
from vision.sweeps.outcome import Objective, RunFailedError, RunPreemptedError, read_outcome
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import PREEMPTED, Run

MODES = ("--run -r", "--multirun -m", "--shell-completion -sc")
SWITCHES = ("--help -h", "--hydra-help", "--version", "--resolve")
VALUES = ("--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd")
OPTIONS = (*MODES, *SWITCHES, *VALUES, "--cfg -c", "--info -i", "--experimental-rerun")
"""Hydra's command line: name and short form of each option."""


class RefusedError(ConfigError):
    """Hydra refused to compose the words of the command line."""


def main(arguments: Sequence[str] | None = None, home: Path | None = None) -> int:
    """Run a command. The exit code is 2 for a mistake in the settings, 1 for other failures, 75
    after a request to stop and 130 after an interrupt.

    A relative --config-path is below `home`, by default the working directory.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _dispatch(words, home or Path.cwd())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Ended as ended:
        return _report(ended.error)
    except SystemExit as ended:  # Hydra's own, after --version and the like
        return int(ended.code or 0)
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Print an error that the user can fix, and return the exit code; raise any other."""
    if isinstance(error, BrokenPipeError):  # the reader of a pipe has closed it, as `head` does
        sys.stdout = None  # or Python would try to flush it at exit
        return 0
    if isinstance(error, RunPreemptedError):
        return PREEMPTED
    if not isinstance(error, UserError) or os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The first process usually prints the same error, and torchrun then ends this one. It gets
        # to print only if the error is its own.
        time.sleep(15)
    if str(error):
        print(f"error: {str(error).replace(chr(10), chr(10) + '       ')}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _dispatch(words: list[str], home: Path) -> None:
    name, *rest = words or ["--help"]
    if name in ("-sc", "--shell-completion"):
        name, rest = _command_to_complete(), words
    if name in ("-h", "--help", "help"):
        print(overview({name: command.summary for name, command in COMMANDS.items()}))
    elif name == "list":
        print(listing(rest))
    elif name in COMMANDS:
        options, given, overrides = _split(rest, home)
        Application(name, options, given).run(overrides)
    else:
        raise ConfigError(f"unknown command '{name}'. {suggest(name, [*COMMANDS, 'list'])}")


def _command_to_complete() -> str:
    """The command in the line that a shell completes, taken out of it for Hydra."""
    program, _, rest = os.environ.get("COMP_LINE", "vision train ").lstrip().partition(" ")
    name, space, rest = rest.lstrip().partition(" ")
    if not space:
        print("\n".join(c for c in sorted([*COMMANDS, "list"]) if c.startswith(name)))
        sys.exit()
    os.environ["COMP_LINE"] = f"{program} {rest}"
    return name


def _split(words: list[str], home: Path) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Options of Hydra, parsed and as given, and overrides."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    modes.add_argument("--info", "-i", nargs="?", const="all")
    parser.add_argument("--experimental-rerun")
    for names in MODES:
        modes.add_argument(*names.split(), action="store_true")
    for names in SWITCHES:
        parser.add_argument(*names.split(), action="store_true")
    for names in VALUES:
        parser.add_argument(*names.split())
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
    given = [word for word in words if word not in overrides]
    if options.config_path:
        options.config_path = str(home / options.config_path)
        given += ["--config-path", options.config_path]
    for name in ("dir", "path"):
        folder = getattr(options, f"config_{name}")
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"--config-{name}: the folder '{folder}' does not exist.")
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve is for --cfg: write --cfg job --resolve.")
    return options, given, overrides


@dataclass(frozen=True)
class Application:
    """The Hydra application of a command."""

    name: str
    options: argparse.Namespace
    given: list[str]
    """The options as they were given."""

    def run(self, words: list[str]) -> None:
        """Print help, or call Hydra; where it refuses the words, say what is wrong with them."""
        command = COMMANDS[self.name]
        if self.options.shell_completion:
            self._call_hydra(words)
            return
        words = _with_paths(command, words)
        words = [*command.implied(words), *words]
        if self.options.help:
            self._print_help(words)
            return
        known = field_paths(command.config)
        for word in words:
            key, _, value = word.lstrip("+~").partition("=")
            is_known = key in known or (CONFIGS / key).is_dir() or key.startswith("hydra")
            if not is_known or (value == "null" and (CONFIGS / key).is_dir()):
                words = self._explain(words)  # Hydra would refuse them, but later
                break
        try:
            self._call_hydra(words)
        except RefusedError:
            self._call_hydra(self._explain(words))

    def _composer(self, hydra_words: Sequence[str] = ()) -> AbstractContextManager[Composer]:
        """For the YAML that the options name."""
        folders = (self.options.config_path or CONFIGS, self.options.config_dir)
        name = self.options.config_name or self.name
        return composer(name, hydra_words, [Path(folder) for folder in folders if folder])

    def _print_help(self, words: Sequence[str]) -> None:
        with self._composer() as yaml:
            values, chosen = plain(yaml.compose(yaml.usable(words)), complete=False)
            groups = {g: yaml.options(g) for g in chosen if not g.startswith("hydra/")}
        command = COMMANDS[self.name]
        print(command_help(self.name, command.summary, command.config, values, groups))

    def _explain(self, words: Sequence[str]) -> list[str]:
        """Raise a ConfigError with all mistakes; without any, return words that Hydra takes: a
        setting below one that is null, such as probe_first.duration, has to be added.
        """
        own = [word for word in words if word.lstrip("+~").startswith(("hydra.", "hydra/"))]
        with self._composer(own) as yaml:
            search = [word for word in words if word.startswith("search=")]  # chooses a sweeper
            several = self.options.multirun or "hydra.mode=MULTIRUN" in own or bool(search)
            known = several and not search and not any(w.startswith("hydra/sweeper=") for w in own)
            lenient, mistakes = yaml.lenient([w for w in words if w not in own], several)
            if unknown := yaml.unknown_hydra_words(search):
                mistakes += unknown.values()
                words_left = tuple(w for w in yaml.hydra_words if w not in unknown)
                yaml = replace(yaml, hydra_words=words_left)
            try:
                check_jobs(COMMANDS[self.name], yaml, expand(yaml.read(lenient)[0], known))
            except ConfigError as error:
                mistakes.append(str(error))
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        return [*lenient, *own]

    def _call_hydra(self, words: list[str]) -> None:
        """Hydra with these words as its command line, and with errors left to us."""
        before, sys.argv = sys.argv, [sys.argv[0], *self.given, *words]
        application = hydra.main(
            config_path=str(CONFIGS), config_name=self.name, version_base="1.3"
        )
        try:
            with env_override({"HYDRA_FULL_ERROR": "1"}):
                application(Job(self.name))()
        except CompactHydraException as error:
            raise RefusedError(first_line(error)) from error
        except HydraException as error:
            raise ConfigError(first_line(error)) from error
        except OSError as error:
            if isinstance(error, UserError) or error.filename is None:
                raise
            reason = error.strerror or str(error)
            raise ConfigError(f"output: {error.filename} cannot be used: {reason}.") from error
        finally:
            sys.argv = before


def _with_paths(command: Command, words: Sequence[str]) -> list[str]:
    """Overrides; plain paths become one of them, for a command that takes paths.

    The name of a file that exists is meant as it is, whatever its characters: the folder of a
    sweep's run may be a=1,b=2.
    """
    paths, listed, overrides = [], "", []
    for word in words:
        key, equals, value = word.partition("=")
        named = key.lstrip("+~") in command.config.model_fields or key.startswith("hydra/")
        exact = quoted(value) if set("=,") & set(value) and Path(value).exists() else value
        if command.paths and not named and (not equals or "/" in key or Path(word).exists()):
            paths.append(word)
        elif key == command.paths:
            listed = exact
        else:
            overrides.append(f"{key}{equals}{exact}")
    if paths:
        both = [listed.removeprefix("[").removesuffix("]"), *map(quoted, paths)]
        listed = f"[{','.join(filter(None, both))}]"
    return [*overrides, f"{command.paths}={listed}"] if listed else overrides


@dataclass(frozen=True)
class Job:
    """The function of a command that Hydra calls, here or in a process of a launcher."""

    command: str

    def __call__(self, settings: DictConfig) -> Objective | None:
        """Run the command with composed settings; returns the objective of a training."""
        own = HydraConfig.get()
        try:
            # Relative paths mean the folder of the call, also with hydra.job.chdir=true.
            with (
                chdir(own.runtime.cwd),
                cluster_job() if IN_CLUSTER in os.environ else nullcontext(),
            ):
                return self._run(settings, Path(own.runtime.output_dir), dict(own.runtime.choices))
        except (RunPreemptedError, RunFailedError):
            raise
        except Exception as error:
            if own.mode != RunMode.MULTIRUN:
                raise
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            raise RunFailedError(f"{kind}{error}") from error

    def _run(self, settings: DictConfig, folder: Path, chosen: Choices) -> Objective | None:
        command = COMMANDS[self.command]
        config = checked(command, plain(settings)[0], chosen)
        if isinstance(config, TrainConfig):  # Hydra's folder of a run is the run's folder
            if folder.is_relative_to(Path.cwd()):
                folder = folder.relative_to(Path.cwd())
            place = {"output": str(folder.parent), "name": folder.name}
            config = config.model_copy(update=place)
        code = command.run(config)
        if code == PREEMPTED:
            raise RunPreemptedError("stopped and saved; the same command resumes")
        if code:
            raise RunFailedError  # the command has said why
        if isinstance(config, TrainConfig):
            return read_outcome(Run(folder), config).objective
        return None


def run(command: str) -> NoReturn:
    """Run one command with the arguments of the calling script, and exit."""
    sys.exit(main([command, *sys.argv[1:]], home=Path(sys.argv[0]).parent.resolve()))
