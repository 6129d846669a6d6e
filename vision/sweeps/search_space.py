"""The space of a search: the values that each setting may have, and points in it.

A point maps settings to values as they are typed on the command line, so that a trial is an
ordinary run: `train.py optimizer.learning_rate=0.000348902`.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

DIGITS = 6
"""Significant digits of a value from an interval: commands and folders stay short."""

Point = Mapping[str, str]
"""The settings of a trial, with values as typed on the command line."""


@dataclass(frozen=True)
class Interval:
    """All numbers between two, both included."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def text(self, value: float) -> str:
        """A value of this interval as typed, rounded but never out of the interval."""
        if self.integer:
            return str(int(value))
        return repr(min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high))

    def ends(self) -> tuple[str, ...]:
        """The values that stand for all others when settings are checked."""
        return tuple(dict.fromkeys((self.text(self.low), self.text(self.high))))


@dataclass(frozen=True)
class Steps:
    """Equally spaced numbers in ascending order."""

    values: tuple[float, ...]

    @property
    def step(self) -> float:
        """The distance between two neighbours; 1 for a single value."""
        return self.values[1] - self.values[0] if len(self.values) > 1 else 1

    def text(self, value: float) -> str:
        """The nearest of the values, as typed."""
        return repr(min(self.values, key=lambda known: abs(known - value)))

    def ends(self) -> tuple[str, ...]:
        """Every value."""
        return tuple(map(repr, self.values))


@dataclass(frozen=True)
class Choices:
    """Values without an order, as typed."""

    values: tuple[str, ...]

    def text(self, value: str) -> str:
        """The value itself."""
        return value

    def ends(self) -> tuple[str, ...]:
        """Every value."""
        return self.values


Dimension = Interval | Steps | Choices
Space = Mapping[str, Dimension]


def as_dict(dimension: Dimension) -> dict[str, Any]:
    """A dimension as JSON has it."""
    return {"kind": type(dimension).__name__.lower(), **asdict(dimension)}


def grid_size(space: Space) -> int:
    """The number of points of a space without intervals."""
    size = 1
    for dimension in space.values():
        size *= len(dimension.ends())
    return size


def grid_point(space: Space, number: int) -> dict[str, str]:
    """The nth point of the grid; the last setting changes first."""
    values = []
    for dimension in reversed(list(space.values())):
        number, index = divmod(number, len(dimension.ends()))
        values.append(dimension.ends()[index])
    return dict(zip(space, reversed(values), strict=True))


def points_to_check(space: Space) -> Iterator[dict[str, str]]:
    """Points with every choice and both ends of every interval.

    They change one setting at a time, so that their number is the sum of the choices, not their
    product; the first point has the first value of each.
    """
    first = {key: dimension.ends()[0] for key, dimension in space.items()}
    yield first
    for key, dimension in space.items():
        for value in itertools.islice(dimension.ends(), 1, None):
            yield {**first, key: value}
