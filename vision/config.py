"""Strict parsing of plain mappings into frozen, typed configs.

Hydra composes YAML into plain mappings (see `vision/cli/composition.py`); this module turns such a
mapping into a `Config`, or raises one `ConfigError` that lists every mistake with its full path,
what was expected and, for a misspelt key, the nearest known one. It knows nothing of Hydra, torch
or any particular config.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]
"""A share of things that are dropped: 1 would drop everything."""

Size = PositiveInt | tuple[PositiveInt, PositiveInt]
"""One number for a square, or [height, width]."""


_DESCRIBED = 50
"""Number of mistakes that an error describes: a file of another program may have any number."""


def several(value: Any) -> Any:
    """One string as a tuple of one, for settings that take one or several."""
    # What a validator before the type returns is not JSON any more, where a list is a tuple.
    return (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )


class Config(BaseModel):
    """Base of all configs: frozen after parsing; unknown keys and loosely matching types are
    errors.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class UserError(Exception):
    """Something that a person can act on: the command line shows the message and no traceback."""


class ConfigError(UserError, ValueError):
    """Something in a config that its author can correct; the message says what and how."""


C = TypeVar("C")


def parse(kind: type[C], values: Mapping[str, Any]) -> C:
    """`values` as a `kind` (a Config class or a union of them), or a ConfigError that lists the
    mistakes.

    The values pass through JSON on their way: what a YAML file can say is exactly what a config
    holds, so lists become tuples and strings become paths, yet "12" never becomes the number 12.
    """
    adapter: TypeAdapter[C] = TypeAdapter(kind)
    try:
        return adapter.validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        details = error.errors(include_url=False)
    raise ConfigError("\n".join(_messages(kind, values, details)))


def pair(size: Size) -> tuple[int, int]:
    """(height, width) of a size that may have been given as one number."""
    return (size, size) if isinstance(size, int) else size


def suggest(word: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest known words, or all of them when none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean '{near[0]}'?"
    return f"Known: {', '.join(known)}." if known else ""


def field_paths(kind: Any) -> dict[str, type[Config]]:
    """Every dotted path below a config class, with the class that owns its last part."""
    paths: dict[str, type[Config]] = {}
    for config in config_classes(kind):
        for name, field in config.model_fields.items():
            paths.setdefault(name, config)
            for path, owner in field_paths(field.annotation).items():
                paths.setdefault(f"{name}.{path}", owner)
    return paths


def config_classes(annotation: Any) -> list[type[Config]]:
    """The Config classes in an annotation: itself, or the members of a union of them."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, list, tuple, dict):
        return [c for argument in get_args(annotation) for c in config_classes(argument)]
    return []


def _messages(kind: Any, values: Mapping[str, Any], details: list[ErrorDetails]) -> list[str]:
    """One line per mistake. What the members of a union say of the same value makes one line."""
    lines: dict[str, list[str]] = {}
    for error in details[:_DESCRIBED]:
        steps, owner = _locate(kind, values, error["loc"])
        where = ".".join(steps) or "the config"
        line = _describe(kind, owner, steps, error)
        if line not in lines.setdefault(where, []):
            lines[where].append(line)
    inner = {w for w in lines if any(other.startswith(f"{w}.") for other in lines)}
    described = [
        f"{where}: {' Or: '.join(found)}" for where, found in lines.items() if where not in inner
    ]
    more = len(details) - _DESCRIBED
    return [*described, f"And {more} more mistakes."] if more > 0 else described


def _describe(kind: Any, owner: type[Config] | None, steps: list[str], error: ErrorDetails) -> str:
    """What is wrong with one value, and what is expected."""
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return f"there is no such setting. {_near_settings(kind, owner, steps)}"
        case "missing":
            return "this setting is missing."
        case "union_tag_invalid":
            tag = str(context["tag"])
            kinds = [k.strip().strip("'") for k in str(context["expected_tags"]).split(",")]
            return f"unknown kind '{tag}'. {suggest(tag, kinds)}"
        case "union_tag_not_found":
            return "the setting 'kind' is missing; it says which kind is meant."
        case "value_error":
            return str(context["error"])
        case _:
            found = json.dumps(error["input"], default=str)
            message = re.sub(r"^\w+ (?=should )", "", error["msg"])
            return f"{message.replace(' after validation', '')}, found {found}."


def _locate(
    kind: Any, values: Any, location: tuple[int | str, ...]
) -> tuple[list[str], type[Config] | None]:
    """The path of a mistake as its author wrote it, and the config class that it is in.

    Pydantic's own location also names the union member that it tried; such a step is not in the
    values.
    """
    steps: list[str] = []
    owners = config_classes(kind)
    owner = owners[0] if len(owners) == 1 else None
    for step in location:
        if len(owners) > 1 and isinstance(values, Mapping) and values.get("kind") == step:
            owner = next(o for o in owners if step in get_args(o.model_fields["kind"].annotation))
            owners = [owner]
            continue
        if isinstance(values, Mapping) and step in values:
            values = values[str(step)]
        elif isinstance(values, list) and isinstance(step, int):
            values = values[step] if step < len(values) else None
        elif owner is None or step not in owner.model_fields:
            continue
        steps.append(str(step))
        if owner is not None and step in owner.model_fields:
            owners = config_classes(owner.model_fields[str(step)].annotation)
            owner = owners[0] if len(owners) == 1 else owner if not owners else None
    return steps, owner


def _near_settings(kind: Any, owner: type[Config] | None, steps: list[str]) -> str:
    """What the author of an unknown key may have meant: a neighbour, or the same name elsewhere."""
    *parents, key = steps
    place = ".".join(parents)
    known = [name for name in owner.model_fields if name != "kind"] if owner else []
    same_name = [p for p in field_paths(kind) if p.rpartition(".")[2] == key]
    if ".".join(steps) in same_name:  # another kind of the same thing has it
        return f"This kind of {place} has: {', '.join(sorted(known))}."
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean '{'.'.join([*parents, near[0]])}'?"
    if same_name:
        return f"Did you mean '{same_name[0]}'?"
    return f"Known {f'in {place}' if place else 'here'}: {', '.join(sorted(known))}."
