"""Fields of other projects' JSON configs, each with its meaning as settings of a model here, for
reading them and for writing them.

A field is followed, or known to make no difference, or refused: a later version of the project may
have given it a meaning.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from vision.checkpoints.errors import CheckpointError

Settings = dict[str, Any]


class Field(NamedTuple):
    """A field that changes what a model computes."""

    default: Any
    """The value where the file does not have the field."""
    settings: Callable[[Any], Settings]
    """The settings of a model for a value, or a KeyError where there are none."""
    value: Callable[[Any], Any] | None = None
    """The value for the config of a model; None: always the default."""


def setting(
    name: str,
    default: Any,
    read: Callable[[Any], Any] = lambda value: value,
    write: Callable[[Any], Any] = lambda value: value,
) -> Field:
    """A field that is a setting here, under another name."""
    return Field(
        default, lambda value: {name: read(value)}, lambda config: write(getattr(config, name))
    )


def choice(default: Any, choices: Mapping[Any, Settings]) -> Field:
    """A field with a few known values, of which a config has the first whose settings it has."""

    def value(config: Any) -> Any:
        return next(
            value
            for value, settings in choices.items()
            if all(getattr(config, name) == own for name, own in settings.items())
        )

    return Field(default, lambda value: choices[value], value)


def only(value: Any) -> Field:
    """A field with a single known value."""
    return Field(value, lambda given: {value: Settings()}[given])


def written(fields: Mapping[str, Field], config: Any) -> dict[str, Any]:
    """The fields for the config of a model."""
    return {name: field.value(config) for name, field in fields.items() if field.value}


def follow(
    values: Mapping[str, Any],
    fields: Mapping[str, Field],
    others: Collection[str],
    file: str,
    library: str,
) -> Settings:
    """The settings that the fields of a file amount to; `others` are fields without a meaning for
    the model. Any other field, and any other value, is refused by name. `library` wrote the file.
    """
    settings = Settings()
    for name, field in fields.items():
        value = values.get(name, field.default)
        try:
            settings |= field.settings(value)
        except (KeyError, TypeError, ValueError) as error:
            raise _unknown(name, value, "whose value", file, library) from error
    for name, value in values.items():
        known = name in fields or name in others or name.startswith("_")
        if not known and value not in (None, False, "", [], {}):
            raise _unknown(name, value, "a field that", file, library)
    return settings


def _unknown(name: str, value: Any, what: str, file: str, library: str) -> CheckpointError:
    return CheckpointError(
        f"The {file} beside it has {name}={value!r}, {what} is not known here: the model may "
        f"compute something else than its weights were trained for. Open it with {library}; or, "
        f"if you know that it makes no difference, remove the field from a copy of the file."
    )
