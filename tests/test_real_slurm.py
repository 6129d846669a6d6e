"""Runs on a real Slurm: stopped, preempted, cancelled or bereft of a node, each ends in the bits of
an undisturbed one. `make test-slurm`; Slurm's daemons run on this machine, as two nodes.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import (
    NODES,
    PACKAGES,
    SlurmCluster,
    missing_programs,
    paused,
    wait_until,
)
from small_runs import RICH, assert_same_bits, last_tensors, metrics, status, words
from torch import Tensor

from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import latest

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[1]
STEPS = 100
SETTINGS = [*RICH, f"duration={STEPS}steps", "evaluate_every=1000steps", "loader.workers=1"]
ONLY_WHEN_STOPPED = "checkpoint.every=1000steps"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if missing := missing_programs():
        pytest.exit(f"{', '.join(missing)} not found: install {PACKAGES}.", returncode=1)
    with SlurmCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.environment["PYTHON"] = sys.executable
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(
    cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tensor]:
    """Tensors of a run of two nodes that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = submit(cluster, folder)
    wait_for_state(cluster, job, folder, "COMPLETED")
    assert "2 devices" in log(folder)
    return last_tensors(folder)


def submit(cluster: SlurmCluster, folder: Path, *more: str, partition: str = "graceful") -> str:
    """The number of the job that trains a run in a folder, on both nodes."""
    return cluster.submit(
        *(f"--partition={partition}", "--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1"),
        *("--time=60", f"--chdir={ROOT}", f"--output={folder}/job.log"),
        str(ROOT / "slurm" / "train.sbatch"),
        *words(folder, *SETTINGS, ONLY_WHEN_STOPPED, *more),
    )


def log(folder: Path) -> str:
    file = folder / "job.log"
    return file.read_text() if file.exists() else ""


def wait_for_state(cluster: SlurmCluster, job: str, folder: Path, state: str) -> None:
    def reached() -> bool:
        now = cluster.job(job)["JobState"]
        if now in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED") and now != state:
            pytest.fail(f"the job is {now}, not {state}:\n{log(folder)}")
        return now == state

    wait_until(reached, f"the job is {state}", lambda: log(folder))


def wait_for_restart(cluster: SlurmCluster, job: str, folder: Path) -> None:
    wait_until(
        lambda: cluster.job(job)["Restarts"] == "1", "the job is requeued", lambda: log(folder)
    )


def wait_for_step(folder: Path, step: int) -> None:
    file = folder / "run" / "metrics.jsonl"
    wait_until(
        lambda: file.exists() and len(metrics(folder)) >= step,
        f"the run has taken step {step}",
        lambda: log(folder),
    )


def _steps(run: Path) -> int:
    """The number of steps that a run has logged."""
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def preempt(cluster: SlurmCluster, job: str, folder: Path) -> None:
    """Submit a job of higher priority that needs a node of this one; wait until Slurm reacts."""
    node = cluster.job(job)["BatchHost"]
    cluster.submit(
        *("--partition=urgent", f"--nodelist={node}", "--gpus-per-node=1", "--time=1"),
        *("--output=/dev/null", "--wrap=sleep 1"),
    )

    def reacted() -> bool:
        now = cluster.job(job)
        return now["JobState"] != "RUNNING" or now["PreemptTime"] != "None"

    wait_until(reacted, "the job is preempted", lambda: log(folder))


def assert_saved_and_resumed(folder: Path, undisturbed: dict[str, Tensor]) -> None:
    """The run was stopped once, saved, resumed from there, and ended in the same bits."""
    (stopped,) = [x for x in log(folder).splitlines() if x.startswith("Stopped after step")]
    step = int(stopped.split()[3])
    assert 3 <= step < STEPS
    assert f"after step {step}" in log(folder).split(stopped)[1]  # Resuming …
    assert_same_bits(undisturbed, last_tensors(folder))


def test_job_near_its_time_limit_saves_and_resumes_by_itself(
    cluster: SlurmCluster, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path)
    wait_for_step(tmp_path, 3)
    with paused(tmp_path):
        cluster.bring_time_limit_near(job)
    wait_for_restart(cluster, job, tmp_path)
    cluster.set_time_limit(job, 60)
    wait_for_state(cluster, job, tmp_path, "COMPLETED")
    assert "The time limit is near" in log(tmp_path)
    assert_saved_and_resumed(tmp_path, undisturbed)


@pytest.mark.parametrize("partition", ["graceful", "abrupt"])
def test_preempted_job_saves_and_resumes_by_itself(
    cluster: SlurmCluster, undisturbed: dict[str, Tensor], tmp_path: Path, partition: str
) -> None:
    job = submit(cluster, tmp_path, partition=partition)
    wait_for_step(tmp_path, 3)
    with paused(tmp_path):
        preempt(cluster, job, tmp_path)
    wait_for_restart(cluster, job, tmp_path)
    wait_for_state(cluster, job, tmp_path, "COMPLETED")
    assert ("Slurm preempts the job" in log(tmp_path)) == (partition == "graceful")
    assert_saved_and_resumed(tmp_path, undisturbed)


def test_cancelled_job_saves_and_the_next_one_resumes(
    cluster: SlurmCluster, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path)
    wait_for_step(tmp_path, 3)
    with paused(tmp_path):
        cluster.call("scancel", job)
    wait_for_state(cluster, job, tmp_path, "CANCELLED")
    assert status(tmp_path)["status"] == "preempted"
    again = submit(cluster, tmp_path)
    wait_for_state(cluster, again, tmp_path, "COMPLETED")
    assert_saved_and_resumed(tmp_path, undisturbed)


def test_job_that_loses_a_node_resumes_from_its_newest_checkpoint(
    cluster: SlurmCluster, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, "checkpoint.every=10steps")
    wait_for_step(tmp_path, 15)
    with paused(tmp_path):
        cluster.lose_node(NODES[1])
    wait_for_restart(cluster, job, tmp_path)
    cluster.start_node(NODES[1])
    wait_for_state(cluster, job, tmp_path, "COMPLETED")
    assert "Stopped after step" not in log(tmp_path) and "Resuming" in log(tmp_path)
    assert_same_bits(undisturbed, last_tensors(tmp_path))


@pytest.mark.parametrize("partition", ["graceful", "abrupt"])
def test_jobs_of_a_sweep_near_their_time_limit_or_preempted_resume_by_themselves(
    cluster: SlurmCluster, undisturbed: dict[str, Tensor], tmp_path: Path, partition: str
) -> None:
    """Two runs of two processes, each on a node of its own, with a setting that changes no bit."""
    launcher = {"partition": partition, "tasks_per_node": 2, "cpus_per_task": 1, "gpus_per_node": 1}
    settings = [
        *words(tmp_path, *SETTINGS, ONLY_WHEN_STOPPED, "name=sweep", "loader.prefetch=1,2"),
        "hydra/launcher=submitit_slurm",
        *(f"hydra.launcher.{name}={value}" for name, value in launcher.items()),
    ]
    runs = [tmp_path / "sweep" / f"loader.prefetch-{value}" for value in (1, 2)]
    with (tmp_path / "job.log").open("w") as output:
        sweep = subprocess.Popen(
            [sys.executable, "train.py", "--multirun", *settings],
            cwd=ROOT,
            env=cluster.environment,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(
            lambda: all(_steps(run) >= 3 for run in runs),
            "both runs have taken three steps",
            lambda: log(tmp_path),
        )
        numbers = cluster.call("squeue", "--noheader", "--array", "--format=%i").split()
        limited, preempted = sorted(numbers)
        with paused(tmp_path):
            preempt(cluster, preempted, tmp_path)
            cluster.bring_time_limit_near(limited)
        wait_for_restart(cluster, limited, tmp_path)
        cluster.set_time_limit(limited, 60)
        assert sweep.wait(timeout=600) == 0, log(tmp_path)
    finally:
        sweep.kill()
        sweep.wait()
    assert cluster.job(preempted)["Restarts"] == "1"
    for job, run in zip((limited, preempted), runs, strict=True):
        assert json.loads((run / "status.json").read_text())["status"] == "finished"
        logs = "".join(file.read_text() for file in tmp_path.rglob(f"{job}_0_log.*"))
        assert logs.count("Stopped after step") == 1
        assert_same_bits(undisturbed, read_checkpoint(latest(run / "checkpoints")[0]).tensors)
