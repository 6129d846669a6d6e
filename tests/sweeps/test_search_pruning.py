"""Pruning bounds against NumPy's percentiles and halving worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_search import config

from vision.config import ConfigError, parse
from vision.sweeps.search_pruning import pruning_bounds
from vision.training.configs import PruneConfig

VALUES = st.lists(st.floats(-10, 10), min_size=3, max_size=12)


@given(VALUES, st.sampled_from([10.0, 25.0, 50.0, 80.0]))
def test_bound_is_the_percentile_from_the_best(values: list[float], percentile: float) -> None:
    curves = [[(0.5, value), (1.0, value + 1)] for value in values]
    settings = config(pruner="percentile", percentile=percentile, prune_after=3)
    ((part, lowest),) = pruning_bounds(settings, curves, [], "minimize")
    ((_, highest),) = pruning_bounds(settings, curves, [], "maximize")
    assert part == 0.5  # a run that has done everything is not pruned
    assert lowest == pytest.approx(np.percentile(values, percentile))
    assert highest == pytest.approx(np.percentile(values, 100 - percentile))


def test_median_counts_finished_trials_from_a_part_of_training_on() -> None:
    finished = [[(0.2, v), (0.4, v + 1), (1.0, v + 2)] for v in (1.0, 2.0, 4.0)]
    pruned = [[(0.2, -100.0)]]
    settings = config(pruner="median", prune_after=3, prune_from=0.3)
    assert pruning_bounds(settings, finished, pruned, "maximize") == ((0.4, 3.0),)
    assert pruning_bounds(settings, finished[:2], pruned, "maximize") == ()
    assert pruning_bounds(config(), finished, pruned, "maximize") == ()


def test_trials_with_other_intervals_are_compared_at_the_same_part() -> None:
    finished = [[(0.25, 1.0), (0.5, 2.0), (1.0, 3.0)], [(0.5, 5.0), (1.0, 6.0)]]
    settings = config(pruner="median", prune_after=2, prune_from=0.0)
    assert pruning_bounds(settings, finished, [], "maximize") == ((0.5, 3.5),)


def test_halving_requires_the_best_part_of_all_that_reached_a_rung() -> None:
    finished = [[(0.25, float(v)), (0.5, 10.0 + v), (1.0, 20.0 + v)] for v in range(4)]
    pruned = [[(0.25, float(v))] for v in range(4, 6)]
    settings = config(pruner="halving", halving_factor=2, prune_from=0.25, prune_after=2)
    # Six trials reached 25 %, of which three may continue; four reached 50 %.
    assert pruning_bounds(settings, finished, pruned, "maximize") == ((0.25, 3.0), (0.5, 12.0))
    assert pruning_bounds(settings, finished, pruned, "minimize") == ((0.25, 2.0), (0.5, 11.0))


def test_bound_holds_until_the_next_one() -> None:
    prune = parse(PruneConfig, {"bounds": [[0.25, 1.0], [0.5, 2.0]]})
    assert [prune.bound_at(part) for part in (0.1, 0.25, 0.4, 0.5, 0.9)] == [None, 1, 1, 2, 2]
    with pytest.raises(ConfigError, match=r"bounds"):
        parse(PruneConfig, {"bounds": [[1.5, 1.0]]})
