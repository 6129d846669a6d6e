"""Training runs in processes of their own, to be watched, killed or stopped."""

import json
import os
import subprocess
import sys
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
from forked_runs import ForkedTraining
from small_runs import words

ROOT = Path(__file__).parents[2]


def start(*command: str) -> subprocess.Popen[str]:
    """A process of its own session, so that a signal to its group reaches its workers too."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_training(folder: Path, *more: str) -> subprocess.Popen[str]:
    return start(sys.executable, "train.py", *words(folder, *more))


def wait_for_step(
    folder: Path, step: int, process: subprocess.Popen[str] | ForkedTraining | ForkProcess
) -> None:
    """Until the run has logged this step."""
    file = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if isinstance(process, ForkProcess):
            assert process.exitcode is None, f"the run ended before step {step}"
        elif process.poll() is not None:
            pytest.fail(f"the run ended before step {step}:\n{process.communicate()[0]}")
        steps = [json.loads(x)["step"] for x in _lines(file)]
        if steps and max(steps) >= step:
            return
        time.sleep(0.005)
    pytest.fail(f"step {step} was not reached")


def _lines(file: Path) -> list[str]:
    return [x for x in file.read_text().splitlines() if x.endswith("}")] if file.exists() else []


def torchrun(
    folder: Path, *more: str, model: str = "vit_mini", processes: int = 2
) -> subprocess.Popen[str]:
    """The same run in several processes on this machine; in one without torchrun."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    launch = launch if processes > 1 else []
    return start(sys.executable, *launch, "train.py", *words(folder, *more, model=model))
