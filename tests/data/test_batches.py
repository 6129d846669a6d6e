"""Batches for any number of workers; resuming; what happens to bad files and dying workers."""

import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from augment_settings import augment, loader_config, preprocess
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vision.data.batches import (
    Batch,
    Loader,
    Pipeline,
    evaluation_batches,
    training_batches,
)
from vision.data.configs import AugmentConfig
from vision.data.images.augment import training_pixels
from vision.data.images.decode import UnreadableImageError, open_image
from vision.data.order import BatchOrder, epoch_length
from vision.data.preprocess import evaluation_pixels
from vision.data.sources.source import Source, StoredImage
from vision.data.workers import resolve_workers
from vision.randomness import generator


class Memory:
    """Images of which each tells its own number; some of them unreadable."""

    def __init__(self, samples: int, bad: tuple[int, ...] = (), encode: bool = False) -> None:
        self.classes = ("cat", "dog", "bird")
        self.channels = 3
        self.labels = np.arange(samples, dtype=np.int64) % 3
        self.bad = bad
        self.encode = encode

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"folder/{index}.png"

    def read(self, index: int) -> StoredImage:
        if index in self.bad:
            return b"" if index % 2 else b"not an image"
        pixels = np.random.default_rng(index).integers(0, 256, (12, 10, 3), dtype=np.uint8)
        pixels[0] = index
        if not self.encode:
            return pixels
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()


class Missing(Memory):
    """Raises what reading a file raises."""

    def read(self, index: int) -> StoredImage:
        if index in self.bad:
            return Path(f"/no/such/folder/{index}.png").read_bytes()
        return super().read(index)


def make_loader(
    source: Source,
    workers: int = 0,
    augmentation: str | AugmentConfig | None = "light",
    on_error: str = "raise",
    max_error_share: float = 1.0,
    seed: int = 7,
    **config: Any,
) -> Loader:
    pipeline = Pipeline(
        source,
        preprocess(8),
        augment(augmentation) if isinstance(augmentation, str) else augmentation,
        seed=seed,
        max_pixels=10_000,
        on_error=on_error,  # type: ignore[arg-type]
    )
    return Loader(pipeline, loader_config(**config), workers, max_error_share)


def content(batches: Iterator[Batch]) -> list[tuple[Any, ...]]:
    return [(b.images.tolist(), b.labels.tolist(), b.ids.tolist(), b.epoch) for b in batches]


def test_batch_holds_what_the_transforms_make_of_each_sample() -> None:
    source = Memory(20)
    loader = make_loader(source)
    batch = next(training_batches(loader, BatchOrder(seed=3, batch_size=6), start=0))
    assert batch.images.shape == (6, 3, 8, 8)
    assert batch.images.dtype == torch.uint8
    assert batch.labels.tolist() == [source.labels[i] for i in batch.ids]
    for image, index in zip(batch.images, batch.ids.tolist(), strict=True):
        random = generator(7, "augment", epoch=0, index=index)
        opened = open_image(source.read(index), 3, "a")
        expected = training_pixels(opened, preprocess(8), augment("light"), random)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_make_the_same_batches_as_none_over_two_epochs(start_method: str) -> None:
    plan = BatchOrder(seed=3, batch_size=4, repeats=2)
    source = Memory(14, encode=True)
    alone = content(training_batches(make_loader(source), plan, 0, 24))
    workers = 1 if start_method == "spawn" else 2  # a spawned one takes seconds to start
    loader = make_loader(source, workers, start_method=start_method)
    assert content(training_batches(loader, plan, 0, 24)) == alone
    assert [epoch for *_, epoch in alone] == [0, 0, 0, 1, 1, 1]
    # The same workers go on, from another state.
    before = {worker.pid for worker in loader._loader._iterator._workers}  # type: ignore[union-attr]
    assert content(training_batches(loader, plan, 8, 24)) == alone[2:]
    assert {w.pid for w in loader._loader._iterator._workers} == before  # type: ignore[union-attr]


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(1, 25),
    ranks=st.integers(1, 3),
    share=st.integers(1, 3),
    tail=st.sampled_from(["drop", "pad"]),
    stop=st.floats(0, 1),
)
def test_resumed_epoch_gives_exactly_the_remaining_batches(
    samples: int, ranks: int, share: int, tail: str, stop: float
) -> None:
    batch = ranks * share
    tail = "pad" if batch > samples else tail
    plans = [
        BatchOrder(seed=1, batch_size=batch, tail=tail, rank=rank, ranks=ranks)  # type: ignore[arg-type]
        for rank in range(ranks)
    ]
    length = epoch_length(samples, plans[0])
    middle = round(stop * length / batch) * batch
    for plan in plans:
        whole = content(training_batches(make_loader(Memory(samples)), plan, 0, length))
        rest = content(training_batches(make_loader(Memory(samples)), plan, middle, length))
        assert rest == whole[middle // batch :]


@settings(max_examples=4, deadline=None)
@given(
    samples=st.integers(4, 30),
    batch=st.integers(1, 4),
    stopped=st.integers(0, 9),
    workers=st.permutations([0, 1, 2]),
)
def test_broken_off_epoch_resumes_with_other_number_of_workers(
    samples: int, batch: int, stopped: int, workers: list[int]
) -> None:
    plan, source = BatchOrder(seed=5, batch_size=batch, tail="pad"), Memory(samples)
    end = 10 * batch
    whole = content(training_batches(make_loader(source, workers[0]), plan, 0, end))
    before = training_batches(make_loader(source, workers[1]), plan)
    first = content(itertools.islice(before, stopped))
    after = make_loader(source, workers[2])
    assert first + content(training_batches(after, plan, stopped * batch, end)) == whole


ALTERNATE = augment("none", flip="alternate")


def flips(source: Source, batches: Iterator[Batch]) -> dict[tuple[int, int], list[bool]]:
    """Whether each use of (epoch, image) was mirrored; ALTERNATE changes nothing else."""
    found: dict[tuple[int, int], list[bool]] = {}
    for batch in batches:
        for image, index in zip(batch.images, batch.ids.tolist(), strict=True):
            opened = open_image(source.read(index), 3, "a")
            plain = torch.from_numpy(evaluation_pixels(opened, preprocess(8)).copy())
            view = image.permute(1, 2, 0)
            mirrored = torch.equal(view, plain.flip(1))
            assert mirrored != torch.equal(view, plain)
            found.setdefault((batch.epoch, index), []).append(mirrored)
    return found


def test_alternating_flips_mirror_each_image_in_every_second_epoch() -> None:
    source, plan = Memory(200), BatchOrder(seed=3, batch_size=50)
    found = flips(source, training_batches(make_loader(source, 0, ALTERNATE), plan, 0, 800))
    first = [found[0, index][0] for index in range(200)]
    for epoch in range(4):
        assert [found[epoch, index] for index in range(200)] == [[f ^ (epoch % 2)] for f in first]
    assert 70 < sum(first) < 130
    # The seed of the run decides, not that of the order.
    again = flips(source, training_batches(make_loader(source, 0, ALTERNATE), plan, 0, 200))
    assert [again[0, index][0] for index in range(200)] == first
    other = make_loader(source, 0, ALTERNATE, seed=8)
    others = flips(source, training_batches(other, plan, 0, 200))
    assert 70 < sum(others[0, index][0] != first[index] for index in range(200)) < 130


def test_alternating_flips_mirror_every_second_copy_of_an_image() -> None:
    source = Memory(12)
    plan = BatchOrder(seed=3, batch_size=6, repeats=3)
    found = flips(source, training_batches(make_loader(source, 0, ALTERNATE), plan, 0, 240))
    first = {index: uses[0] ^ (epoch % 2) for (epoch, index), uses in found.items()}
    for (epoch, index), uses in found.items():
        assert uses == [bool((first[index] + epoch + copy) % 2) for copy in range(3)]


def test_alternating_flips_are_those_of_one_process_for_any_ranks_workers_and_after_resume() -> (
    None
):
    source, plan = Memory(12), BatchOrder(seed=3, batch_size=4)
    alone = flips(source, training_batches(make_loader(source, 0, ALTERNATE), plan, 0, 36))
    parts: dict[tuple[int, int], list[bool]] = {}
    for rank in range(2):
        loader = make_loader(source, rank, ALTERNATE)
        share = BatchOrder(seed=3, batch_size=4, rank=rank, ranks=2)
        parts |= flips(source, training_batches(loader, share, 0, 8))
        parts |= flips(source, training_batches(loader, share, 8, 36))
    assert parts == alone


def test_new_run_ends_the_one_before() -> None:
    loader = make_loader(Memory(21))
    plan = BatchOrder(seed=5, batch_size=4)
    old = training_batches(loader, plan)
    next(old)
    next(training_batches(loader, plan))
    with pytest.raises(RuntimeError, match="ended"):
        next(old)


@settings(max_examples=25, deadline=None)
@given(samples=st.integers(1, 30), batch=st.integers(1, 9), ranks=st.integers(1, 4))
def test_evaluation_gives_every_sample_once_for_any_ranks(
    samples: int, batch: int, ranks: int
) -> None:
    source, seen = Memory(samples), []
    for rank in range(ranks):
        loader = make_loader(source, augmentation=None)
        for part in evaluation_batches(loader, batch, rank, ranks):
            for image, label, index in zip(
                part.images, part.labels, part.ids.tolist(), strict=True
            ):
                if index >= 0:
                    seen.append(index)
                    opened = open_image(source.read(index), 3, "a")
                    expected = evaluation_pixels(opened, preprocess(8))
                    assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)
                    assert label == source.labels[index]
    assert sorted(seen) == list(range(samples))


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    loader = make_loader(Memory(12), augmentation="trivial", workers=0)
    content(training_batches(loader, BatchOrder(seed=0, batch_size=4), 0, 24))
    loader = make_loader(Memory(12), workers=1)
    content(training_batches(loader, BatchOrder(seed=0, batch_size=4), 0, 8))
    assert torch.equal(torch.get_rng_state(), before)


# What goes wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_image_raises_with_its_path(workers: int) -> None:
    loader = make_loader(Memory(12, bad=(5,)), workers)
    with pytest.raises(UnreadableImageError, match=r"folder/5.png: the file is empty[\s\S]*skip"):
        content(training_batches(loader, BatchOrder(seed=0, batch_size=4), 0, 12))
    loader = make_loader(Missing(12, bad=(5,)), workers, augmentation=None)
    with pytest.raises(UnreadableImageError, match=r"/no/such/folder/5.png"):
        content(evaluation_batches(loader, 4))


def test_skipped_images_are_replaced_in_training_alike_for_any_workers() -> None:
    plan = BatchOrder(seed=0, batch_size=5)
    results = []
    for workers in (0, 2):
        loader = make_loader(Memory(20, bad=(3, 4, 11)), workers, on_error="skip")
        batches = content(training_batches(loader, plan, 0, 60))
        results.append(batches)
        assert set(loader.failures) == {3, 4, 11}
        assert loader.failures[3].name == "folder/3.png"
        assert "empty" in loader.failures[3].reason
        ids = list(itertools.chain(*(ids for _, _, ids, _ in batches)))
        assert len(ids) == 60
        assert not set(ids) & {3, 4, 11, -1}
        labels = itertools.chain(*(labels for _, labels, _, _ in batches))
        assert list(labels) == [index % 3 for index in ids]
    assert results[0] == results[1]


def test_skipped_images_are_left_out_of_evaluation_and_reported() -> None:
    loader = make_loader(Memory(20, bad=(3, 4)), augmentation=None, on_error="skip")
    batches = list(evaluation_batches(loader, 8))
    ids = [index for batch in batches for index in batch.ids.tolist()]
    assert sorted(index for index in ids if index >= 0) == sorted(set(range(20)) - {3, 4})
    assert [f.sample for batch in batches for f in batch.failures] == [3, 4]
    assert batches[0].images[batches[0].ids == -1].sum() == 0


def test_too_many_unreadable_images_stop_the_run() -> None:
    loader = make_loader(Memory(20, bad=(1, 2, 3)), on_error="skip", max_error_share=0.1)
    plan = BatchOrder(seed=0, batch_size=5)
    with pytest.raises(
        UnreadableImageError, match=r"3 of 20 .*max_error_share = 0.1[\s\S]*folder/"
    ):
        content(training_batches(loader, plan, 0, 40))
    allowed = make_loader(Memory(20, bad=(1, 2, 3)), on_error="skip", max_error_share=0.15)
    assert len(content(training_batches(allowed, plan, 0, 40))) == 8


KILL = """
import os, signal, test_batches as t
class Killed(t.Memory):
    def read(self, index):
        if index == 11:
            os.kill(os.getpid(), signal.SIGKILL)  # as a system without memory does
        return super().read(index)
for _ in t.evaluation_batches(t.make_loader(Killed(12), workers=1, augmentation=None), 4):
    pass
"""


def test_dead_worker_gives_a_clear_error() -> None:
    result = subprocess.run(
        [sys.executable, "-c", KILL],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    assert re.search(r"DeadWorkerError: .*data workers died.*memory.*loader.workers", result.stderr)


def test_mistake_in_a_source_is_not_taken_for_a_bad_file() -> None:
    class Mistaken(Memory):
        def read(self, index: int) -> StoredImage:
            raise KeyError("a mistake")

    loader = make_loader(Mistaken(12), on_error="skip")
    with pytest.raises(KeyError, match="a mistake"):
        content(training_batches(loader, BatchOrder(seed=0, batch_size=4), 0, 12))


def test_workers_auto_follow_the_machine() -> None:
    cores = len(os.sched_getaffinity(0))
    assert resolve_workers(3) == 3
    assert resolve_workers("auto") == max(1, min(16, cores))
    assert resolve_workers("auto", processes=cores) == 1
    assert resolve_workers("auto", processes=cores, on_cpu=True) == 0
