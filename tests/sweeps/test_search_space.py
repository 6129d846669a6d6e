"""Values of a search as they are typed, and the points that are checked beforehand."""

import itertools
import math

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from hydra_plugins.vision_search.sweep_grammar import read_space
from vision.sweeps.search_space import Choices, Interval, Steps, grid_point, points_to_check

READ = {
    "a=interval(1,2)": Interval(1.0, 2.0),
    "a=tag(log,interval(1e-5,1e-2))": Interval(1e-5, 1e-2, log=True),
    "a=int(interval(1,8))": Interval(1, 8, integer=True),
    "a=tag(int,log,interval(1,8))": Interval(1, 8, log=True, integer=True),
    "a=range(6,13,2)": Steps((6, 8, 10, 12)),
    "a=range(0,0.3,0.1)": Steps((0, 0.1, 0.2)),
    "a=x,y": Choices(("x", "y")),
    "a=choice(x,[1,2],null_,true)": Choices(("x", "[1,2]", "null_", "True")),
    "a=shuffle(range(1,4))": Steps((1, 2, 3)),
    "a=shuffle(choice(x,y,z))": Choices(("x", "y", "z")),
}


@pytest.mark.parametrize("word", READ)
def test_sweep_of_hydra_is_read(word: str) -> None:
    space, fixed = read_space(OverridesParser.create().parse_overrides([word, "b=3"]))
    assert fixed == {"b": "b=3"}
    found, expected = space["a"], READ[word]
    if isinstance(found, Steps) and isinstance(expected, Steps):
        assert found.values == pytest.approx(expected.values)
    else:
        assert found == expected


def test_later_word_takes_the_place_of_an_earlier_one() -> None:
    words = ["a=interval(1,2)", "b=interval(1,2)", "a=5", "b=interval(3,4)"]
    space, fixed = read_space(OverridesParser.create().parse_overrides(words))
    assert space == {"b": Interval(3.0, 4.0)} and fixed == {"a": "a=5"}


@given(st.floats(1e-12, 1e12), st.floats(1.0001, 1e6), st.floats(0, 1))
def test_typed_value_is_near_and_within_the_interval(low: float, ratio: float, at: float) -> None:
    interval = Interval(low, low * ratio)
    value = min(low + at * (interval.high - low), interval.high)
    typed = OverridesParser.create().parse_override(f"a={interval.text(value)}").value()
    assert isinstance(typed, float) and low <= typed <= interval.high
    assert math.isclose(typed, value, rel_tol=1e-5)


def test_checked_points_have_every_choice_and_both_ends() -> None:
    space = {"a": Interval(1.0, 2.0), "b": Choices(("x", "y", "z")), "c": Steps((1, 2))}
    points = list(points_to_check(space))
    assert len(points) == 1 + 1 + 2 + 1
    for key, expected in {"a": {"1.0", "2.0"}, "b": {"x", "y", "z"}, "c": {"1", "2"}}.items():
        assert {point[key] for point in points} == expected


def test_grid_is_the_product() -> None:
    space = {"b": Choices(("x", "y")), "c": Steps((1, 2, 3))}
    points = [tuple(grid_point(space, number).values()) for number in range(6)]
    assert points == list(itertools.product(("x", "y"), ("1", "2", "3")))
