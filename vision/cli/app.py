"""The command line: `vision <command> [setting=value ...]`.

Settings are composed from YAML by Hydra and parsed strictly before a command imports torch, so
that help, listings and errors take a fraction of a second. With `--multirun` a setting may have
several values; the settings of all jobs are parsed before the first job starts.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from vision.cli.commands import COMMANDS, Choices, Command
from vision.cli.composition import as_yaml, compose, expand, find_launcher
from vision.cli.help import command_help
from vision.cli.listing import choices, listing, overview
from vision.cli.synonyms import remedy
from vision.config import ConfigError, UserError, parse, suggest

_FLAGS = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
_FLAGS.add_argument("-h", "--help", action="store_true")
_FLAGS.add_argument("--cfg", action="store_true")
_FLAGS.add_argument("-m", "--multirun", action="store_true")
_FLAGS.add_argument("--config-dir", type=Path, action="append", default=[])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. The exit code is 2 for a mistake in the settings, 1 for other failures and
    130 after an interrupt.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The first process usually prints the same error, and torchrun then ends this one. It
            # gets to print only if the error is its own.
            time.sleep(15)
        print(f"error: {str(error).replace(chr(10), chr(10) + '       ')}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of a pipe has closed it, as `head` does
        sys.stdout = None  # or Python would try to flush it at exit
        return 0


def _dispatch(words: list[str]) -> int:
    name, *rest = words or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview({name: command.summary for name, command in COMMANDS.items()}))
        return 0
    if name == "list":
        print(listing(rest))
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"unknown command '{name}'. {suggest(name, [*COMMANDS, 'list'])}")
    command = COMMANDS[name]
    flags, overrides = _split(rest)
    folders = flags.config_dir
    paths, overrides = _take_paths(command, overrides)
    overrides = [*command.implied(overrides), *overrides]
    if flags.help:
        values, chosen = compose(name, overrides, folders, complete=False)
        groups = {group: names for group, names in choices(folders).items() if group in chosen}
        print(command_help(name, command.summary, command.config, values, groups))
        return 0
    if flags.multirun:
        return _multirun(name, overrides, folders, only_show=flags.cfg)
    values, chosen = compose(name, overrides, folders)
    if command.paths is not None:
        given = values[command.paths]
        values[command.paths] = [*([given] if isinstance(given, str) else given), *paths]
    config = _parse(command, values, chosen)
    if flags.cfg:
        print(as_yaml(values), end="")
        return 0
    return command.run(config, chosen)


def _parse(command: Command, values: Mapping[str, Any], chosen: Choices) -> Any:
    """The config of a command; names of settings in other tools are answered with ours."""
    return parse(command.config, values, partial(remedy, command.config, chosen))


def _split(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Flags and overrides."""
    try:
        flags, overrides = _FLAGS.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    for word in overrides:
        if word.startswith("-"):
            known = ["--help", "--cfg", "--multirun", "--config-dir"]
            raise ConfigError(f"unknown option '{word}'. {suggest(word, known)}")
    for folder in flags.config_dir:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir: the folder '{folder}' does not exist.")
    return flags, overrides


def _take_paths(command: Command, words: list[str]) -> tuple[list[str], list[str]]:
    """Split words into plain paths, for a command that takes them, and overrides.

    The folder of a sweep's run has equals signs in its name.
    """
    if command.paths is None:
        return [], words
    paths = []
    for word in words:
        key = word.partition("=")[0]
        known = key.lstrip("+~") in command.config.model_fields
        if "=" not in word or "/" in key or (Path(word).exists() and not known):
            paths.append(word)
    return paths, [word for word in words if word not in paths]


def _multirun(
    name: str, overrides: list[str], folders: Sequence[Path], only_show: bool = False
) -> int:
    """Compose and parse the settings of every job; then start the first job, or print them all."""
    from vision.sweeps.sweep import Point

    command = COMMANDS[name]
    if command.sweep is None:
        raise ConfigError(f"--multirun is for 'train'; '{name}' takes one value for each setting.")
    about_launcher = [w for w in overrides if w.startswith(("hydra/launcher=", "hydra.launcher."))]
    launcher = find_launcher(name, about_launcher)
    overrides = [word for word in overrides if word not in about_launcher]
    fixed, jobs = expand(overrides, folders)
    points, documents, mistakes = [], [], dict[str, list[str]]()
    for words, swept in jobs:
        shown = " ".join(f"{key}={value}" for key, value in swept.items())
        try:
            values, chosen = compose(name, words, folders)
            config = _parse(command, values, chosen)
        except ConfigError as error:
            mistakes.setdefault(str(error), []).append(shown)
        else:
            points.append(Point(swept, config, chosen))
            documents.append(f"--- # {shown}\n{as_yaml(values)}")
    if mistakes:
        raise ConfigError("\n".join(_blame(w, len(jobs), text) for text, w in mistakes.items()))
    if only_show:
        print("".join(documents), end="")
        return 0
    return command.sweep(points, compose(name, fixed, folders, complete=False), launcher)


def _blame(words: list[str], jobs: int, mistake: str) -> str:
    """A mistake, with one of the jobs that have it unless all do."""
    if len(words) == jobs:
        return mistake
    return f"in {len(words)} of {jobs} jobs, such as {words[0]}:\n{mistake}"


def run(command: str) -> NoReturn:
    """Run one command with the arguments of the calling script, and exit."""
    sys.exit(main([command, *sys.argv[1:]]))
