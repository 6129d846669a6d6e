"""Names of the folders of a sweep's runs."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vision.cli.sweep_checks import point_folder, point_name

VALUES = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.text(max_size=300)
)


def test_run_name_is_the_same_whatever_the_order() -> None:
    name = point_name({"seed": 0, "optimizer.learning_rate": 1e-3})
    assert name == point_name({"optimizer.learning_rate": 0.0010, "seed": 0})
    assert name == "optimizer.learning_rate-0.001__seed-0"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"seed": 3}, {"seed": "3"}),
        ({"a": "1__b-2"}, {"a": 1, "b": 2}),
        ({"a": 1e20}, {"a": 1e-20}),
        ({"a": [1, 2]}, {"a": [12]}),
        ({"a": ""}, {"a": None}),
    ],
)
def test_run_names_of_different_values_differ(first: object, second: object) -> None:
    assert point_name(first) != point_name(second)  # type: ignore[arg-type]


@given(st.lists(VALUES | st.lists(VALUES, max_size=3), min_size=2, max_size=2))
def test_run_name_can_be_typed_and_differs_for_different_values(pair: list[object]) -> None:
    first, second = (point_name({"augment/x": value, "seed": 0}) for value in pair)
    assert (first == second) == (json.dumps(pair[0]) == json.dumps(pair[1]))
    assert len(first) <= 150 and re.fullmatch(r"[\w.+-]+", first, flags=re.ASCII)


def test_runs_in_folders_with_equals_signs_are_found(tmp_path: Path) -> None:
    former = "optimizer.learning_rate=0.001,seed=0"
    (tmp_path / former).mkdir()
    assert point_folder(tmp_path, {"seed": 0, "optimizer.learning_rate": 0.001}) == former
    assert point_folder(tmp_path, {"seed": 1, "ema": None}) == "ema-null__seed-1"
