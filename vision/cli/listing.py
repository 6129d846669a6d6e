"""Texts of `vision --help`, `vision <command> --help` and `vision list`, and the groups of YAML
files that they name.
"""

import inspect
import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from vision.config import Config, ConfigError, config_classes, shown, suggest

PACKAGE = Path(__file__).parent.parent
_IN_WHEEL = PACKAGE / "_configs"
CONFIGS = _IN_WHEEL if _IN_WHEEL.is_dir() else PACKAGE.parent / "configs"
"""In a wheel the YAML files lie inside the package, in a checkout beside it."""

MODEL_COSTS = Path(__file__).with_name("model_costs.json")
"""Image size, parameters and MACs of every model of configs/model with 1000 classes."""

LISTINGS = {
    "models": "model",
    "data": "data",
    "augmentations": "augment",
    "recipes": "recipe",
    "tasks": "task",
    "experiments": "experiment",
    "searches": "search",
}
"""Words after `vision list`, with the group of YAML files that each lists."""

PLUGINS = {
    "hydra/launcher=submitit_slurm": "vit-swin[slurm]",
    "hydra/launcher=submitit_local": "vit-swin[slurm]",
    "hydra/launcher=joblib": "vit-swin[joblib]",
    "hydra/launcher=ray": "vit-swin[ray]",
    "hydra/sweeper=search": "vit-swin[search]",
    "hydra/sweeper=optuna": "hydra-optuna-sweeper",
}
"""Launchers and sweepers of Hydra that come with a package."""

USAGE = f"""\
usage: vision list {"|".join(LISTINGS)} [PATTERN]
       vision list pretrained [PATTERN]"""

HELP = f"""{USAGE}

The first form prints one line for each choice of a group of settings; models with parameters and
MACs for 1000 classes at the size of images in the table.
The second lists published weights for init=, by family, with image size and licence. A PATTERN such
as '*dino*' (in quotes, or the shell may expand it) selects names from all models of timm; if only a
few match, their parameters are counted. Nothing is downloaded."""


_OVERVIEW = """\
usage: vision <command> [setting=value ...] [--help] [option of Hydra ...]
       vision train --multirun setting=value,value [setting=value ...]

Commands:
{}

vision <command> --help shows every setting of a command with its value and meaning;
--cfg job prints them without running it; --config-dir adds a folder of YAML; --hydra-help shows
all options of Hydra, which every command takes."""


def choices() -> dict[str, dict[str, str]]:
    """Every group of YAML files, with its choices and a one-line description of each."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(CONFIGS.glob("*/**/*.yaml")):
        group, _, choice = file.relative_to(CONFIGS).with_suffix("").as_posix().partition("/")
        found.setdefault(group, {})[choice] = _first_comment(file)
    return found


def unknown_choice(group: str, choice: str, known: Sequence[str]) -> str:
    """Return the message for `group=choice` if there is no such file, given the known choices."""
    if not known:
        return f"unknown group of settings '{group}'. {suggest(group, choices())}"
    if (package := PLUGINS.get(f"{group}={choice}")) is not None:
        return f"{group}={choice} needs a plugin: pip install '{package}'."
    near = suggest(choice, known)
    listed = "" if near.startswith("Known") else f" Known: {', '.join(sorted(known))}."
    timm = f" For a model of timm write model=timm model.name={choice}." if group == "model" else ""
    return f"{group}={choice}: unknown choice. {near}{listed}{timm}"


def listing(words: Sequence[str]) -> str:
    """Return the output of `vision list <words>`."""
    if {"-h", "--help"} & set(words):
        return HELP
    if not words:
        raise ConfigError(USAGE)
    what, *rest = words
    if what == "pretrained" and len(rest) <= 1:
        from vision.checkpoints.pretrained import pretrained_table

        return pretrained_table(rest[0] if rest else None, _pretrained())
    if what in LISTINGS and len(rest) <= 1:
        known = choices()[LISTINGS[what]]
        found = {n: line for n, line in known.items() if not rest or fnmatchcase(n, rest[0])}
        if not found:
            raise ConfigError(
                f"'{what}': no name matches '{rest[0]}'. {suggest(rest[0].strip('*'), known)}"
            )
        if what == "models":
            return _models(found)
        width = max(map(len, found))
        return "\n".join(f"{name:{width}}  {line}" for name, line in sorted(found.items()))
    if what in (*LISTINGS, "pretrained"):
        raise ConfigError(f"'{what}': unexpected {' '.join(rest)}.\n{USAGE}")
    meant = "pretrained" if what == "weights" else what  # its former name
    raise ConfigError(
        f"unknown list '{what}'. {suggest(meant, [*LISTINGS, 'pretrained'])}\n{USAGE}"
    )


def _models(found: Mapping[str, str]) -> str:
    """Models with the costs that `vision info` counts, stored: they take seconds to count."""
    costs = json.loads(MODEL_COSTS.read_text(encoding="utf-8"))
    width = max(map(len, found))
    lines = [f"{'':{width}}  {'parameters':>10}  {'MACs':>7}  {'image':>5}"]
    for name, line in sorted(found.items()):
        numbers = f"{'–':>10}  {'–':>7}  {'–':>5}"
        if name in costs:
            size, parameters, macs = costs[name]
            numbers = f"{parameters / 1e6:>8.1f} M  {macs / 1e9:>5.2f} G  {size:>5}"
        lines.append(f"{name:{width}}  {numbers}  {line}")
    return "\n".join(lines)


def _pretrained() -> dict[str, str]:
    """Names of the weights that `init=pretrained` loads, with the models that name them."""
    found = {}
    for file in sorted(CONFIGS.glob("model/*.yaml")):
        for line in file.read_text(encoding="utf-8").splitlines():
            key, _, source = line.partition(": ")
            if key == "pretrained" and source.startswith("timm:") and "$" not in source:
                found[source.removeprefix("timm:")] = file.stem
    return found


def overview(summaries: Mapping[str, str]) -> str:
    """Return the output of `vision --help`, given the summary of each command."""
    rows = {**summaries, "list": "list the choices of a group, or published weights"}
    width = max(map(len, rows))
    lines = [f"  {name:{width}}  {summary}" for name, summary in sorted(rows.items())]
    return _OVERVIEW.format("\n".join(lines))


@dataclass(frozen=True)
class Setting:
    """A setting of a command, with its present value."""

    path: str
    value: Any
    field: FieldInfo

    @property
    def meaning(self) -> str:
        """The docstring below the field, on one line."""
        return " ".join((self.field.description or "").split())


def command_help(
    name: str,
    summary: str,
    config: type[Config],
    values: Mapping[str, Any],
    groups: Mapping[str, Iterable[str]],
) -> str:
    """Return the help of a command, for its present values and its groups of choices."""
    columns = min(shutil.get_terminal_size().columns, 120)
    lines = [f"vision {name}: {summary}"]
    if groups:
        lines += ["", "Choices (group=choice):"]
    for group in sorted(groups):
        text = f"  {group}: {', '.join(sorted(groups[group]))}"
        lines += textwrap.wrap(text, columns, subsequent_indent=" " * 6)
    lines += ["", "Settings (name=value), with the values of the present choices:"]
    rows = [(f"{s.path}={shown(s.value)}", _with_words(s)) for s in settings(config, values)]
    width = min(max(len(setting) for setting, _ in rows), 44)
    for setting, meaning in rows:
        text = f"  {setting:{width}}  {meaning}".rstrip()
        lines += textwrap.wrap(text, columns, subsequent_indent=" " * (width + 4))
    return "\n".join(lines)


def settings(
    config: type[Config], values: Mapping[str, Any], prefix: str = ""
) -> Iterator[Setting]:
    """Every setting with its value, depth first; inherited settings come last."""
    own = inspect.get_annotations(config)
    for name, field in sorted(config.model_fields.items(), key=lambda item: item[0] not in own):
        value = values.get(name)
        if isinstance(value, Mapping) and (classes := config_classes(field.annotation)):
            yield from settings(_of_kind(classes, value.get("kind")), value, f"{prefix}{name}.")
            continue
        # the kind of a union's member follows from its YAML
        if name != "kind" or len(_words(field.annotation)) > 1:
            yield Setting(f"{prefix}{name}", value, field)


def _with_words(setting: Setting) -> str:
    """The meaning of a setting, and the words that it can have as a value."""
    words = _words(setting.field.annotation)
    return f"{setting.meaning} ({' | '.join(words)})".strip() if words else setting.meaning


def _of_kind(classes: list[type[Config]], kind: Any) -> type[Config]:
    """The member of a union whose field `kind` has a value."""
    if len(classes) == 1:
        return classes[0]
    return next(c for c in classes if kind in get_args(c.model_fields["kind"].annotation))


def _words(annotation: Any) -> list[str]:
    """The words that an annotation consists of, if it allows nothing else but null."""
    arguments = [a for a in get_args(annotation) if a is not NoneType]
    if get_origin(annotation) is Literal:
        return [str(a) for a in arguments]
    if get_origin(annotation) in (Union, UnionType):
        parts = [_words(a) for a in arguments]
        return [word for part in parts for word in part] if all(parts) else []
    return []


def _first_comment(file: Path) -> str:
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").rstrip(".")
    return ""
