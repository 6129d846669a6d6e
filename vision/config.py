"""Strict parsing of plain mappings into frozen, typed configs.

Hydra composes YAML into plain mappings (see `vision/cli/`). This module turns such a mapping into a
`Config`, or raises one `ConfigError` that lists every mistake with its full path, the expected
value and, for a misspelt key, the nearest known one. It is independent of Hydra, of torch and of
the config classes.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeGuard, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import ErrorDetails

# Every integer is bounded: a larger one would overflow or fill the memory in the middle of work.
PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[int, Field(ge=1, le=10**6)]
"""A number of things that are held in memory together."""
Width = Annotated[int, Field(ge=1, le=2**16)]
"""Channels of a layer, or heads."""
Depth = Annotated[int, Field(ge=1, le=2**10)]
"""Number of layers."""
Workers = Annotated[int, Field(ge=0, le=2**10)]
"""Number of processes; 0: the main process alone."""
Side = Annotated[int, Field(ge=1, le=2**14)]
"""Pixels or tokens along a side."""
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]
"""A fraction that is dropped; 1 would drop everything."""

Size = Side | tuple[Side, Side]
"""One number for a square, or [height, width]."""


def _window(value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
    """One message for the three forms of a window, in place of one for each form."""
    try:
        return parse(_tuples(value))
    except ValidationError:
        raise ValueError(
            f"expected a positive number, [height, width], or one [height, width] per stage such "
            f"as [[7,7],[7,7],[14,14],[7,7]], found {value!r}."
        ) from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_Pair = tuple[Side, Side]
_Pairs = Annotated[tuple[_Pair, ...], Field(min_length=1)]
Window = Annotated[Side | _Pair | _Pairs, WrapValidator(_window)]


def per_stage(window: Window) -> TypeGuard[tuple[tuple[int, int], ...]]:
    """Whether a window is given for each stage instead of one for all."""
    return isinstance(window, tuple) and isinstance(window[0], tuple)


P = TypeVar("P", str, Path)
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Bytes, on Linux and macOS or fewer."""


def _check_names(path: P) -> P:
    """Refuse a path that no file can have; looking for it would be an error of the system."""
    text = str(path).encode("utf-8", "surrogatepass")
    if any(len(part) > _LONGEST_NAME for part in text.split(b"/")):
        name = abridged(str(path), 60)
        raise ValueError(f"a part of the path '{name}' has more than {_LONGEST_NAME} bytes.")
    if len(text) > _LONGEST_PATH or b"\0" in text:
        raise ValueError(f"the path '{abridged(str(path), 60)}' is too long, or has a null byte.")
    return path


Place = Annotated[str, Field(min_length=1), AfterValidator(_check_names)]
"""A file, a folder, a pattern, or a name on a hub."""
FilePath = Annotated[Path, AfterValidator(_check_names)]


@dataclass(frozen=True)
class Output:
    """Mark of a file or folder that a command writes: checked before any work is done."""

    folder: bool | None
    """None: either."""


OutputPath = Annotated[FilePath, Output(folder=None)]
OutputFile = Annotated[FilePath, Output(folder=False)]
OutputFolder = Annotated[FilePath, Output(folder=True)]

Remedy = Callable[[str, Any], str]
"""A sentence on what to write instead of a setting with a given path and value, or ""."""

_DESCRIBED = 50
"""Maximum number of mistakes in one error: the file of another program may have any number."""


def _check_folder_name(name: str) -> str:
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute() or not name.isprintable():
        raise ValueError(
            f"'{name}' is not the name of a folder; write one such as run-1, without leading / and "
            "without .. in it."
        )
    return name


FolderName = Annotated[Place, AfterValidator(_check_folder_name)]
"""Name of a folder within another one; `a/b` is in a folder of its own."""


def several(value: Any) -> Any:
    """Return a string as a tuple of one, for settings that take one value or several."""
    if isinstance(value, str):
        return (value,)
    # The strict parser converts a JSON list to a tuple, but not one that has passed a validator.
    return tuple(value) if isinstance(value, list) else value


class Config(BaseModel):
    """Base of all configs. Frozen; unknown keys and values of another type are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class UserError(Exception):
    """An error that the user can fix: the command line shows its message without a traceback."""


class ConfigError(UserError, ValueError):
    """A mistake in the settings. The message names the value and the remedy."""


C = TypeVar("C")


def parse(kind: type[C], values: Mapping[str, Any], remedy: Remedy = lambda path, value: "") -> C:
    """Return `values` as a `kind` (a Config class or a union of them), or raise a ConfigError that
    lists all mistakes.

    The values pass through JSON: a config holds exactly what a YAML file can express, so lists
    become tuples and strings become paths, but "12" never becomes the number 12.
    """
    adapter: TypeAdapter[C] = TypeAdapter(kind)
    try:
        return adapter.validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        details = error.errors(include_url=False)
    raise ConfigError("\n".join(_messages(kind, values, details, remedy)))


def pair(size: Size) -> tuple[int, int]:
    """Return (height, width) of a size that may be given as one number."""
    return (size, size) if isinstance(size, int) else size


def square(size: Sequence[int]) -> int | list[int]:
    """Return a size as settings have it: one number for two equal ones."""
    return int(size[0]) if size[0] == size[1] else [int(side) for side in size]


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a sentence that names the nearest known word, or all of them if none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean '{near[0]}'?"
    return f"Known: {', '.join(known)}." if known else ""


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """Return the first few names and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def abridged(text: str, limit: int = 300) -> str:
    """Return a text for a message, without the middle of a very long one."""
    return text if len(text) <= limit else f"{text[: limit - 20]} … {text[-20:]}"


def shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, str):
        return value
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)
    return text.replace('"', "")


def field_paths(kind: Any) -> list[str]:
    """Every dotted path below a config class or a union of them."""
    paths: dict[str, None] = {}
    for config in config_classes(kind):
        for name, field in config.model_fields.items():
            inner = field_paths(field.annotation)
            paths |= dict.fromkeys([name, *(f"{name}.{path}" for path in inner)])
    return list(paths)


def config_classes(annotation: Any) -> list[type[Config]]:
    """The Config classes in an annotation: the annotation itself, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, list, tuple, dict):
        return [c for argument in get_args(annotation) for c in config_classes(argument)]
    return []


def outputs(config: Config) -> Iterator[tuple[str, Path, Output]]:
    """The settings of a config that name a file or folder to write."""
    for name, field in type(config).model_fields.items():
        kinds = (a for a in get_args(field.annotation) if get_origin(a) is Annotated)
        marks = [*field.metadata, *(mark for kind in kinds for mark in get_args(kind))]
        value = getattr(config, name)
        yield from ((name, value, mark) for mark in marks if isinstance(mark, Output) and value)


def _messages(
    kind: Any, values: Mapping[str, Any], details: list[ErrorDetails], remedy: Remedy
) -> list[str]:
    """One line per mistake. The errors of all union members for one value make one line."""
    lines: dict[str, list[str]] = {}
    for error in details[:_DESCRIBED]:
        steps, owner = _locate(kind, values, error["loc"])
        where = abridged(".".join(steps)) or "the config"
        line = _describe(kind, owner, steps, error, remedy)
        if line not in lines.setdefault(where, []):
            lines[where].append(line)
    inner = {w for w in lines if any(other.startswith(f"{w}.") for other in lines)}
    texts = {where: " Or: ".join(found) for where, found in lines.items() if where not in inner}
    described = [
        text if text.startswith(f"{where}.") else f"{where}: {text}"
        for where, text in texts.items()
    ]
    more = len(details) - _DESCRIBED
    return [*described, f"And {more} more mistakes."] if more > 0 else described


def _describe(
    kind: Any, owner: type[Config] | None, steps: list[str], error: ErrorDetails, remedy: Remedy
) -> str:
    """The mistake in one value, and the expected value."""
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            instead = remedy(".".join(steps), error["input"])
            return f"unknown setting. {instead or _near_settings(kind, owner, steps)}"
        case "missing":
            return "this setting is missing."
        case "union_tag_invalid":
            tag = str(context["tag"])
            kinds = [k.strip().strip("'") for k in str(context["expected_tags"]).split(",")]
            return f"unknown kind '{tag}'. {suggest(tag, kinds)}"
        case "union_tag_not_found":
            return "the setting 'kind' is missing, which selects one of the kinds."
        case "value_error" if owner is not None and isinstance(error["input"], Mapping):
            return _with_paths(str(context["error"]), owner, steps)
        case "value_error":
            return str(context["error"])
        case _:
            found = abridged(json.dumps(error["input"], default=str, ensure_ascii=False))
            message = re.sub(r"^\w+ (?=should )| after validation", "", error["msg"])
            message = message.replace("an object", "a group of settings")
            message = message.replace("valid array", "list")
            return f"{message}, found {found}. {remedy('.'.join(steps), error['input'])}".rstrip()


def _with_paths(text: str, owner: type[Config], steps: list[str]) -> str:
    """A message on several settings of a class, which it names as `heads = 3` or `pool=mean`, with
    their paths: what is to be typed.
    """
    names = "|".join(owner.model_fields)
    place = "".join(f"{step}." for step in steps)
    return re.sub(rf"(?<![\w.])({names})(?= ?=)", rf"{place}\1", text)


def _locate(
    kind: Any, values: Any, location: tuple[int | str, ...]
) -> tuple[list[str], type[Config] | None]:
    """The path of a mistake as the user wrote it, and the config class that it is in.

    Pydantic's location also contains the union members that it tried, which the values do not.
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
    """Suggestion for an unknown key: a similar key beside it, or the same key elsewhere."""
    *parents, key = steps
    place = ".".join(parents)
    known = [name for name in owner.model_fields if name != "kind"] if owner else []
    same_name = [p for p in field_paths(kind) if p.rpartition(".")[2] == key]
    if ".".join(steps) in same_name:  # a setting of another kind
        return f"This kind of {place} has: {', '.join(sorted(known))}."
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean '{'.'.join([*parents, near[0]])}'?"
    if same_name:
        return f"Did you mean '{same_name[0]}'?"
    return f"Known {f'in {place}' if place else 'here'}: {', '.join(sorted(known))}."
