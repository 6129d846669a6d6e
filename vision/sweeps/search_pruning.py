"""Pruning rules: bounds for the trials of a batch, from the results of earlier batches alone.

A bound belongs to a part of training (step / steps). A trial stops at an evaluation if its best
value so far is worse than the last bound up to there. So a trial depends on nothing that runs at
the same time, and its end can be recomputed.
"""

import math
from collections.abc import Sequence

from vision.sweeps.configs import Direction, SearchConfig

Curve = Sequence[tuple[float, float]]
"""Best value so far after each evaluation, with the part of training done, in order."""
Bounds = tuple[tuple[float, float], ...]


def pruning_bounds(
    config: SearchConfig, finished: Sequence[Curve], pruned: Sequence[Curve], direction: Direction
) -> Bounds:
    """The bounds for the next batch; empty if nothing is to be pruned."""
    if config.pruner == "none" or len(finished) < config.prune_after:
        return ()
    if config.pruner == "halving":
        rungs = _rungs(config.prune_from, config.halving_factor)
        reached = [_values_at([*finished, *pruned], rung, ended=False) for rung in rungs]
        ranks = [len(values) // config.halving_factor for values in reached]
        return tuple(
            (rung, _ranked(values, direction)[rank - 1])
            for rung, values, rank in zip(rungs, reached, ranks, strict=True)
            if rank
        )
    percentile = 50.0 if config.pruner == "median" else config.percentile
    parts = sorted({part for curve in finished for part, _ in curve})
    at_parts = {p: _values_at(finished, p) for p in parts if config.prune_from <= p < 1}
    return tuple(
        (part, _percentile(_ranked(values, direction), percentile))
        for part, values in at_parts.items()
        if len(values) >= config.prune_after
    )


def _rungs(first: float, factor: int) -> list[float]:
    rungs = []
    while first < 1:
        rungs.append(first)
        first *= factor
    return rungs


def _values_at(curves: Sequence[Curve], part: float, ended: bool = True) -> list[float]:
    """Best values up to a part of training, of the curves that have one. Unless `ended`, at the
    first evaluation from there on, which a pruned trial may not have reached.
    """
    found = []
    for curve in curves:
        up_to = [value for at, value in curve if at <= part]
        from_there = [value for at, value in curve if at >= part]
        values = up_to[-1:] if ended else from_there[:1]
        found += [value for value in values if math.isfinite(value)]
    return found


def _ranked(values: Sequence[float], direction: Direction) -> list[float]:
    """Values from best to worst."""
    return sorted(values, reverse=direction == "maximize")


def _percentile(ranked: Sequence[float], percentile: float) -> float:
    """The value at a percentile from the best, interpolated between two ranks."""
    place = (len(ranked) - 1) * percentile / 100
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)
