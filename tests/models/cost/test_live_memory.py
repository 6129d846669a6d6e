"""Bytes of living tensors: counted once, until they are freed."""

import pytest
import torch

from vision.models.cost.live_memory import LiveMemory


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storages_are_counted_once_until_they_are_freed(device: str) -> None:
    before = torch.zeros(25, device=device)
    with LiveMemory() as live:
        live.add([before, before[:3]])
        first = torch.zeros(100, device=device)
        view = first.view(10, 10)[2:].t()
        assert live.now == 500
        second = first + 1
        del first
        assert live.now == 900  # the view keeps it
        del view
        assert live.now == 500
        second.add_(1)
        del second
        assert (live.now, live.peak) == (100, 900)
        live.start_peak()
        assert live.peak == 100


def test_more_than_the_limit_is_an_error() -> None:
    with LiveMemory(limit=100), pytest.raises(MemoryError, match="100 bytes"):
        torch.zeros(26, device="meta")
