"""Memory that a device has for this process, whoever else uses it at the moment."""

import os
from pathlib import Path

import torch

_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""Files with the limit of a control group: of version 2, and of the memory controller of 1."""


def device_memory(device: torch.device) -> int | None:
    """Bytes of a device, None where that is unknown; those of a CPU are shared by the processes of
    the run on this machine.
    """
    match device.type:
        case "cuda" if torch.cuda.is_available():
            return torch.cuda.get_device_properties(device).total_memory
        case "mps":
            return torch.mps.recommended_max_memory()
        case "cpu":
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            limit = control_group_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            return min(total, limit or total) // processes
        case _:
            return None


def control_group_limit(groups: Path, mounted: Path) -> int | None:
    """The smallest limit of the control groups of this process and of those above them, which a
    container, Slurm or systemd sets; None if there is none.

    `groups` lists those of the process, `mounted` is the folder of their files.
    """
    limits = []
    for line in _text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        kind = next((k for k in controllers.split(",") if k in _FILES), None)
        if kind is None:
            continue
        group = mounted / kind / path.strip("/")
        while group.is_relative_to(mounted / kind):  # in a container the path may be the host's
            limit = _text(group / _FILES[kind]).strip()
            if limit.isdigit():  # else "max"
                limits.append(int(limit))
            group = group.parent
    return min(limits, default=None)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
