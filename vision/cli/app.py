"""The command line: every `vision <command> [setting=value ...]` is a Hydra application.

Hydra reads the options, composes the settings from YAML and starts the job; before that a callback
parses them strictly (see callback.py), so that a mistake costs a fraction of a second and no
folder. Here are the words before Hydra, the job itself, and the words and exit code for an error.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from vision.cli.commands import COMMANDS, Command
from vision.cli.help import command_help
from vision.cli.listing import CONFIGS, choices, listing, overview
from vision.config import ConfigError, UserError, suggest
from vision.sweeps.cluster import cluster_job
from vision.sweeps.outcome import Objective, RunFailedError, RunPreemptedError, read_outcome
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import PREEMPTED, Run

SWITCHES = {
    "--help": "-h",
    "--hydra-help": None,
    "--version": None,
    "--resolve": None,
    "--run": "-r",
    "--multirun": "-m",
    "--shell-completion": "-sc",
}
VALUES = {
    "--cfg": "-c",
    "--package": "-p",
    "--config-path": "-cp",
    "--config-name": "-cn",
    "--config-dir": "-cd",
    "--experimental-rerun": None,
    "--info": "-i",
}
"""The options of Hydra's command line, with their short forms."""


class ExitCodeError(UserError):
    """A command ends with an exit code; it has said why."""


def main(arguments: Sequence[str] | None = None, home: Path | None = None) -> int:
    """Run a command. The exit code is 2 for a mistake in the settings, 1 for other failures, 75
    after a request to stop and 130 after an interrupt.

    A relative --config-path is below `home`, by default the working directory.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words, home or Path.cwd())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except SystemExit as ended:
        # From our callback with the error of a job, or from Hydra after --help and the like.
        error = getattr(ended, "error", None)
        return _report(error) if error is not None else int(ended.code or 0)
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Print an error that the user can fix, and return the exit code; raise any other."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    if isinstance(error, BrokenPipeError):  # the reader of a pipe has closed it, as `head` does
        sys.stdout = None  # or Python would try to flush it at exit
        return 0
    if isinstance(error, RunPreemptedError):
        return PREEMPTED
    if isinstance(error, ExitCodeError):
        return int(str(error))
    if not isinstance(error, UserError):
        raise error
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The first process usually prints the same error, and torchrun then ends this one. It gets
        # to print only if the error is its own.
        time.sleep(15)
    print(f"error: {str(error).replace(chr(10), chr(10) + '       ')}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _dispatch(words: list[str], home: Path) -> int:
    name, *rest = words or ["--help"]
    if name in ("-sc", "--shell-completion"):
        name, rest = _command_to_complete(words), words
    if name in ("-h", "--help", "help"):
        print(overview({name: command.summary for name, command in COMMANDS.items()}))
        return 0
    if name == "list":
        print(listing(rest))
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"unknown command '{name}'. {suggest(name, [*COMMANDS, 'list'])}")
    options, overrides = _split(rest, home)
    if options.shell_completion:
        return _run_hydra(name, options, overrides)
    command = COMMANDS[name]
    overrides = [*command.implied(overrides), *map(_as_typed, _with_paths(command, overrides))]
    if options.help:
        _print_help(name, options, overrides)
        return 0
    return _run_application(name, options, overrides)


def _split(words: list[str], home: Path) -> tuple[argparse.Namespace, list[str]]:
    """Options of Hydra and overrides, in any order."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, short in SWITCHES.items():
        parser.add_argument(*filter(None, (name, short)), action="store_true")
    for name, short in VALUES.items():
        more: dict[str, Any] = {"nargs": "?", "const": "all"} if name == "--info" else {}
        if name == "--cfg":
            more = {"choices": ["job", "hydra", "all"]}
        parser.add_argument(*filter(None, (name, short)), **more)
    try:
        options, overrides = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    for word in overrides:
        if word.startswith("-"):
            raise ConfigError(f"unknown option '{word}'. {suggest(word, [*SWITCHES, *VALUES])}")
    if options.config_dir is not None and not Path(options.config_dir).is_dir():
        raise ConfigError(f"--config-dir: the folder '{options.config_dir}' does not exist.")
    if options.config_path is not None and "://" not in options.config_path:
        options.config_path = str((home / options.config_path).resolve())
        if not Path(options.config_path).is_dir():
            raise ConfigError(f"--config-path: the folder '{options.config_path}' does not exist.")
    if options.multirun and options.cfg:
        raise ConfigError(
            "--multirun with --cfg: hydra/launcher=plan shows the settings of all jobs and starts "
            "none."
        )
    modes = [f"--{m}" for m in ("run", "multirun", "cfg", "info") if getattr(options, m)]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)}: give one of them.")
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve is for --cfg: write --cfg job --resolve.")
    return options, overrides


def _with_paths(command: Command, words: list[str]) -> list[str]:
    """Overrides, with plain paths collected as one, for a command that takes them.

    The folder of a sweep's run may have equals signs in its name.
    """
    if command.paths is None:
        return words
    paths, others = [], []
    for word in words:
        key, _, value = word.partition("=")
        known = key.lstrip("+~") in command.config.model_fields
        if "=" not in word or "/" in key or (Path(word).exists() and not known):
            paths.append(word)
        elif key == command.paths and not value.startswith("["):
            paths.append(value)
        else:
            others.append(word)
    from vision.cli.composition import quoted

    return [*others, f"{command.paths}=[{','.join(map(quoted, paths))}]"] if paths else others


def _as_typed(word: str) -> str:
    """An override; the name of a file that exists is meant as it is, whatever its characters."""
    key, _, value = word.partition("=")
    if set(value) & set("=, ") and Path(value).exists():
        from vision.cli.composition import quoted

        return f"{key}={quoted(value)}"
    return word


def _print_help(name: str, options: argparse.Namespace, overrides: list[str]) -> None:
    from vision.cli.composition import compose

    command = COMMANDS[name]
    folders = [Path(options.config_dir)] if options.config_dir else []
    values, chosen = compose(name, overrides, folders, complete=False)
    groups = {group: names for group, names in choices(folders).items() if group in chosen}
    print(command_help(name, command.summary, command.config, values, groups))


def _run_application(name: str, options: argparse.Namespace, overrides: list[str]) -> int:
    """Run Hydra; where it refuses the words, say what is wrong with them, all at once."""
    from hydra.errors import HydraException

    from vision.cli.composition import first_line

    try:
        return _run_hydra(name, options, overrides)
    except HydraException as error:
        lenient = _explain(name, options, overrides)
        if lenient == overrides:
            raise ConfigError(first_line(error)) from error
    try:
        return _run_hydra(name, options, lenient)
    except HydraException as error:
        raise ConfigError(first_line(error)) from error


def _explain(name: str, options: argparse.Namespace, words: list[str]) -> list[str]:
    """Raise a ConfigError with all mistakes; without any, return words that Hydra takes: a setting
    below one that is null, such as probe_first.duration, has to be added.
    """
    from vision.cli.callback import check_jobs, checked
    from vision.cli.composition import Composer, expand, own_hydra, plain, searched

    folder = Path(options.config_path) if options.config_path else CONFIGS
    with own_hydra(folder):
        own = [word for word in words if word.lstrip("+~").startswith(("hydra.", "hydra/"))]
        words = [word for word in words if word not in own]
        more = searched([Path(options.config_dir)] if options.config_dir else [])
        composer = Composer(options.config_name or name, (*more, *own))
        mistakes = composer.unknown_hydra_words(words)
        if mistakes:
            composer = Composer(composer.name, tuple(more))
        several = options.multirun or "hydra.mode=MULTIRUN" in own
        usable, unusable = composer.lenient(words, several)
        mistakes += unusable
        try:
            if several:
                check_jobs(COMMANDS[name], composer, expand(composer.read(usable)[0], False))
            else:
                checked(COMMANDS[name], *plain(composer.compose(usable)))
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return [*usable, *own]


def _run_hydra(name: str, options: argparse.Namespace, overrides: list[str]) -> int:
    """Call Hydra with these words as its command line, and with errors left to us."""
    import hydra
    from hydra.core.utils import env_override
    from hydra.errors import HydraException

    import vision.cli.callback  # noqa: F401, for ${point_name:…}

    given = vars(options)
    words = [o for o in SWITCHES if given[o[2:].replace("-", "_")]]
    for option in VALUES:
        if (value := given[option[2:].replace("-", "_")]) is not None:
            words += [option, value]
    before, sys.argv = sys.argv, [sys.argv[0], *words, *overrides]
    application = hydra.main(config_path=str(CONFIGS), config_name=name, version_base="1.3")
    try:
        with env_override({"HYDRA_FULL_ERROR": "1"}):
            application(Job(name))()
    except HydraException:
        raise
    except OSError as error:
        if error.filename is None:
            raise
        reason = error.strerror or str(error)
        raise ConfigError(f"output: {error.filename} cannot be used: {reason}.") from error
    finally:
        sys.argv = before
    return 0


@dataclass(frozen=True)
class Job:
    """The function of a command that Hydra calls, here or in a process of a launcher."""

    command: str

    def __call__(self, settings: Any) -> Objective | None:
        """Run the command with composed settings; returns the objective of a training."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        try:
            # Relative paths mean the folder of the call, also with hydra.job.chdir=true.
            with chdir(HydraConfig.get().runtime.cwd), cluster_job():
                return self._run(settings)
        except (RunPreemptedError, ExitCodeError):
            raise
        except Exception as error:
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                raise
            raise RunFailedError(f"{type(error).__name__}: {error}") from error

    def _run(self, settings: Any) -> Objective | None:
        from hydra.core.hydra_config import HydraConfig

        from vision.cli.callback import checked
        from vision.cli.composition import plain

        hydra, command = HydraConfig.get(), COMMANDS[self.command]
        config = checked(command, plain(settings)[0], dict(hydra.runtime.choices))
        if isinstance(config, TrainConfig):
            folder = Path(hydra.runtime.output_dir)
            if folder.is_relative_to(hydra.runtime.cwd):
                folder = folder.relative_to(hydra.runtime.cwd)
            place = {"output": str(folder.parent), "name": folder.name}
            config = config.model_copy(update=place)
        code = command.run(config)
        if code == PREEMPTED:
            raise RunPreemptedError("asked to stop; the same command resumes")
        if code:
            raise ExitCodeError(str(code))
        if isinstance(config, TrainConfig):
            return read_outcome(Run(Path(config.output) / config.name), config).objective
        return None


def _command_to_complete(words: Sequence[str]) -> str:
    """The command in the line that a shell completes, taken out of it for Hydra."""
    line = os.environ.get("COMP_LINE", "")
    program, _, rest = line.lstrip().partition(" ")
    name, space, rest = rest.lstrip().partition(" ")
    if not any(word.startswith("query=") for word in words) or not line:
        return "train"  # installing is the same for all
    if not space:
        print("\n".join(c for c in sorted([*COMMANDS, "list"]) if c.startswith(name)))
        raise SystemExit(0)
    os.environ["COMP_LINE"] = f"{program} {rest}"
    return name


def run(command: str) -> NoReturn:
    """Run one command with the arguments of the calling script, and exit."""
    sys.exit(main([command, *sys.argv[1:]], home=Path(sys.argv[0]).parent))
