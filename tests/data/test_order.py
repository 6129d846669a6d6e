"""Orders, shares and states, for any sizes."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vision.data.order import (
    BatchOrder,
    BatchRequest,
    epoch_length,
    epoch_order,
    evaluation_requests,
    training_requests,
)

Draw = tuple[int, int, int]
"""epoch, index, occurrence."""


def draws(requests: list[BatchRequest]) -> list[Draw]:
    return [
        (request.epoch, index, use)
        for request in requests
        for index, use in zip(request.indices.tolist(), request.occurrences.tolist(), strict=True)
    ]


@st.composite
def plans(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, Any]]:
    classes, samples = draw(st.integers(1, 5)), draw(st.integers(1, 80))
    ranks, accumulation = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    plan = {
        "seed": draw(st.integers(0, 2**40)),
        "batch_size": ranks * accumulation * draw(st.integers(1, 4)),
        "sampling": draw(st.sampled_from(["uniform", "balanced"])),
        "repeats": draw(st.integers(1, 4)),
        "tail": draw(st.sampled_from(["drop", "pad"])),
        "ranks": ranks,
        "accumulation": accumulation,
    }
    if plan["batch_size"] > samples:
        plan["tail"] = "pad"
    return np.random.default_rng(samples).integers(0, classes, samples), plan


def of_rank(labels: np.ndarray, plan: dict[str, Any], rank: int, *state: int) -> list[BatchRequest]:
    return list(training_requests(labels, BatchOrder(**plan, rank=rank), *state))


@settings(max_examples=150, deadline=None)
@given(case=plans(), epochs=st.integers(1, 3), stop=st.floats(0, 1))
def test_resumed_training_gives_exactly_the_remaining_samples(
    case: tuple[np.ndarray, dict[str, Any]], epochs: int, stop: float
) -> None:
    labels, plan = case
    end = epochs * epoch_length(len(labels), BatchOrder(**plan))
    middle = round(stop * end / plan["batch_size"]) * plan["batch_size"]
    for rank in range(plan["ranks"]):
        whole = of_rank(labels, plan, rank, 0, end)
        first, rest = (
            of_rank(labels, plan, rank, 0, middle),
            of_rank(labels, plan, rank, middle, end),
        )
        assert draws(first) + draws(rest) == draws(whole)
        assert len(first) + len(rest) == len(whole)


@settings(max_examples=150, deadline=None)
@given(case=plans())
def test_global_batch_is_the_same_for_any_number_of_processes_and_parts(
    case: tuple[np.ndarray, dict[str, Any]],
) -> None:
    labels, plan = case
    end = 2 * epoch_length(len(labels), BatchOrder(**plan))
    alone = of_rank(labels, {**plan, "ranks": 1, "accumulation": 1}, 0, 0, end)
    shares = [of_rank(labels, plan, rank, 0, end) for rank in range(plan["ranks"])]
    parts = plan["accumulation"]
    for step, request in enumerate(alone):
        shared = [share[step * parts : (step + 1) * parts] for share in shares]
        assert sorted(draws(list(itertools.chain(*shared)))) == sorted(draws([request]))
        sizes = {len(part.indices) for share in shared for part in share}
        assert sizes == {plan["batch_size"] // plan["ranks"] // parts}


@settings(max_examples=100, deadline=None)
@given(case=plans())
def test_every_use_of_a_image_in_an_epoch_is_numbered_differently(
    case: tuple[np.ndarray, dict[str, Any]],
) -> None:
    labels, plan = case
    plan = {**plan, "ranks": 1, "accumulation": 1}
    used = draws(of_rank(labels, plan, 0, 0, 2 * epoch_length(len(labels), BatchOrder(**plan))))
    assert len(set(used)) == len(used)


@settings(max_examples=100, deadline=None)
@given(samples=st.integers(1, 60), batch=st.integers(1, 20), tail=st.sampled_from(["drop", "pad"]))
def test_uniform_epoch_has_every_image_once_up_to_the_tail(
    samples: int, batch: int, tail: str
) -> None:
    plan = BatchOrder(seed=1, batch_size=batch, tail=tail)  # type: ignore[arg-type]
    labels = np.zeros(samples, np.int64)
    if tail == "drop" and batch > samples:
        with pytest.raises(ValueError, match=r"fewer than one global batch.*loader.tail=pad"):
            epoch_length(samples, plan)
        return
    length = epoch_length(samples, plan)
    indices = [index for _, index, _ in draws(list(training_requests(labels, plan, 0, length)))]
    counts = np.bincount(indices, minlength=samples)
    assert length % batch == 0
    if tail == "drop":
        assert samples - batch < length <= samples
        assert counts.max() == 1
    else:
        assert samples <= length < samples + batch
        assert counts.min() >= 1
        assert counts.max() - counts.min() <= 1


def test_order_differs_by_epoch_and_seed_and_is_repeatable() -> None:
    labels = np.zeros(100, np.int64)
    orders = [
        tuple(epoch_order(labels, BatchOrder(seed=seed, batch_size=10), epoch)[0].tolist())
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]
    ]
    assert len(set(orders)) == 4
    assert orders[0] == orders[4]
    assert sorted(orders[0]) == list(range(100))


def test_dropped_images_change_from_epoch_to_epoch() -> None:
    plan = BatchOrder(seed=0, batch_size=8)
    seen = draws(list(training_requests(np.zeros(15, np.int64), plan, 0, 8 * 20)))
    assert {index for _, index, _ in seen} == set(range(15))


def test_balanced_sampling_gives_classes_equal_shares_and_uses_every_image() -> None:
    labels = np.repeat([0, 1, 2], [900, 90, 10])
    indices, uses = epoch_order(
        labels, BatchOrder(seed=0, batch_size=10, sampling="balanced"), epoch=0
    )
    assert len(indices) == 1000
    counts = np.bincount(labels[indices])
    assert counts.max() - counts.min() <= 1
    for label in (1, 2):
        times = np.bincount(indices, minlength=1000)[labels == label]
        assert times.max() - times.min() <= 1
    assert uses[labels[indices] == 0].max() == 0
    # Well mixed: no long runs of one class.
    assert max(len(list(run)) for _, run in itertools.groupby(labels[indices])) < 15


@pytest.mark.parametrize("ranks", [1, 3])
def test_repeated_augmentation_gives_copies_to_different_processes(ranks: int) -> None:
    plan = {"seed": 0, "batch_size": 12, "repeats": 3, "ranks": ranks}
    labels = np.zeros(120, np.int64)
    shares = [draws(of_rank(labels, plan, rank, 0, 12)) for rank in range(ranks)]
    batch = list(itertools.chain(*shares))
    images = {index for _, index, _ in batch}
    assert len(images) == 4
    assert {(index, use) for _, index, use in batch} == set(itertools.product(images, range(3)))
    if ranks == 3:
        for share in shares:
            assert {index for _, index, _ in share} == images
    epoch = draws(of_rank(labels, {**plan, "ranks": 1}, 0, 0, 120))
    assert len({index for _, index, _ in epoch}) == 40


@settings(max_examples=200, deadline=None)
@given(samples=st.integers(1, 100), batch=st.integers(1, 40), ranks=st.integers(1, 7))
def test_evaluation_counts_every_image_once(samples: int, batch: int, ranks: int) -> None:
    shares = [list(evaluation_requests(samples, batch, rank, ranks)) for rank in range(ranks)]
    indices = [i for share in shares for request in share for i in request.indices.tolist()]
    assert sorted(i for i in indices if i >= 0) == list(range(samples))
    assert indices.count(-1) < ranks
    shapes = [[len(request.indices) for request in share] for share in shares]
    assert all(shape == shapes[0] for shape in shapes)
    assert max(shapes[0]) <= batch


def test_state_of_another_batch_size_is_refused() -> None:
    plan = BatchOrder(seed=0, batch_size=8)
    with pytest.raises(ValueError, match=r"start: 12 images consumed.*batch of 8"):
        next(training_requests(np.zeros(100, np.int64), plan, 12))


def test_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch of 10 images.*4 processes.*multiple of 4"):
        BatchOrder(seed=0, batch_size=10, ranks=4)
