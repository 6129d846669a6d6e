"""The command line: `vision <command> [setting=value ...]`, its errors and exit codes.

Every command with settings is a Hydra application (see application.py). Hydra is imported for those
alone: help and listings answer faster without it.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

from vision.cli.commands import COMMANDS, uncollected
from vision.cli.listing import listing, overview
from vision.config import ConfigError, UserError, suggest
from vision.sweeps.outcome import RunPreemptedError
from vision.training.run.run_folder import PREEMPTED
from vision.training.run.stop import Stopped, say_stopped, stopped_at_once


def main(arguments: Sequence[str] | None = None, home: Path | None = None) -> int:
    """Run a command. The exit code is 2 for a mistake in the settings, 1 for other failures, 75
    after a request to stop and 130 after an interrupt.

    A relative --config-path is below `home`, by default the working directory.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # torch reads it at its first tensor. Without huge pages, a training on a CPU spends much of its
    # time in the system, on pages of memory that it has just given back.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        try:
            _dispatch(words, home or Path.cwd())
        finally:
            sys.stdout.flush()  # a closed pipe is noticed here, not when Python exits
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of a pipe has closed it, as `head` does
        sys.stdout = None  # or Python would try to flush it at exit
        return 0
    except RunPreemptedError:
        return PREEMPTED
    except Stopped as request:  # while the settings of a training were composed
        say_stopped(str(request))
        return PREEMPTED
    except (UserError, OSError) as error:
        text = _message(error)
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or text is None:
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The first process usually prints the same error, and torchrun then ends this one. It
            # gets to print only if the error is its own.
            time.sleep(15)
        if text:
            print(f"error: {text.replace(chr(10), chr(10) + '       ')}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except SystemExit as ended:  # Hydra's own, after --version and the like
        return int(ended.code or 0)


def _message(error: UserError | OSError) -> str | None:
    """What to print instead of a traceback; None for an error that names no file."""
    if isinstance(error, UserError) or error.errno is None:  # raised here, with a message
        return str(error)
    return None if error.filename is None else f"{error.filename}: {error.strerror}."


def run(command: str) -> NoReturn:
    """Run one command with the arguments of the calling script, and exit."""
    sys.exit(main([command, *sys.argv[1:]], home=Path(sys.argv[0]).parent.resolve()))


def _dispatch(words: list[str], home: Path) -> None:
    name, *rest = words or ["--help"]
    if name in ("-sc", "--shell-completion"):
        name, rest = _command_to_complete(), words
    if name in ("-h", "--help", "help"):
        print(overview({name: command.summary for name, command in COMMANDS.items()}))
    elif name == "list":
        print(listing(rest))
    elif name in COMMANDS:
        with stopped_at_once() if name == "train" else nullcontext():
            with uncollected():
                from vision.cli.application import Application, read_options

            options, overrides = read_options(rest, home)
            Application(name, options).run(overrides)
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
