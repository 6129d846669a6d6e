"""The command line: `vision <command> [setting=value ...]`. Hydra's only door.

Settings are composed from YAML by Hydra and parsed strictly, and only then does a command import
what it needs: help, listings and mistakes are answered without loading torch.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from vision.commands import COMMANDS, Choices
from vision.config import ConfigError, UserError, parse, suggest

PACKAGE = Path(__file__).parent
CONFIGS = next(p for p in (PACKAGE / "_configs", PACKAGE.parent / "configs") if p.is_dir())
"""A wheel carries the YAML beside the code; a checkout has it at the root."""

LISTINGS = {
    "models": "model",
    "data": "data",
    "augmentations": "augment",
    "recipes": "recipe",
    "experiments": "experiment",
}
"""What `vision list` can list, and the folder of YAML files that it is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 2 for a mistake in the settings, 1 for other failures."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except UserError as error:
        print(f"error: {str(error).replace(chr(10), chr(10) + '       ')}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # what we were piped into has seen enough
        sys.stdout = None  # or Python would try to flush it at its end
        return 0


def _dispatch(words: list[str]) -> int:
    name, *rest = words or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name == "list":
        print(_listing(rest))
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"there is no command '{name}'. {suggest(name, [*COMMANDS, 'list'])}")
    command = COMMANDS[name]
    folders, flags, overrides = _split(rest)
    if "--help" in flags:
        from vision.help import command_help

        values, _ = compose(name, overrides, folders, complete=False)
        print(command_help(name, command.summary, command.config, values, choices(folders)))
        return 0
    values, chosen = compose(name, overrides, folders)
    config = parse(command.config, values)
    if "--cfg" in flags:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(OmegaConf.create(values)), end="")
        return 0
    return command.run(config, chosen)


def _split(words: list[str]) -> tuple[list[Path], set[str], list[str]]:
    """Folders of further YAML files, flags, and overrides."""
    folders: list[Path] = []
    flags: set[str] = set()
    overrides: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word in ("-h", "--help"):
            flags.add("--help")
        elif word == "--cfg":
            flags.add("--cfg")
        elif word == "--config-dir" or word.startswith("--config-dir="):
            folder = Path(word.partition("=")[2] or next(remaining, ""))
            if not folder.is_dir():
                raise ConfigError(f"--config-dir: there is no folder '{folder}'.")
            folders.append(folder)
        elif word.startswith("-"):
            known = ["--help", "--cfg", "--config-dir"]
            raise ConfigError(f"there is no option '{word}'. {suggest(word, known)}")
        else:
            overrides.append(word)
    return folders, flags, overrides


def compose(
    name: str, overrides: Sequence[str], folders: Sequence[Path] = (), complete: bool = True
) -> tuple[dict[str, Any], Choices]:
    """The plain settings that a YAML file and overrides make, neither typed nor checked yet.

    A value for an unknown key is let through here, so that the parser, which knows what there is,
    can say what may have been meant. With `complete`, every mandatory value must be there.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    search = [f"hydra.searchpath=[{','.join(f'file://{f.resolve()}' for f in folders)}]"]
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            words = [*(search if folders else []), *_lenient(overrides, folders)]
            composed = hydra_compose(name, words, return_hydra_config=True)
        chosen = OmegaConf.to_container(composed.hydra.runtime.choices)
        del composed.hydra
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing and complete:
            raise ConfigError(
                "\n".join(f"{key}: this setting must be given: {key}=…" for key in missing)
            )
        values = OmegaConf.to_container(composed, resolve=True)
    except MissingConfigException as error:
        raise ConfigError(_unknown_choice(error.missing_cfg_file or "", folders)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip().splitlines()[0]) from error
    assert isinstance(values, dict)
    assert isinstance(chosen, dict)
    return {str(key): value for key, value in values.items()}, chosen  # type: ignore[return-value]


def _lenient(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """The overrides, with `key=value` for a value written as `++key=value`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    lenient = []
    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"'{word}': a setting is given as name=value.")
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ConfigError(f"'{word}' cannot be read: {error}") from error
        key = override.key_or_group
        if key.partition(".")[0] == "hydra":
            raise ConfigError(f"{word}: settings of Hydra itself are not for this command.")
        if override.is_sweep_override():
            raise ConfigError(f"{word}: this command takes one value, not several.")
        group = any((folder / key).is_dir() for folder in (CONFIGS, *folders))
        if group and not override.is_delete() and not isinstance(override.value(), str):
            raise ConfigError(_unknown_choice(f"{key}/{word.partition('=')[2]}", folders))
        if group or override.is_delete():
            lenient.append(word)
        else:
            lenient.append("++" + word.lstrip("+"))
    return lenient


def choices(folders: Sequence[Path] = ()) -> dict[str, dict[str, str]]:
    """Every group of YAML files, with its choices and the line that describes each."""
    found: dict[str, dict[str, str]] = {}
    for folder in (CONFIGS, *folders):
        for file in sorted(folder.glob("*/**/*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            found.setdefault(group, {})[file.stem] = _first_comment(file)
    return found


def _first_comment(file: Path) -> str:
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").rstrip(".")
    return ""


def _unknown_choice(file: str, folders: Sequence[Path]) -> str:
    group, _, choice = file.removesuffix(".yaml").rpartition("/")
    known = choices(folders).get(group)
    if not known:
        return f"there is no group of settings '{group}'. {suggest(group, choices(folders))}"
    near = suggest(choice, known)
    listed = "" if near.startswith("Known") else f" Known: {', '.join(sorted(known))}."
    return f"{group}={choice}: there is no such choice. {near}{listed}"


def _listing(words: list[str]) -> str:
    what = words[0] if words else ""
    if what not in LISTINGS or len(words) > 1:
        usage = f"usage: vision list {'|'.join(LISTINGS)}"
        raise ConfigError(f"{suggest(what, LISTINGS)} {usage}".strip())
    found = choices().get(LISTINGS[what], {})
    if not found:
        return f"There are no {what} yet."
    width = max(map(len, found))
    return "\n".join(f"{name:{width}}  {line}" for name, line in sorted(found.items()))


def _overview() -> str:
    rows = {name: command.summary for name, command in COMMANDS.items()}
    rows["list"] = f"one line on each choice: vision list {'|'.join(LISTINGS)}"
    width = max(map(len, rows))
    lines = [f"  {name:{width}}  {summary}" for name, summary in sorted(rows.items())]
    return "\n".join(
        [
            "usage: vision <command> [setting=value ...] [--help] [--cfg] [--config-dir FOLDER]",
            "",
            "Commands:",
            *lines,
            "",
            "vision <command> --help shows every setting of a command with its value and meaning;",
            "--cfg prints the settings as they would be used; --config-dir adds your own YAML.",
        ]
    )


def run(command: str) -> NoReturn:
    """Run one command with the arguments of the script that calls this."""
    sys.exit(main([command, *sys.argv[1:]]))
