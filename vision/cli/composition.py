"""Settings from YAML files and words of the command line, composed by Hydra.

Nothing here is typed or checked yet; `vision.config.parse` does that. A value for an unknown key is
let through, so that the parser, which knows all settings, can say what may have been meant.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vision.cli.commands import Choices
from vision.cli.listing import CONFIGS, unknown_choice
from vision.config import ConfigError, suggest


def compose(
    name: str, overrides: Sequence[str], folders: Sequence[Path] = (), complete: bool = True
) -> tuple[dict[str, Any], Choices]:
    """The plain settings that a YAML file and overrides make, and the choice in each group.

    With `complete`, every mandatory value must be there.
    """
    with own_hydra():
        composer = Composer(name, tuple(searched(folders)))
        words, mistakes = composer.lenient(overrides)
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        return plain(composer.compose(words), complete)


@contextmanager
def own_hydra(folder: Path = CONFIGS) -> Iterator[None]:
    """Within, settings are composed from a folder of YAML, outside of any Hydra application."""
    with initialize_config_dir(str(folder), version_base="1.3"):
        yield


def searched(folders: Sequence[Path]) -> list[str]:
    """Overrides for further folders of YAML, as Hydra's option --config-dir adds them."""
    places = ",".join(quoted(f"file://{folder.resolve()}") for folder in folders)
    return [f"hydra.searchpath=[{places}]"] if folders else []


def quoted(text: str) -> str:
    """A value as Hydra's grammar takes it, whatever its characters."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def plain(composed: DictConfig, complete: bool = True) -> tuple[dict[str, Any], Choices]:
    """Composed settings without Hydra's own, and the choice in each group."""
    own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    try:
        missing = sorted(OmegaConf.missing_keys(own))
        if missing and complete:
            raise ConfigError(
                "\n".join(f"{key}: this setting must be given: {key}=…" for key in missing)
            )
        values = OmegaConf.to_container(own, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error)) from error
    choices = OmegaConf.select(composed, "hydra.runtime.choices", default={})
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}, dict(choices)


def first_line(error: Exception) -> str:
    """What an error of Hydra or OmegaConf says, without its advice for programmers."""
    causes = [e for e in (error, error.__cause__) if e is not None and str(e).strip()]
    return ": ".join(str(e).strip().splitlines()[0] for e in causes) or type(error).__name__


@dataclass(frozen=True)
class Composer:
    """Composes one YAML file with different words, within a Hydra application or `own_hydra`."""

    name: str
    hydra_words: tuple[str, ...] = ()
    """Overrides of Hydra's own settings, such as hydra.searchpath."""

    def compose(self, words: Sequence[str]) -> DictConfig:
        """The settings with these words, Hydra's own included."""
        try:
            words = [*self.hydra_words, *words]
            return hydra_compose(self.name, words, return_hydra_config=True)
        except MissingConfigException as error:
            group, _, choice = (error.missing_cfg_file or "").rpartition("/")
            raise ConfigError(unknown_choice(group, choice, self.options(group))) from error
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(first_line(error)) from error

    def options(self, group: str) -> list[str]:
        """The choices of a group of YAML files; none if there is no such group."""
        list_group = partial(
            GlobalHydra.instance().config_loader().get_group_options,
            config_name=self.name,
            overrides=list(self.hydra_words),
        )
        folders = list_group(group, ObjectType.GROUP) if "." not in group else []
        nested = [
            f"{folder}/{name}" for folder in folders for name in self.options(f"{group}/{folder}")
        ]
        return [*list_group(group, ObjectType.CONFIG), *nested]

    def read(self, words: Sequence[str]) -> tuple[list[Override], list[str]]:
        """Words as Hydra reads them, and messages on those that cannot be read."""
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        overrides, mistakes = [], []
        for word in words:
            try:
                if "=" not in word and not word.startswith("~"):
                    raise ConfigError(f"'{word}': a setting is given as name=value.")
                overrides += parser.parse_overrides([word])
            except HydraException as error:
                mistakes.append(f"'{word}' cannot be read: {first_line(error)}")
            except ConfigError as error:
                mistakes.append(str(error))
        return overrides, mistakes

    def lenient(self, words: Sequence[str], several: bool = False) -> tuple[list[str], list[str]]:
        """The words with `key=value` written as `++key=value`, and messages on those that cannot be
        used. With `several` a word may have more than one value.
        """
        overrides, mistakes = self.read(words)
        usable = []
        for override in overrides:
            word = str(override.input_line)
            options = self.options(override.key_or_group)
            if override.is_sweep_override() and not several:
                mistakes.append(
                    f"{word}: a run takes one value, not several; --multirun tries all."
                )
            elif options and not override.is_delete():
                chosen = [choice.removesuffix(".yaml") for choice in _chosen(override)]
                unknown = [choice for choice in chosen if choice not in options]
                group = override.key_or_group
                mistakes += [unknown_choice(group, choice, options) for choice in unknown]
                usable += [] if unknown else [word]
            elif override.is_delete() or override.is_hydra_override():
                usable.append(word)
            else:
                usable.append("++" + word.lstrip("+"))
        return usable, mistakes

    def unknown_hydra_words(self, words: Sequence[str] = ()) -> list[str]:
        """Messages on the words for Hydra's own settings that do not exist. Of `words`, search=…
        chooses the sweeper.
        """
        overrides, mistakes = self.read(self.hydra_words)
        settings = [o for o in overrides if o.key_or_group.startswith("hydra.")]
        groups = [str(o.input_line) for o in overrides if o not in settings]
        search = [word for word in words if word.startswith("search=")]
        known = Composer(self.name, tuple(groups)).compose(search) if settings else None
        for override in settings:
            parent, _, key = override.key_or_group.rpartition(".")
            place = OmegaConf.select(known, parent) if known is not None else None
            if isinstance(place, DictConfig) and key not in place and not override.is_force_add():
                near = suggest(key, map(str, place))
                mistakes.append(f"{override.input_line}: unknown setting. {near}")
        return mistakes


def _chosen(override: Override) -> list[str]:
    """The choices of a group that a word names."""
    if override.is_sweep_override():
        return [str(c) for c in override.sweep_iterator()] if override.is_discrete_sweep() else []
    value = override.value()
    return [str(c) for c in (value if isinstance(value, list) else [value]) if c is not None]


@dataclass(frozen=True)
class Jobs:
    """The jobs of a sweep."""

    fixed: dict[str, str]
    """The words with one value, by their setting."""
    swept: list[str]
    """The settings with several values."""
    words: list[list[str]]
    """The words of each job."""


def expand(overrides: Sequence[Override], all_points: bool) -> Jobs:
    """The jobs of a sweep, in the order of Hydra's basic sweeper.

    Without `all_points` there is one, as an example: a sweeper decides on the points later.
    """
    by_key = {o.key_or_group: o for o in overrides}
    values: dict[str, list[str]] = {}
    for key, override in by_key.items():
        name = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [str(override.input_line)]
        elif override.is_discrete_sweep():
            values[key] = [f"{name}={value}" for value in override.sweep_string_iterator()]
            if not values[key]:
                raise ConfigError(f"{override.input_line}: there is nothing that this stands for.")
        elif all_points:
            raise ConfigError(
                f"{override.input_line}: give the values, such as a,b or range(0,10,2)."
            )
    swept = [key for key, override in by_key.items() if override.is_sweep_override()]
    fixed = {key: words[0] for key, words in values.items() if key not in swept}
    jobs = [list(words) for words in itertools.product(*values.values())]
    return Jobs(fixed, swept, jobs if all_points else jobs[:1])
