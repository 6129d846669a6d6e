"""Subsets and splits: nested, seeded, alike in every class."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_settings import data_config

from vision.data.sources.build_source import build_source
from vision.data.sources.subsets import imbalance, nested_subset, split_by_fraction

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=80).map(
    lambda values: np.array(values, dtype=np.int64)
)


@given(LABELS, st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 3))
def test_nested_subset_smaller_fraction_is_contained_in_larger(
    labels: np.ndarray, one: float, other: float, seed: int
) -> None:
    small, large = (nested_subset(labels, f, None, seed) for f in sorted((one, other)))
    assert set(small.tolist()) <= set(large.tolist())
    for label, count in enumerate(np.bincount(labels)):
        assert (labels[small] == label).sum() == (
            max(1, round(min(one, other) * count)) if count else 0
        )


@given(LABELS, st.integers(1, 20), st.integers(1, 20), st.floats(0.1, 1), st.integers(0, 3))
def test_nested_subset_fewer_per_class_are_contained_in_more(
    labels: np.ndarray, one: int, other: int, fraction: float, seed: int
) -> None:
    small, large = (nested_subset(labels, fraction, n, seed) for n in sorted((one, other)))
    assert set(small.tolist()) <= set(large.tolist())
    assert np.bincount(labels[small]).max() <= min(one, other)


@given(LABELS, st.floats(0.05, 0.45), st.floats(0.05, 0.45), st.integers(0, 3))
def test_split_by_fraction_any_labels_is_a_partition_with_the_right_shares(
    labels: np.ndarray, val: float, test: float, seed: int
) -> None:
    labels = np.repeat(labels, 4)  # enough of each class for three parts
    parts = split_by_fraction(labels, {"val": val, "test": test}, seed)
    assert np.array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(len(labels)))
    for label, count in enumerate(np.bincount(labels)):
        if count:
            assert abs((labels[parts["val"]] == label).sum() - val * count) <= 1
            assert (labels[parts["train"]] == label).sum() >= 1


@given(LABELS, st.integers(2, 12), st.integers(0, 3))
def test_split_by_fraction_with_groups_never_divides_one(
    labels: np.ndarray, number: int, seed: int
) -> None:
    labels = np.repeat(labels, 12)
    groups = np.arange(len(labels)) % number
    parts = split_by_fraction(labels, {"val": 0.3}, seed, groups)
    assert not set(groups[parts["val"]]) & set(groups[parts["train"]])
    assert sum(map(len, parts.values())) == len(labels)


def test_split_by_fraction_with_many_groups_comes_near_the_shares() -> None:
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(300), random.integers(1, 8, 300))
    labels = random.integers(0, 5, len(groups))
    parts = split_by_fraction(labels, {"val": 0.2}, 0, groups)
    share = np.bincount(labels[parts["val"]]) / np.bincount(labels)
    assert share == pytest.approx(0.2, abs=0.02)


def test_split_by_fraction_with_one_group_is_refused() -> None:
    with pytest.raises(ValueError, match="in 1 groups cannot be split: none is left for"):
        split_by_fraction(np.zeros(9, dtype=np.int64), {"val": 0.5}, 0, np.zeros(9, dtype=np.int64))


def test_build_source_subset_applies_to_train_only() -> None:
    config = data_config("shapes", train_samples=80, val_samples=16, samples_per_class=3)
    train = build_source(config, "train")
    assert np.bincount(train.labels).tolist() == [3] * 8
    assert len(build_source(config, "val")) == 16
    whole = build_source(data_config("shapes", train_samples=80), "train")
    where = [int(train.name(i).rpartition(":")[2]) for i in range(len(train))]
    assert all(np.array_equal(train.read(i), whole.read(j)) for i, j in enumerate(where))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((100, 20), None),
        ((100, 9), "11 : 1 .*'a' has 100.*'b' 9.*sampling=balanced.*class_weights.*adjustment"),
        ((5, 0), "1 of 2 classes .* 'b'"),
    ],
)
def test_imbalance_beyond_five_to_one_warns(counts: tuple[int, int], message: str | None) -> None:
    warning = imbalance(np.repeat([0, 1], counts), ("a", "b"))
    if message is None:
        assert warning is None
    else:
        assert warning is not None
        assert re.search(message, warning)
