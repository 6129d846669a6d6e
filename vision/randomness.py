"""Random numbers as a function of the seed, their purpose, and a sample or a step.

No generator has a state that must be saved, so that batches do not depend on the number of workers
or on where a run was resumed. The global generators of Python, NumPy and torch are used by training
steps alone (dropout takes no other generator), which seed them first.

Splits, subsets and the embedded images belong to a data set, not to a run: they are drawn by
`numpy.random.default_rng` from `data.seed` and the class or image, in `vision/data/sources/`.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

Purpose = Literal[
    "augment",
    "order",
    "mixing",
    "replacement",
    "whitening",
    "flip",
    "mask",
    "evaluated_mask",
    "decoder",
]
"""In the order of their numbers in the key: a new one comes last."""
_PURPOSES: dict[Purpose, int] = {name: number for number, name in enumerate(get_args(Purpose))}


def generator(
    seed: int, purpose: Purpose, *, epoch: int = 0, index: int = 0, occurrence: int = 0
) -> np.random.Generator:
    """Return the generator for one purpose and one place in training.

    The place is (epoch, index of the image, how often it occurred before in this epoch) for images,
    and (step, rank, part of the batch) for batches. Philox encrypts a counter: `seed` and `purpose`
    are its key, the place is the upper words of the counter. So the random numbers of different
    places never overlap.
    """
    key = _PhiloxKey(np.array([seed, _PURPOSES[purpose]], np.uint64))
    counter = np.array([0, occurrence, epoch, index], np.uint64)
    # numpy's types know one class of seeds only; it takes any ISeedSequence.
    return np.random.Generator(np.random.Philox(key, counter=counter))  # type: ignore[arg-type]


def step_seed(seed: int, step: int, rank: int, part: int) -> int:
    """Return the seed of torch's global generator for one part of a step in one process."""
    digest = hashlib.blake2b(repr((seed, step, rank, part)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class _PhiloxKey(ISeedSequence):
    """A key for Philox. With `Philox(key=…)` numpy would also draw a seed from the operating
    system, which takes four times as long as all the rest.
    """

    def __init__(self, key: NDArray[np.uint64]) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> Any:
        """Return the two words that Philox asks for."""
        return self.key


@contextmanager
def torch_seeded(source: np.random.Generator) -> Iterator[None]:
    """Seed torch's global generator from `source`, and restore its state afterwards.

    For transforms of torchvision, which take no other generator. (`torch.random.fork_rng` does the
    same for every device, which takes as long as the transform.)
    """
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(int(source.integers(1 << 62)))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
