"""A run with virtual ranks, which any number of processes takes to the same bits."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_runs import fork, join, train_forked
from small_runs import RICH, assert_same_run, small_config, status
from started_runs import torchrun, wait_for_step

from vision.config import ConfigError
from vision.data.order import BatchOrder, evaluation_requests, training_requests
from vision.training.elastic import BinaryCounter, sum_over_processes, virtual_ranks_of_each
from vision.training.loop import train
from vision.training.run.distributed import world

VIRTUAL = ["elastic=4", "duration=10steps", "evaluate_every=5steps", "checkpoint.every=4steps"]
FAMILIES = {
    "vit": ("vit_mini", RICH),
    "swin": ("swin_mini", ["augment=deit", "ema=0.9", "model.drop_path=0.2"]),
    "resnet": ("timm", ["augment=deit", "ema=0.9", "data.image_size=32"]),
    "probe": ("vit_mini", ["tune=head", "tune.cache=true", "checkpoint.best=loss"]),
}
STEPS = {
    "bf16": ["precision=bf16", "optimizer.name=muon"],
    "fp16": ["precision=fp16", "optimizer.clip=norm", "optimizer.clip_at=0.1"],
    "agc": ["optimizer.clip=agc", "optimizer.clip_at=0.01", "flip_test=true"],
}


class Term(str):
    """Writes down in which order terms are added."""

    def __iadd__(self, other: str) -> "Term":
        return Term(f"({self}+{other})")


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (4, "((0+1)+(2+3))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
    ],
)
def test_counter_adds_in_the_order_of_a_balanced_tree(terms: int, expected: str) -> None:
    counter, held = BinaryCounter[Term](), 0
    for number in range(terms):
        counter.add(Term(number))
        held = max(held, len(counter._sums))
    assert counter.take() == expected
    assert held <= terms.bit_length()  # log2 + 1
    counter.add(Term("again"))
    assert counter.take() == "again"


def _rows(count: int) -> torch.Tensor:
    return torch.randn(count, 13, generator=torch.Generator().manual_seed(3))


def _tree(rows: torch.Tensor) -> torch.Tensor:
    while len(rows) > 1:
        rows = rows[::2] + rows[1::2]
    return rows[0]


def _sum(rows: torch.Tensor, folder: Path) -> None:
    with world("cpu") as processes:
        total = sum_over_processes(rows[processes.rank].clone(), processes)
        torch.save(total, folder / f"{processes.rank}.pt")


@pytest.mark.parametrize("size", [2, 4])
def test_sum_over_processes_has_the_bits_of_the_tree_in_each_of_them(
    tmp_path: Path, size: int
) -> None:
    rows = _rows(size)  # 13 numbers each: not a multiple of the number of processes
    assert join(fork(size, _sum, rows, tmp_path)) == [0] * size
    for rank in range(size):
        assert torch.load(tmp_path / f"{rank}.pt").equal(_tree(rows))


def test_batches_of_virtual_ranks_do_not_depend_on_the_number_of_processes() -> None:
    labels = np.zeros(50, np.int64)
    steps = []
    for ranks in (1, 2, 4):
        shares = [
            BatchOrder(0, 16, rank=r, ranks=ranks, accumulation=4 // ranks, virtual=True)
            for r in range(ranks)
        ]
        parts = [list(training_requests(labels, order, stop=48)) for order in shares]
        of_each = 4 // ranks
        steps.append(
            [
                request.indices.tolist()
                for step in range(3)
                for part in parts
                for request in part[step * of_each : (step + 1) * of_each]
            ]
        )
        found = [list(evaluation_requests(21, 3, r, ranks, 4 // ranks)) for r in range(ranks)]
        batches = sorted(request.indices.tolist() for part in found for request in part)
        assert batches == sorted(
            r.indices.tolist() for v in range(4) for r in evaluation_requests(21, 3, v, 4)
        )
    assert steps[0] == steps[1] == steps[2]
    whole = next(training_requests(labels, BatchOrder(0, 16), stop=16)).indices
    assert steps[0][:4] == [whole[v::4].tolist() for v in range(4)]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["elastic=3"], "elastic=2 or 4"),
        (["elastic=16"], "elastic=8"),
        (["elastic=4", "parallel=fsdp"], "parallel=ddp"),
        (["elastic=4", "compile=true"], "compile=false"),
        (["elastic=4", "max_batch_per_device=2"], "max_batch_per_device=null"),
    ],
)
def test_settings_that_would_change_the_bits_are_refused(
    tmp_path: Path, words: list[str], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        small_config(tmp_path, *words)


def test_number_of_processes_that_does_not_fit_is_refused_with_those_that_do() -> None:
    assert [virtual_ranks_of_each(4, size) for size in (1, 2, 4)] == [4, 2, 1]
    for size in (3, 8):
        with pytest.raises(ConfigError, match=f"by {size} processes; start 1 or 2 or 4"):
            virtual_ranks_of_each(4, size)


def test_gradient_of_virtual_ranks_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Without anything random, a run with virtual ranks agrees with the usual one to rounding."""
    losses = []
    for name, more in (("plain", []), ("virtual", ["elastic=4", "max_batch_per_device=auto"])):
        assert train(small_config(tmp_path / name, "duration=6steps", *more)) == 0
        losses.append(status(tmp_path / name)["best"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


def resized(folder: Path, model: str, settings: list[str], sizes: list[int]) -> None:
    """Train a run to its end; before the last number of processes, each is asked to stop."""
    for number, size in enumerate(sizes):
        process = torchrun(folder, *VIRTUAL, *settings, model=model, processes=size)
        if number < len(sizes) - 1:
            wait_for_step(folder, 3 * (number + 1), process)
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output


def test_one_process_and_two_end_in_the_same_bits(tmp_path: Path) -> None:
    assert train(small_config(tmp_path / "one", *RICH, *VIRTUAL)) == 0
    config = small_config(tmp_path / "two", *RICH, *VIRTUAL)
    assert join(fork(2, train_forked, config)) == [0, 0]
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[4], [2, 4, 1]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_ends_in_the_same_bits_for_other_processes(
    tmp_path: Path, family: str, sizes: list[int]
) -> None:
    model, settings = FAMILIES[family]
    resized(tmp_path / "one", model, settings, [1])
    resized(tmp_path / "others", model, settings, sizes)
    assert_same_run(tmp_path / "one", tmp_path / "others")


@pytest.mark.slow
@pytest.mark.parametrize("kind", STEPS)
def test_every_kind_of_step_ends_in_the_same_bits_for_other_processes(
    tmp_path: Path, kind: str
) -> None:
    settings = [*RICH, *STEPS[kind]]
    resized(tmp_path / "one", "vit_mini", settings, [1])
    resized(tmp_path / "others", "vit_mini", settings, [4, 2])
    assert_same_run(tmp_path / "one", tmp_path / "others")
