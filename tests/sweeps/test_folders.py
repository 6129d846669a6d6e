"""Folders of a sweep and of its runs."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vision.config import ConfigError
from vision.sweeps.folders import run_folders, sweep_folder, sweep_run_name

VALUES = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.text(max_size=300)
)


def test_run_name_is_the_same_whatever_the_order() -> None:
    name = sweep_run_name({"seed": 0, "optimizer.learning_rate": 1e-3})
    assert name == sweep_run_name({"optimizer.learning_rate": 0.0010, "seed": 0})
    assert name == "optimizer.learning_rate-0.001+seed-0"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"seed": 3}, {"seed": "3"}),
        ({"a": "1+b-2"}, {"a": 1, "b": 2}),
        ({"a": 1e20}, {"a": 1e-20}),
        ({"a": [1, 2]}, {"a": [12]}),
        ({"a": ""}, {"a": None}),
    ],
)
def test_run_names_of_different_values_differ(first: object, second: object) -> None:
    assert sweep_run_name(first) != sweep_run_name(second)  # type: ignore[arg-type]


@given(st.lists(VALUES | st.lists(VALUES, max_size=3), min_size=2, max_size=2))
def test_run_name_can_be_typed_and_differs_for_different_values(pair: list[object]) -> None:
    first, second = (sweep_run_name({"augment/x": value, "seed": 0}) for value in pair)
    assert (first == second) == (json.dumps(pair[0]) == json.dumps(pair[1]))
    assert len(first) <= 150 and re.fullmatch(r"[\w.+-]+", first, flags=re.ASCII)


def test_runs_in_folders_with_equals_signs_are_found(tmp_path: Path) -> None:
    points = [{"seed": 0, "optimizer.learning_rate": 0.001}, {"seed": 1, "ema": None}]
    older = tmp_path / "optimizer.learning_rate=0.001,seed=0"
    older.mkdir()
    (older / "status.json").write_text('{"status": "preempted", "step": 3}')
    assert run_folders(tmp_path, points) == [older, tmp_path / "ema-null+seed-1"]


def test_equal_points_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"two runs .* are the same: .*seed-1"):
        run_folders(tmp_path, [{"seed": 1}, {"seed": 2}, {"seed": 1}])


def test_automatic_name_follows_from_the_settings_with_one_value(tmp_path: Path) -> None:
    choices = {"model": "vit_mini", "data": "shapes"}
    folder = sweep_folder(tmp_path, "auto", {"model": "swin_mini"}, {"batch_size": 8}, choices)
    assert folder.parent == tmp_path and folder.name.startswith("sweep-shapes-")
    again = sweep_folder(tmp_path, "auto", {"model": "vit_tiny"}, {"batch_size": 8}, choices)
    other = sweep_folder(tmp_path, "auto", {"model": "vit_tiny"}, {"batch_size": 9}, choices)
    assert folder == again != other


def test_name_of_a_single_run_or_with_several_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"status": "finished", "step": 3}')
    with pytest.raises(ConfigError, match="is a single run"):
        sweep_folder(tmp_path, "run", {"seed": 0}, {}, {})
    with pytest.raises(ConfigError, match="the name is the sweep's"):
        sweep_folder(tmp_path, "a", {"name": "a"}, {}, {})
