"""Settings from YAML files and words of the command line, also of many jobs. Hydra's only door.

Nothing here is typed or checked yet; `vision.config.parse` does that.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vision.cli.commands import Choices
from vision.cli.listing import CONFIGS, unknown_choice
from vision.config import ConfigError, suggest

LAUNCHERS = {"submitit_local": "local", "submitit_slurm": "slurm"}
"""Choices of hydra/launcher beside `basic`, and the executor of submitit that each stands for."""


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
        raise ConfigError(unknown_choice(error.missing_cfg_file or "", folders)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip().splitlines()[0]) from error
    assert isinstance(values, dict)
    assert isinstance(chosen, dict)
    return {str(key): value for key, value in values.items()}, chosen  # type: ignore[return-value]


def expand(
    overrides: Sequence[str], folders: Sequence[Path]
) -> tuple[list[str], list[tuple[list[str], dict[str, Any]]]]:
    """The words with one value; and for every job all its words, and what was given several values.

    The grammar and the expansion are Hydra's: a,b · choice(a,b) · range(1,4) · glob(vit_*).
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.errors import HydraException

    read = [_read_override(word, folders, several=True) for word in overrides]
    endless = [o.input_line for o in read if o.is_sweep_override() and not o.is_discrete_sweep()]
    if endless:
        raise ConfigError(f"{endless[0]}: give the values, such as a,b or range(0,10,2).")
    several = {o.get_key_element() for o in read if o.is_sweep_override()}
    if not several:
        raise ConfigError(
            "--multirun: no setting has several values; write seed=0,1,2 or seed=range(0,3)."
        )
    try:
        jobs = BasicSweeper.split_arguments(read, None)[0]
    except HydraException as error:
        raise ConfigError(str(error)) from error
    if not jobs:
        sweeps = [o for o in read if o.is_sweep_override()]
        empty = [o.input_line for o in sweeps if not list(o.sweep_iterator())]
        raise ConfigError(f"{' '.join(empty)}: there is nothing that this stands for.")
    expanded = []
    for words in jobs:
        swept = {}
        for word in words:
            override = _read_override(word, folders, several=False)
            if override.get_key_element() in several:
                swept[override.key_or_group] = override.value()
        expanded.append((words, swept))
    return [o.input_line for o in read if o.get_key_element() not in several], expanded


def find_launcher(name: str, words: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """Where jobs go, as an executor of submitit and its settings; None: they run here."""
    from importlib.util import find_spec

    choice = next((w.partition("=")[2] for w in reversed(words) if w.startswith("hydra/")), "basic")
    settings = [word for word in words if not word.startswith("hydra/")]
    if choice == "basic":
        if settings:
            raise ConfigError(f"{settings[0]}: hydra/launcher=basic has no settings.")
        return None
    if choice not in LAUNCHERS:
        raise ConfigError(
            f"hydra/launcher={choice}: unknown choice. {suggest(choice, ['basic', *LAUNCHERS])}"
        )
    if find_spec("submitit") is None or find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise ConfigError(f"hydra/launcher={choice} needs an extra: pip install 'vit-swin[slurm]'.")
    known = _hydra_settings(name, [f"hydra/launcher={choice}"])
    for word in settings:
        key = word.partition("=")[0].removeprefix("hydra.launcher.").partition(".")[0]
        if key not in known:
            raise ConfigError(f"{word}: unknown setting. {suggest(key, known)}")
    # A run resumes wherever it was cut off, so a job that ran out of time may always be requeued.
    often = ["hydra.launcher.max_num_timeout=1000"] if "max_num_timeout" in known else []
    words = [f"++{word}" for word in (*often, *settings)]
    return LAUNCHERS[choice], _hydra_settings(name, [f"hydra/launcher={choice}", *words])


def as_yaml(values: Mapping[str, Any]) -> str:
    """Settings as one could write them into a file."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(values)))


def _lenient(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """The overrides, with `key=value` for a value written as `++key=value`."""
    lenient = []
    for word in overrides:
        override = _read_override(word, folders, several=False)
        key = override.key_or_group
        if key.partition(".")[0] == "hydra" or key.startswith("hydra/"):
            raise ConfigError(f"{word}: settings of Hydra itself are not for this command.")
        places = (CONFIGS, *folders)
        group = any((place / key).is_dir() for place in places)
        if group and not override.is_delete():
            # Hydra itself would pass over an unknown choice of an optional group in silence.
            choice = override.value() if isinstance(override.value(), str) else ""
            file = f"{choice.removesuffix('.yaml')}.yaml"
            if not any((place / key / file).is_file() for place in places):
                raise ConfigError(unknown_choice(f"{key}/{word.partition('=')[2]}", folders))
        line = override.input_line
        lenient.append(line if group or override.is_delete() else "++" + line.lstrip("+"))
    return lenient


def _read_override(word: str, folders: Sequence[Path], several: bool) -> Any:
    """A word as Hydra reads it. With `several` it may have more than one value."""
    from hydra.errors import HydraException

    if "=" not in word and not word.startswith("~"):
        raise ConfigError(f"'{word}': a setting is given as name=value.")
    parser = _parser(tuple(folders))
    key, _, value = word.partition("=")
    mistake = f"{word}: this command takes one value, not several. (With --multirun, train does.)"
    try:
        override = parser.parse_override(word)
        override.config_loader = parser.config_loader
        if several or not override.is_sweep_override():
            return override
    except HydraException as error:
        mistake = f"'{word}' cannot be read: {error}"
    if value and Path(value).exists():
        # The name of something that exists is meant as it is: a sweep's run is a=1,b=2.
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        return parser.parse_override(f'{key}="{quoted}"')
    raise ConfigError(mistake)


@cache
def _parser(folders: tuple[Path, ...]) -> Any:
    """Hydra's parser of overrides, which looks for what a glob(…) stands for in these folders."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.override_parser.overrides_parser import OverridesParser

    search = create_config_search_path(str(CONFIGS))
    for folder in folders:
        search.append("command line", f"file://{folder.resolve()}")
    return OverridesParser.create(config_loader=ConfigLoaderImpl(search))


def _hydra_settings(name: str, words: list[str]) -> dict[str, Any]:
    """The settings of Hydra's launcher; what refers to other settings of Hydra stays so."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra_compose(name, words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise ConfigError(f"{words[-1].lstrip('+')}: {cause}") from error
    launcher = OmegaConf.to_container(composed.hydra.launcher, resolve=False)
    assert isinstance(launcher, dict)
    return {str(key): value for key, value in launcher.items() if key != "_target_"}
