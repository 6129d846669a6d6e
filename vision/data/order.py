"""The images of each batch, as a function of (seed, epoch, position).

A global batch has the same images for any number of processes and of accumulated parts: process r
of R takes every R-th image from the r-th on. With virtual ranks each of them is a process in this
respect: batches are then the same for any number of processes. Copies of an image under repeated
augmentation are neighbours, so that they go to different processes, as in the original.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vision.config import ConfigError
from vision.data.sources.source import Labels
from vision.randomness import generator

Indices = NDArray[np.int64]


class BatchRequest(NamedTuple):
    """Everything that a worker needs to make one batch."""

    epoch: int
    indices: Indices
    """Images of the batch; −1: a padding row."""
    occurrences: Indices
    """Number of earlier uses of each image in this epoch; each use is augmented differently."""


@dataclass(frozen=True)
class BatchOrder:
    """Order of the images of an epoch, and their division into batches."""

    seed: int
    batch_size: int
    """Images per optimizer step, over all processes."""
    sampling: Literal["uniform", "balanced"] = "uniform"
    repeats: int = 1
    tail: Literal["drop", "pad"] = "drop"
    rank: int = 0
    ranks: int = 1
    accumulation: int = 1
    """Number of batches into which each process divides its share of a global batch."""
    virtual: bool = False
    """Whether each of those batches is the share of a rank of its own (a virtual rank)."""

    def __post_init__(self) -> None:
        if self.batch_size % (self.ranks * self.accumulation):
            raise ConfigError(
                f"a global batch of {self.batch_size} images cannot be divided equally among "
                f"{self.ranks} processes in {self.accumulation} parts each; choose a multiple of "
                f"{self.ranks * self.accumulation}."
            )


def epoch_length(samples: int, plan: BatchOrder) -> int:
    """Return the number of images consumed in an epoch: a multiple of the global batch."""
    batches, rest = divmod(samples, plan.batch_size)
    if rest and plan.tail == "pad":
        batches += 1
    if not batches:
        largest = 2 ** (samples.bit_length() - 1)
        raise ConfigError(
            f"the training set has {samples} images, fewer than one global batch of "
            f"{plan.batch_size}; choose batch_size={largest} or smaller, or "
            "fill it with further copies of images: loader.tail=pad."
        )
    return batches * plan.batch_size


def training_requests(
    labels: Labels, plan: BatchOrder, start: int = 0, stop: int | None = None
) -> Iterator[BatchRequest]:
    """Yield this process's batches, epoch after epoch, from `start` to `stop` or without end.

    Both are numbers of images consumed by all processes since training began: the whole state.
    """
    length = epoch_length(len(labels), plan)
    for name, state in (("start", start), ("stop", stop)):
        if state is not None and (state % plan.batch_size or state < 0):
            raise ConfigError(
                f"{name}: {state} images consumed is not a multiple of the global batch of "
                f"{plan.batch_size}; was the state saved with another batch size?"
            )
    epoch, position = divmod(start, length)
    while stop is None or epoch * length + position < stop:
        indices, occurrences = epoch_order(labels, plan, epoch)
        left = length if stop is None else min(length, stop - epoch * length)
        for first in range(position, left, plan.batch_size):
            for part in _parts(plan):
                # Past the end, an epoch's first images come again; such uses are numbered apart.
                rounds, places = np.divmod(first + part, len(labels))
                uses = occurrences[places] + (rounds << 32)
                yield BatchRequest(epoch, indices[places], uses)
        epoch, position = epoch + 1, 0


def _parts(plan: BatchOrder) -> list[Indices]:
    """The places of this process's batches in a global batch."""
    places = np.arange(plan.batch_size)
    if not plan.virtual:
        return np.split(places[plan.rank :: plan.ranks], plan.accumulation)
    ranks = plan.ranks * plan.accumulation
    own = range(plan.rank * plan.accumulation, (plan.rank + 1) * plan.accumulation)
    return [places[rank::ranks] for rank in own]


def epoch_order(labels: Labels, plan: BatchOrder, epoch: int) -> tuple[Indices, Indices]:
    """Return the indices and occurrences of an epoch: as many as there are images."""
    random = generator(plan.seed, "order", epoch=epoch)
    distinct = -(-len(labels) // plan.repeats)
    if plan.sampling == "uniform":
        indices = random.permutation(len(labels))[:distinct]
        occurrences = np.zeros_like(indices)
    else:
        indices, occurrences = _balanced(labels, distinct, random)
    copies = np.tile(np.arange(plan.repeats), distinct)
    indices = np.repeat(indices, plan.repeats)
    occurrences = np.repeat(occurrences, plan.repeats) * plan.repeats + copies
    return indices[: len(labels)], occurrences[: len(labels)]


def check_sampling(labels: Labels, sampling: Literal["uniform", "balanced"]) -> None:
    """Refuse to draw images with several labels class by class."""
    if sampling == "balanced" and labels.ndim == 2:
        raise ConfigError(
            "data.sampling=balanced: images with several labels cannot be drawn class by class; "
            "use data.sampling=uniform and task.pos_weight=balanced."
        )


def _balanced(labels: Labels, draws: int, random: np.random.Generator) -> tuple[Indices, Indices]:
    """Draw every class, and every image of a class, equally often up to one draw."""
    check_sampling(labels, "balanced")
    by_class = np.argsort(labels, kind="stable")
    _, starts = np.unique(labels[by_class], return_index=True)
    members = np.split(by_class, starts[1:])
    quotas = np.full(len(members), draws // len(members))
    quotas[random.permutation(len(members))[: draws % len(members)]] += 1
    indices, occurrences = [], []
    for images, quota in zip(members, quotas, strict=True):
        rounds = -(-int(quota) // len(images))
        drawn = [random.permutation(images) for _ in range(rounds)]
        indices.append(np.concatenate([*drawn, images[:0]])[:quota])
        occurrences.append(np.repeat(np.arange(rounds), len(images))[:quota])
    shuffle = random.permutation(draws)
    return np.concatenate(indices)[shuffle], np.concatenate(occurrences)[shuffle]


def evaluation_requests(
    samples: int, batch_size: int, rank: int = 0, ranks: int = 1, shares: int = 1
) -> Iterator[BatchRequest]:
    """Yield every image once, in order, over all processes.

    All processes get the same number of batches of equal sizes, as collective operations require.
    If the number of images is not a multiple of the number of processes, some get a padding row.
    With several `shares` (virtual ranks) per process, a batch of each comes in turn: the same
    batches for any number of processes with the same number of shares together.
    """
    all_shares = ranks * shares
    longest = -(-samples // all_shares)
    for first in range(0, longest, batch_size):
        rows = np.arange(first, min(first + batch_size, longest))
        for number in range(rank * shares, (rank + 1) * shares):
            places = rows * all_shares + number
            part = np.where(places < samples, places, -1)
            yield BatchRequest(0, part, np.zeros_like(part))
