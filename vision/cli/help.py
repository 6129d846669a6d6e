"""What `vision <command> --help` prints: choices, then every setting with its value and meaning."""

import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from vision.config import Config, config_classes


def command_help(
    name: str,
    summary: str,
    config: type[Config],
    values: Mapping[str, Any],
    choices: Mapping[str, Mapping[str, str]],
) -> str:
    """The help of a command, for the choices made in `values`."""
    columns = min(shutil.get_terminal_size().columns, 120)
    lines = [f"vision {name}: {summary}", "", "Choices (group=choice):"]
    for group in (g for g in choices if g in config.model_fields):
        names = ", ".join(sorted(choices[group]))
        lines += textwrap.wrap(
            f"{group}: {names}", columns, initial_indent="  ", subsequent_indent="      "
        )
    lines += ["", "Settings (name=value), here with the values of the present choices:"]
    rows = list(_settings(config, values))
    width = min(max(len(setting) for setting, _ in rows), 44)
    for setting, meaning in rows:
        text = f"{setting:{width}}  {meaning}".rstrip()
        lines += textwrap.wrap(
            text,
            columns,
            initial_indent="  ",
            subsequent_indent=" " * (width + 4),
            drop_whitespace=True,
        )
    return "\n".join(lines)


def _settings(
    config: type[Config], values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """`path=value` and meaning of every setting, depth first; what is inherited comes last."""
    own = inspect.get_annotations(config)
    for name, field in sorted(config.model_fields.items(), key=lambda item: item[0] not in own):
        value = values.get(name)
        inner = _chosen(config_classes(field.annotation), value)
        if inner is not None and isinstance(value, Mapping):
            yield from _settings(inner, value, f"{prefix}{name}.")
        elif name != "kind":
            meaning = " ".join((field.description or "").split())
            yield f"{prefix}{name}={_shown(value)}", " ".join([meaning, _expected(field)]).strip()


def _chosen(classes: list[type[Config]], value: Any) -> type[Config] | None:
    """The member of a union that a mapping is meant for."""
    if not isinstance(value, Mapping) or not classes:
        return None
    if len(classes) == 1:
        return classes[0]
    kinds = {c.model_fields["kind"].annotation.__args__[0]: c for c in classes}  # type: ignore[union-attr]
    return kinds.get(value.get("kind"))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ",".join(map(_shown, value)) + "]"
    return str(value)


def _expected(field: Any) -> str:
    """The choices of a field that has some."""
    arguments = getattr(field.annotation, "__args__", ())
    if getattr(field.annotation, "__origin__", None) is None or not arguments:
        return ""
    if all(isinstance(a, str) for a in arguments):
        return f"({' | '.join(arguments)})"
    return ""
