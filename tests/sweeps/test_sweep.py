"""Sweeps of training runs: what becomes of them when jobs fail, are stopped or are handed to
Hydra's launchers, and that the same command resumes them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import assert_same_bits, words
from torch import Tensor

from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import latest
from vision.training.run.run_folder import PREEMPTED

ROOT = Path(__file__).parents[2]


def small(folder: Path, *more: str) -> list[str]:
    """The words of a sweep named `s` of small runs."""
    return ["-m", *words(folder / "out", "name=s", *more)]


def start(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    """`train.py <words>` in a folder of its own and a session of its own. Its output goes to a
    file: a job that it hands over may outlive it and would keep a pipe open.
    """
    with said_in(folder).open("w") as said:
        return subprocess.Popen(
            [sys.executable, ROOT / "train.py", *words],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more,
            start_new_session=True,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
        )


def said_in(folder: Path) -> Path:
    """Beside the folder of a test, which is to hold nothing but runs."""
    return folder.with_name(f"{folder.name}.said")


def run(folder: Path, *words: str, **more: str) -> tuple[int, str]:
    """Exit code and everything that was said."""
    process = start(folder, *words, **more)
    code = process.wait(timeout=300)
    return code, said_in(folder).read_text()


def status(folder: Path, name: str) -> str:
    file = folder / "out" / "s" / name / "status.json"
    return str(json.loads(file.read_text())["status"]) if file.exists() else "never started"


def tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Every tensor of a run's newest checkpoint."""
    return read_checkpoint(latest(folder / "out" / "s" / name / "checkpoints")[0]).tensors


def wait_until(true: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 200
    while not true():
        if process is not None and process.poll() is not None:
            pytest.fail("ended early")
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps(folder: Path, name: str) -> int:
    """Number of steps that a run has logged."""
    file = folder / "out" / "s" / name / "metrics.jsonl"
    return file.read_text().count('"split": "train"') if file.exists() else 0


LONG = ["duration=500steps", "checkpoint.every=500steps", "evaluate_every=500steps"]


@pytest.mark.slow
def test_sweep_goes_on_after_a_failed_job_and_leaves_out_what_is_finished(tmp_path: Path) -> None:
    sweep = small(tmp_path, "duration=3steps", "batch_size=64,8")  # 64 are more than there are
    code, output = run(tmp_path, *sweep)
    assert code == 1
    assert "Of 2 runs: 1 finished, 1 failed, 0 left." in output
    assert "s/batch_size-64\n" in output and "fewer than one global batch of 64" in output
    assert "Traceback" not in output
    assert status(tmp_path, "batch_size-8") == "finished"
    assert status(tmp_path, "batch_size-64") == "never started"
    folder = tmp_path / "out" / "s" / "batch_size-8"
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    folder = folder.rename(folder.with_name("batch_size=8"))  # as earlier versions named it
    sweep = small(tmp_path, "duration=3steps", "batch_size=4,8")
    code, output = run(tmp_path, *sweep)
    assert code == 0
    assert "2 runs, 1 finished already." in output
    assert status(tmp_path, "batch_size-4") == "finished"
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    code, output = run(tmp_path, *small(tmp_path, "duration=4steps", "batch_size=4,8"))
    assert code == 2
    assert output.count('duration: "3steps" → "4steps"') == 2


def stop(folder: Path, number: signal.Signals, *more: str) -> str:
    """Start a sweep of two long runs and stop it during the first; returns its output."""
    process = start(folder, *small(folder, *LONG, "seed=0,1", *more))
    wait_until(lambda: steps(folder, "seed-0") >= 3, process)
    if number is signal.SIGTERM:
        process.send_signal(number)  # to the sweep alone: it passes it on
    else:
        os.killpg(process.pid, number)  # as a terminal does: to the job as well
    process.wait(timeout=120)
    output = said_in(folder).read_text()
    assert process.returncode == PREEMPTED, output
    assert "Traceback" not in output
    return output


def test_sweep_asked_to_stop_saves_the_present_job_and_exits_75(tmp_path: Path) -> None:
    output = stop(tmp_path, signal.SIGTERM)
    assert "Of 2 runs: 0 finished, 0 failed, 2 left." in output
    assert status(tmp_path, "seed-0") == "preempted"
    assert latest(tmp_path / "out" / "s" / "seed-0" / "checkpoints")
    assert status(tmp_path, "seed-1") == "never started"


@pytest.mark.slow
def test_sweep_stopped_and_killed_ends_in_the_same_bits_as_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for folder in (stopped, whole):
        folder.mkdir()
    sweep = [*LONG, "seed=0,1", "hydra.launcher.parallel=2"]
    stop(stopped, signal.SIGINT)
    process = start(stopped, *small(stopped, *sweep))
    wait_until(lambda: steps(stopped, "seed-1") >= 3, process)
    process.kill()  # and started again at once: its jobs must have ended with it
    process.wait()
    for folder in (stopped, whole):
        code, output = run(folder, *small(folder, *sweep))
        assert code == 0, output
        assert "Of 2 runs: 2 finished, 0 failed, 0 left." in output
    for name in ("seed-0", "seed-1"):
        assert_same_bits(tensors(whole, name), tensors(stopped, name))


@pytest.mark.parametrize(
    ("launcher", "setting"),
    [
        pytest.param("basic", "log.curves=false", marks=pytest.mark.slow),
        ("joblib", "hydra.launcher.n_jobs=1"),  # without further processes
        pytest.param("joblib", "hydra.launcher.n_jobs=2", marks=pytest.mark.slow),
        pytest.param("submitit_local", "hydra.launcher.timeout_min=10", marks=pytest.mark.slow),
    ],
)
def test_other_launcher_trains_and_the_same_command_trains_nothing_again(
    tmp_path: Path, launcher: str, setting: str
) -> None:
    given = ["duration=3steps", "seed=0,1", f"hydra/launcher={launcher}", setting]
    code, output = run(tmp_path, *small(tmp_path, *given))
    assert code == 0, output
    files = [tmp_path / "out" / "s" / f"seed-{n}" / "metrics.jsonl" for n in (0, 1)]
    assert [status(tmp_path, f"seed-{n}") for n in (0, 1)] == ["finished", "finished"]
    assert (files[0].parent / ".hydra" / "overrides.yaml").exists()
    if launcher == "joblib":
        return
    before = [file.stat().st_mtime_ns for file in files]
    code, output = run(tmp_path, *small(tmp_path, *given))
    assert code == 0, output
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.mark.slow
def test_run_killed_under_joblib_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    given = [
        "duration=1000steps",
        "checkpoint.every=5steps",
        "evaluate_every=1000steps",
        "seed=0,1",
    ]
    joblib = [*given, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    process = start(killed, *small(killed, *joblib))
    wait_until(lambda: min(steps(killed, "seed-0"), steps(killed, "seed-1")) >= 8, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    code, output = run(killed, *small(killed, *joblib))
    assert code == 0 and output.count("Resuming") == 2, output
    code, output = run(whole, *small(whole, *given))
    assert code == 0, output
    for name in ("seed-0", "seed-1"):
        assert_same_bits(tensors(whole, name), tensors(killed, name))


SBATCH = """#!/usr/bin/env bash
cat "$1" >>"$TAKEN"
echo "Submitted batch job 4711"
"""
SACCT = """#!/usr/bin/env bash
echo "JobID|State|NodeList"
echo "4711_0|FAILED|node1"
echo "4711_1|FAILED|node1"
"""


def without_slurm() -> dict[str, str]:
    """An environment in which Slurm's programs are not found, even where they are installed."""
    return {"PATH": str(Path(sys.executable).parent)}


def with_slurm(folder: Path) -> dict[str, str]:
    """An environment with stand-ins for Slurm's programs; their jobs fail at once."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "sacct": SACCT, "srun": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}", "TAKEN": str(folder / "taken")}


def test_sweep_for_slurm_submits_an_array_that_is_warned_before_its_limit(tmp_path: Path) -> None:
    sweep = small(tmp_path, "seed=0,1", "hydra/launcher=submitit_slurm")
    sweep += ["hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=4"]
    code, output = run(tmp_path, *sweep, "hydra.launcher.tasks_per_node=4", **with_slurm(tmp_path))
    assert code == 1, output  # as the stand-in says
    taken = (tmp_path / "taken").read_text()
    assert "#SBATCH --array=0-1" in taken and "#SBATCH --partition=gpu" in taken
    assert "#SBATCH --gpus-per-node=4" in taken and "#SBATCH --ntasks-per-node=4" in taken
    assert "#SBATCH --signal=USR2@120" in taken


def test_second_start_is_refused_while_jobs_of_the_sweep_are_in_the_queue(tmp_path: Path) -> None:
    sweep = small(tmp_path, "seed=0,1", "hydra/launcher=submitit_slurm")
    environment = with_slurm(tmp_path)
    assert run(tmp_path, *sweep, **environment)[0] == 1  # submitted; as the stand-in says
    logs = tmp_path / "out" / "s" / ".submitit"
    (queued, *_) = sorted(path.name for path in logs.iterdir())
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\necho {queued}; echo 99999_0\n")
    squeue.chmod(0o755)
    (tmp_path / "taken").unlink()
    code, output = run(tmp_path, *sweep, **environment)
    assert code == 2 and f"queue: {queued}." in output and "99999" not in output
    assert f"scancel {queued.partition('_')[0]}" in output and str(logs) in output
    assert not (tmp_path / "taken").exists()
    squeue.write_text("#!/bin/sh\necho 99999_0\n")
    assert run(tmp_path, *sweep, **environment)[0] == 1
    assert (tmp_path / "taken").exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hydra.launcher.partitoin=x", "Did you mean 'partition'?"),
        pytest.param("hydra.launcher.timeout_min=soon", "to Integer", marks=pytest.mark.slow),
        pytest.param("hydra.launcher.nodes=1", "hydra/launcher=local", marks=pytest.mark.slow),
    ],
)
def test_sweep_for_slurm_with_a_mistake_is_refused(tmp_path: Path, word: str, message: str) -> None:
    sweep = small(tmp_path, "seed=0,1", "hydra/launcher=submitit_slurm", word)
    code, output = run(tmp_path, *sweep, **without_slurm())
    assert code == 2
    assert message in output and "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_submitted_job_of_two_tasks_warned_of_its_time_limit_goes_on_to_the_same_bits(
    tmp_path: Path,
) -> None:
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"]
    ends = {}
    for name in ("whole", "warned"):
        folder = tmp_path / name
        folder.mkdir()
        process = start(folder, *small(folder, *LONG, "seed=choice(0)", *launcher))
        if name == "warned":
            wait_until(lambda folder=folder: steps(folder, "seed-0") >= 3, process)  # type: ignore[misc]
            names = [path.name for path in (folder / "out" / "s" / ".submitit").iterdir()]
            (job,) = filter(str.isdigit, names)
            children = Path(f"/proc/{job}/task/{job}/children").read_text()
            for child in children.split():  # as submitit does, shortly before the end
                os.kill(int(child), signal.SIGUSR2)
        code = process.wait(timeout=300)
        assert code == 0, said_in(folder).read_text()
        ends[name] = tensors(folder, "seed-0")
        logs = "".join(f.read_text() for f in folder.rglob("*_0_log.*"))
        assert "2 devices" in logs
        assert ("Stopped after step" in logs) == (name == "warned")
    assert_same_bits(ends["whole"], ends["warned"])
