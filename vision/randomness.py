"""Randomness as a function: every draw follows from the seed, what it is for, and a sample or step.

No generator has a state that must be saved. The global state of Python, NumPy or torch is touched
by a training step alone (dropout knows no other generator), which seeds it first.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

Stream = Literal["augment", "order", "mixing", "replacement"]
_STREAMS: dict[Stream, int] = {"augment": 0, "order": 1, "mixing": 2, "replacement": 3}


def generator(
    seed: int, stream: Stream, *, epoch: int = 0, index: int = 0, occurrence: int = 0
) -> np.random.Generator:
    """Random numbers for one purpose at one place.

    Philox is a cipher of a counter. The arguments are its key and the upper words of its counter,
    so that no two places share a stretch of random numbers.
    """
    key = _Key(np.array([seed, _STREAMS[stream]], np.uint64))
    counter = np.array([0, occurrence, epoch, index], np.uint64)
    # numpy's types know one class of seeds only; it takes any ISeedSequence.
    return np.random.Generator(np.random.Philox(key, counter=counter))  # type: ignore[arg-type]


def step_seed(seed: int, step: int, rank: int, part: int) -> int:
    """The seed of torch's global generator for one part of a step in one process."""
    digest = hashlib.blake2b(repr((seed, step, rank, part)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class _Key(ISeedSequence):
    """Philox's key as it is. Given as `key=`, numpy would first draw a seed from the system, which
    takes four times as long as all the rest.
    """

    def __init__(self, key: NDArray[np.uint64]) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> Any:
        """The two words that Philox asks for."""
        return self.key


@contextmanager
def torch_seeded(source: np.random.Generator) -> Iterator[None]:
    """Within, torch's global generator follows `source`; afterwards it is as it was before.

    For transforms of torchvision, which know no other generator. (`torch.random.fork_rng` does the
    same with every device, which costs as much as the transform.)
    """
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(int(source.integers(1 << 62)))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
