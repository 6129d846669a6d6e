"""The command line: `vision <command> [setting=value ...]`.

Settings are composed from YAML by Hydra and parsed strictly, and only then does a command import
what it needs: help, listings and mistakes are answered without loading torch. With `--multirun` a
setting may have several values; all jobs that this makes are parsed before the first one starts.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from vision.cli.commands import COMMANDS, Command
from vision.cli.composition import as_yaml, compose, expand, find_launcher
from vision.cli.listing import choices, listing, overview
from vision.config import ConfigError, UserError, parse, suggest

FLAGS = {
    "-h": "--help",
    "--help": "--help",
    "--cfg": "--cfg",
    "-m": "--multirun",
    "--multirun": "--multirun",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 2 for a mistake in the settings, 1 for other failures,
    130 when it was interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The first process says the same, and torchrun then ends this one: it speaks only where
            # the mistake is its own.
            time.sleep(5)
        print(f"error: {str(error).replace(chr(10), chr(10) + '       ')}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # what we were piped into has seen enough
        sys.stdout = None  # or Python would try to flush it at its end
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
        raise ConfigError(f"there is no command '{name}'. {suggest(name, [*COMMANDS, 'list'])}")
    command = COMMANDS[name]
    folders, flags, overrides = _split(rest)
    paths, overrides = _take_paths(command, overrides)
    overrides = [*command.implied(overrides), *overrides]
    if "--help" in flags:
        from vision.cli.help import command_help

        values, _ = compose(name, overrides, folders, complete=False)
        print(command_help(name, command.summary, command.config, values, choices(folders)))
        return 0
    if "--multirun" in flags:
        return _multirun(name, overrides, folders, only_show="--cfg" in flags)
    values, chosen = compose(name, overrides, folders)
    if command.paths is not None:
        given = values[command.paths]
        values[command.paths] = [*([given] if isinstance(given, str) else given), *paths]
    config = parse(command.config, values)
    if "--cfg" in flags:
        print(as_yaml(values), end="")
        return 0
    return command.run(config, chosen)


def _split(words: list[str]) -> tuple[list[Path], set[str], list[str]]:
    """Folders of further YAML files, flags, and overrides."""
    folders: list[Path] = []
    flags: set[str] = set()
    overrides: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word in FLAGS:
            flags.add(FLAGS[word])
        elif word == "--config-dir" or word.startswith("--config-dir="):
            folder = Path(word.partition("=")[2] or next(remaining, ""))
            if not folder.is_dir():
                raise ConfigError(f"--config-dir: there is no folder '{folder}'.")
            folders.append(folder)
        elif word.startswith("-"):
            known = [*(flag for flag in FLAGS if flag.startswith("--")), "--config-dir"]
            raise ConfigError(f"there is no option '{word}'. {suggest(word, known)}")
        else:
            overrides.append(word)
    return folders, flags, overrides


def _take_paths(command: Command, words: list[str]) -> tuple[list[str], list[str]]:
    """The plain paths among the words, for a command that takes some, and the overrides.

    The folder of a sweep's run has signs of equality in its name.
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
    """Expand, compose and parse every job; only then start the first one, or show them all."""
    from vision.sweeps.sweep import Point

    command = COMMANDS[name]
    if command.sweep is None:
        raise ConfigError(
            f"--multirun: '{name}' takes one value for each setting; 'train' several."
        )
    about_launcher = [w for w in overrides if w.startswith(("hydra/launcher=", "hydra.launcher."))]
    launcher = find_launcher(name, about_launcher)
    overrides = [word for word in overrides if word not in about_launcher]
    fixed, jobs = expand(overrides, folders)
    points, documents, mistakes = [], [], dict[str, list[str]]()
    for words, swept in jobs:
        shown = " ".join(f"{key}={value}" for key, value in swept.items())
        try:
            values, chosen = compose(name, words, folders)
            config: Any = parse(command.config, values)
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
    """A mistake, and which of the jobs has it, unless it is in all of them."""
    if len(words) == jobs:
        return mistake
    return f"in {len(words)} of {jobs} jobs, such as {words[0]}:\n{mistake}"


def run(command: str) -> NoReturn:
    """Run one command with the arguments of the script that calls this."""
    sys.exit(main([command, *sys.argv[1:]]))
