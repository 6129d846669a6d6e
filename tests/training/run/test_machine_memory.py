"""Limits of control groups, as containers, Slurm and systemd set them."""

from pathlib import Path

import pytest
import torch

from vision.training.run import machine_memory
from vision.training.run.machine_memory import control_group_limit, device_memory


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "5000"}, 5000),
        ("0::/job/step\n", {"job/step/memory.max": "70", "job/memory.max": "5000"}, 70),
        ("0::/not/visible\n", {"memory.max": "900"}, 900),
        ("0::/\n", {}, None),
        (
            "9:cpu,cpuacct:/a\n4:memory:/slurm/job\n0::/\n",
            {
                "memory/slurm/job/memory.limit_in_bytes": "800",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "a/memory.limit_in_bytes": "1",
            },
            800,
        ),
        ("", {"memory.max": "1"}, None),
    ],
    ids=["above", "own", "host's path", "none", "version 1", "no groups"],
)
def test_smallest_limit_of_a_group_and_those_above_it_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int | None
) -> None:
    write(tmp_path / "cgroup", groups)
    for name, limit in limits.items():
        write(tmp_path / "fs" / name, f"{limit}\n")
    assert control_group_limit(tmp_path / "cgroup", tmp_path / "fs") == expected


def test_memory_of_a_cpu_is_limited_and_shared_by_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_memory, "control_group_limit", lambda *paths: 4096)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert device_memory(torch.device("cpu")) == 1024
    assert device_memory(torch.device("meta")) is None
