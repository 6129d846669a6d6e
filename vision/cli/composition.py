"""Settings from YAML files and words of the command line, composed by Hydra.

Nothing here is typed or checked yet; `vision.config.parse` does that. A value for an unknown key is
let through, so that the parser, which knows all settings, can say what may have been meant.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vision.cli.app import Choices, Command
from vision.cli.listing import CONFIGS, unknown_choice
from vision.cli.synonyms import remedy
from vision.config import ConfigError, abridged, outputs, parse, shown, suggest
from vision.files import unwritable


def compose(
    name: str, overrides: Sequence[str], complete: bool = True
) -> tuple[dict[str, Any], Choices]:
    """The plain settings that a YAML file and overrides make, and the choice in each group.

    With `complete`, every mandatory value must be there.
    """
    with composer(name) as yaml:
        return yaml.settings(overrides, complete)


@contextmanager
def composer(
    name: str, hydra_words: Sequence[str] = (), folders: Sequence[Path] = (CONFIGS,)
) -> Iterator["Composer"]:
    """Compose from folders of YAML, outside of a Hydra application or beside the one that runs."""
    first = next((f for f in folders if (f / f"{name}.yaml").is_file()), folders[0])
    others = [f"file://{folder.resolve()}" for folder in folders if folder != first]
    search = [f"hydra.searchpath={quoted(others)}"] if others else []
    application = GlobalHydra.instance()
    running = application.hydra
    application.clear()
    try:
        with initialize_config_dir(str(first.resolve()), version_base="1.3"):
            yield Composer(name, (*search, *hydra_words))
    finally:
        application.hydra = running


def quoted(value: Any) -> str:
    """A value as Hydra's grammar takes it, whatever its characters."""
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    if value is None:
        return "null"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if isinstance(value, str) else escaped


def plain(composed: DictConfig, complete: bool = True) -> tuple[dict[str, Any], Choices]:
    """Composed settings without Hydra's own, and the choice in each group."""
    own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    try:
        missing = sorted(OmegaConf.missing_keys(own))
        if missing and complete:
            raise ConfigError(
                "\n".join(f"{key}: this setting must be given: {key}=…" for key in missing)
            )
        _check_references(OmegaConf.to_container(own, resolve=False))
        values = OmegaConf.to_container(own, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(first_line(error)) from error
    choices = OmegaConf.select(composed, "hydra.runtime.choices", default={})
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}, dict(choices)


def _check_references(values: Any, key: str = "") -> None:
    """Refuse ${hydra:…} without a value, as of a number that a job gets when it starts: Hydra would
    put None there, and the run would be looked for under another name than it gets.
    """
    if isinstance(values, dict | list):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            _check_references(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, str):
        for path in re.findall(r"\$\{hydra:([\w.]+)\}", values):
            own: Any = HydraConfig.get()
            if OmegaConf.select(own, path) is None:
                raise ConfigError(f"{key}: ${{hydra:{path}}} is unknown before the job starts.")


def first_line(error: Exception) -> str:
    """What an error of Hydra or OmegaConf says, with the setting if it knows it and without its
    advice for programmers.
    """
    causes = [e for e in (error, error.__cause__) if e is not None and str(e).strip()]
    if len(causes) > 1 and str(error).startswith("Error merging override"):  # which ends in a word
        causes = causes[1:]
    text = ": ".join(str(e).strip().splitlines()[0] for e in causes) or type(error).__name__
    if "maximum recursion depth" in text:
        text = "it refers to itself, or is nested too deeply."
    setting = getattr(error, "full_key", None)
    return abridged(f"{setting}: {text}" if setting else text)


@dataclass(frozen=True)
class Composer:
    """Composes one YAML file with different words, within a Hydra application or `composer`."""

    name: str
    hydra_words: tuple[str, ...] = ()
    """Overrides of Hydra's own settings, such as hydra.searchpath."""

    def compose(self, words: Sequence[str]) -> DictConfig:
        """The settings with these words, Hydra's own included."""
        try:
            words = [*self.hydra_words, *words]
            composed = hydra_compose(self.name, words, return_hydra_config=True)
            HydraConfig.instance().set_config(composed)  # for references such as ${hydra:job.name}
            OmegaConf.set_readonly(composed.hydra, None)  # as it was before
            return composed
        except MissingConfigException as error:
            group, _, choice = (error.missing_cfg_file or "").rpartition("/")
            if not group:
                raise ConfigError(f"--config-name: '{choice}.yaml' does not exist.") from error
            raise ConfigError(unknown_choice(group, choice, self.options(group))) from error
        except Exception as error:  # some words make Hydra and OmegaConf fail with errors of Python
            raise ConfigError(first_line(error)) from error

    @cached_property
    def _folders(self) -> frozenset[str]:
        """The first parts of the names of all groups. Hydra reads YAML before it lists a group,
        which is too slow to be done for each word.
        """
        return frozenset(self._list("", ObjectType.GROUP))

    def _list(self, group: str, what: ObjectType) -> list[str]:
        loader = GlobalHydra.instance().config_loader()
        return loader.get_group_options(group, what, self.name, list(self.hydra_words))

    def options(self, group: str) -> list[str]:
        """The choices of a group of YAML files; none if there is no such group."""
        try:
            if group.partition("/")[0] not in self._folders:
                return []
            folders = self._list(group, ObjectType.GROUP) if "." not in group else []
            files = self._list(group, ObjectType.CONFIG)
        except (HydraException, OSError):  # no folder can have this name, or composing says more
            return []
        nested = [
            f"{folder}/{name}" for folder in folders for name in self.options(f"{group}/{folder}")
        ]
        return [*files, *nested]

    def read(self, words: Sequence[str]) -> tuple[list[Override], list[str]]:
        """Words as Hydra reads them, and messages on those that cannot be read."""
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        overrides, mistakes = [], []
        for word in words:
            try:
                if "=" not in word and not word.startswith("~"):
                    raise ConfigError(f"'{abridged(word)}': a setting is given as name=value.")
                overrides += parser.parse_overrides([word])
            except ConfigError as error:
                mistakes.append(str(error))
            except Exception as error:  # also RecursionError, and ValueError for 5,000 digits
                mistakes.append(f"'{abridged(word)}' cannot be read: {first_line(error)}")
        return overrides, mistakes

    def compose_usable(self, words: Sequence[str]) -> tuple[list[str], DictConfig, list[str]]:
        """The words that can be used, the settings that they make, and messages on the others.

        `key=value` becomes `++key=value`, which Hydra never refuses: the key may be below one that
        is null, or else the parser will refuse it. Of several values of a setting the first counts.
        """
        overrides, mistakes = self.read(words)
        usable = []
        for override in overrides:
            word, key = str(override.input_line), override.key_or_group
            options = self.options(key)
            if options and not override.is_delete():
                unknown = [c for c in _chosen(override) if c.removesuffix(".yaml") not in options]
                mistakes += [unknown_choice(key, choice, options) for choice in unknown]
                usable += [] if unknown else [word]
            else:
                typed = override.is_delete() or key.startswith("hydra.")
                usable.append(word if typed else f"++{word.lstrip('+')}")
        try:
            return usable, self._compose_example(usable), mistakes
        except ConfigError as error:
            refused = self._refused(usable)
            if not refused:
                raise ConfigError("\n".join([*mistakes, str(error)])) from error
        usable = [word for word in usable if word not in refused]
        mistakes += refused.values()
        try:
            return usable, self._compose_example(usable), mistakes
        except ConfigError as error:
            raise ConfigError("\n".join([*mistakes, str(error)])) from error

    def settings(
        self, words: Sequence[str], complete: bool = True
    ) -> tuple[dict[str, Any], Choices]:
        """The plain settings with these words, and the choice in each group; see `compose`."""
        _, composed, mistakes = self.compose_usable(words)
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        return plain(composed, complete)

    def _compose_example(self, words: Sequence[str]) -> DictConfig:
        return self.compose(expand(self.read(words)[0], all_points=False).words[0])

    def _refused(self, words: Sequence[str]) -> dict[str, str]:
        """Messages on the words that cannot be used even alone with the chosen groups, by word."""
        overrides = self.read(words)[0]
        chosen = [str(o.input_line) for o in overrides if self.options(o.key_or_group)]
        try:
            example = self._compose_example(chosen)
        except ConfigError:
            chosen, example = [], self.compose(())
        known = OmegaConf.to_container(example, resolve=False)
        messages = {}
        for override in overrides:
            word = str(override.input_line)
            try:
                self._compose_example([*(w for w in chosen if w != word), word])
            except ConfigError as error:
                messages[word] = f"{abridged(word.removeprefix('++'))}: {error}"
                *parents, key = override.key_or_group.split(".")
                place, above = known, ""
                while parents and isinstance(place, dict):
                    above = f"{above}.{parents[0]}".removeprefix(".")
                    place = place.get(parents.pop(0))
                if isinstance(place, list):
                    near = f"{above} is a list, which is set as a whole: {above}=[…]"
                elif not above.startswith("hydra") or "+" in word[:2]:
                    continue
                elif not isinstance(place, dict):
                    near = f"unknown setting. To add it, write +{word}."
                elif key not in place:
                    near = f"unknown setting. {suggest(key, map(str, place))}"
                else:
                    continue
                messages[word] = f"{abridged(word.removeprefix('++'))}: {near}"
        return messages


def _chosen(override: Override) -> list[str]:
    """The choices of a group that a word names."""
    value = override.value()
    if override.is_discrete_sweep():
        return [str(choice) for choice in override.sweep_iterator()]
    return [str(c) for c in value] if isinstance(value, list) else [shown(value)]


@dataclass(frozen=True)
class Jobs:
    """The jobs of a sweep, as words."""

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


def checked(command: Command, values: Mapping[str, Any], chosen: Choices) -> Any:
    """The config of a command; names of settings in other tools are answered with ours."""
    return parse(command.config, values, partial(remedy, command.config, chosen))


def check_settings(command: Command, composed: DictConfig) -> Any:
    """Parse the settings of a job; also refused if a file or folder cannot be written as asked."""
    config = checked(command, *plain(composed))
    mistakes = [
        f"{setting}: {path} cannot be written: {reason}"
        for setting, path, output in outputs(config)
        if (reason := unwritable(path, output.folder))
    ]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config
