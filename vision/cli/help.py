"""Text of `vision <command> --help`: the choices, then every setting with its value and meaning."""

import inspect
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from vision.config import Config, config_classes, shown


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
    choices: Mapping[str, Iterable[str]],
) -> str:
    """Return the help of a command, for its present values and its groups of choices."""
    columns = min(shutil.get_terminal_size().columns, 120)
    lines = [f"vision {name}: {summary}"]
    if choices:
        lines += ["", "Choices (group=choice):"]
    for group in sorted(choices):
        text = f"  {group}: {', '.join(sorted(choices[group]))}"
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
