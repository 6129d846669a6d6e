"""Two processes under torchrun: one of them dies or fails, or all are asked to stop."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import RICH, assert_same_run, metrics, status, words
from started_runs import start, wait_for_step

SETTINGS = [*RICH, "duration=60steps", "checkpoint.every=4steps", "evaluate_every=20steps"]
pytestmark = pytest.mark.slow


def torchrun(folder: Path, *more: str, restarts: int = 0) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    launch.append(f"--max-restarts={restarts}")
    return start(sys.executable, *launch, "train.py", *words(folder, *more))


def worker(agent: subprocess.Popen[str], rank: int) -> int:
    """The process that has this rank."""
    for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return int(child)
    raise AssertionError(f"no process has rank {rank}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    process = torchrun(folder, *SETTINGS)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_under_elastic_torchrun_is_restarted_and_ends_in_the_same_bits(
    tmp_path: Path, whole: Path, rank: int
) -> None:
    process = torchrun(tmp_path, *SETTINGS, restarts=1)
    wait_for_step(tmp_path, 10, process)
    os.kill(worker(process, rank), signal.SIGKILL)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    assert output.count("Resuming") == 1, output
    assert_same_run(whole, tmp_path)


def test_torchrun_asked_to_stop_saves_one_step_of_both_ranks_and_goes_on_to_the_same_bits(
    tmp_path: Path, whole: Path
) -> None:
    settings = [*SETTINGS, "checkpoint.every=1000steps"]  # so that only the request saves
    process = torchrun(tmp_path, *settings)
    wait_for_step(tmp_path, 5, process)
    process.send_signal(signal.SIGTERM)  # to the launcher, which hands it on
    output, _ = process.communicate(timeout=280)
    stopped = status(tmp_path)
    assert stopped["status"] == "preempted", output
    assert f"Stopped after step {stopped['step']} " in output
    files = sorted(file.name for file in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert files == [f"step_{stopped['step']:08d}.safetensors"]
    assert metrics(tmp_path)[-1]["step"] == stopped["step"]  # nobody went on alone
    again = torchrun(tmp_path, *settings)
    output, _ = again.communicate(timeout=280)
    assert again.returncode == 0, output
    assert f"after step {stopped['step']}." in output
    assert_same_run(whole, tmp_path)


NAN_IN_RANK_1 = """
import os, sys
from vision.cli.app import main
from vision.training.tasks import classification
if os.environ["RANK"] == "1":
    real = classification.training_loss
    classification.training_loss = lambda *arguments: real(*arguments) * float("nan")
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_loss_that_is_no_number_in_another_process_is_explained_by_the_one_that_speaks(
    tmp_path: Path, parallel: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(NAN_IN_RANK_1)
    settings = [f"parallel={parallel}", "max_batch_per_device=2", "log.every=1steps"]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    process = start(sys.executable, *launch, *words(tmp_path, *settings))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert output.count("error: ") == 1, output
    expected = r"the loss of step 1 is not a finite number: .* for the images \d+, \d+\. Lower "
    assert re.search(expected, output), output
