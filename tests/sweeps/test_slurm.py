"""slurm/train.sbatch, as far as a machine without Slurm can tell: `srun`, `scancel` and `scontrol`
are stood in for by small programs that do what the real ones did; torchrun and the training are
real.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import assert_same_bits, last_tensors, metrics, small_config, status, words
from started_runs import wait_for_step

from vision.sweeps.cluster import cluster_job
from vision.sweeps.outcome import RunPreemptedError
from vision.training.loop import train
from vision.training.run.run_folder import PREEMPTED

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "train.sbatch"

SRUN = """#!/usr/bin/env bash
# Start the command once per task; the highest code counts. A SIGTERM kills all tasks at once.
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && tasks=${1#*=}; shift; done
children=()
trap 'kill -KILL "${children[@]}"' TERM
for ((node = 0; node < tasks; node++)); do
    SLURM_NODEID=$node "$@" & children+=($!)
done
echo "${children[@]}" >"$STEP"
highest=0
for child in "${children[@]}"; do
    while :; do
        wait "$child"; code=$?
        kill -0 "$child" 2>/dev/null || break
    done
    wait "$child"; code=$?
    ((code > highest)) && highest=$code
done
exit "$highest"
"""
SCANCEL = """#!/usr/bin/env bash
# Send the signal to the tasks of the job's first step.
[[ "$*" == "--quiet --signal=TERM $NUMBER.0" ]] || exit 1
kill -TERM $(cat "$STEP")
"""
SCONTROL = """#!/usr/bin/env bash
case "$*" in
"show hostnames "*) echo first-node ;;
"--oneliner show job $NUMBER") # the first time, a busy controller drops the connection
    [ -e "$0.asked" ] || { touch "$0.asked"; exit 1; }
    echo "JobId=7 $JOB Power=" ;;
*) echo "$@" >>"$REQUEUED" ;;
esac
"""
PYTHON = """#!/usr/bin/env bash
# In the place of torchrun: note the arguments, then end as told; after SIGTERM, end with code 1.
if [[ $* == *--help* ]]; then echo "  --shutdown-timeout"; exit 0; fi
printf '%s\\n' "$@" >"$ARGUMENTS"
trap 'exit 1' TERM
for ((i = 0; i < ${TENTHS:-0}; i++)); do sleep 0.1; done
exit "${CODE:-0}"
"""

# What `scontrol show job` answered, while the steps of a job ended after a signal.
RUNNING = "JobState=RUNNING EndTime=2026-11-18T11:23:30 PreemptTime=None"
PREEMPTED_WITH_GRACE = "JobState=RUNNING EndTime=2026-11-18T11:14:44 PreemptTime=2026-11-18T11:13"
CANCELLED = "JobState=COMPLETING EndTime=2026-11-18T11:15:31 PreemptTime=None"
REQUEUED_BY_SLURM = "JobState=COMPLETING EndTime=Unknown"


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(text)
    file.chmod(0o755)
    return file


def start_job(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """What `sbatch train.sbatch <arguments>` would start on the first node."""
    programs = folder / "bin"
    number = environment.get("SLURM_JOB_ID", str(random.randrange(10**6)))
    program(programs, "srun", SRUN)
    program(programs, "scancel", SCANCEL)
    program(programs, "scontrol", SCONTROL)
    defaults = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "REQUEUED": str(folder / "requeued"),
        "STEP": str(folder / "step"),
        "ARGUMENTS": str(folder / "arguments"),
        "PYTHON": str(program(programs, "stand-in", PYTHON)),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": number,
        "NUMBER": number,
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "JOB": RUNNING,
        "RENDEZVOUS_HOST": "localhost",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        ["bash", SCRIPT, *arguments],
        env=os.environ | defaults | environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def requeued(folder: Path) -> list[str]:
    file = folder / "requeued"
    return file.read_text().splitlines() if file.exists() else []


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_script_has_no_mistakes_that_bash_or_shellcheck_know() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    beside = Path(sys.executable).with_name("shellcheck")
    checker = str(beside) if beside.exists() else shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run([checker, SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_script_hands_nodes_meeting_place_and_settings_to_torchrun(tmp_path: Path) -> None:
    job = start_job(
        tmp_path,
        *("seed=1", "name=with space"),
        SLURM_JOB_ID="41",
        SLURM_RESTART_COUNT="2",
        SLURM_GPUS_ON_NODE="4",
        RENDEZVOUS_HOST="",
    )
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:2] == ["-m", "torch.distributed.run"]
    assert {
        "--nnodes=2",
        "--nproc-per-node=4",
        "--rdzv-endpoint=first-node:20041",
        "--rdzv-id=41-2",
        "--shutdown-timeout=100",
    } <= set(arguments)
    assert arguments[-3:] == ["train.py", "seed=1", "name=with space"]
    assert requeued(tmp_path) == []


def test_host_of_the_rendezvous_can_be_given(tmp_path: Path) -> None:
    job = start_job(tmp_path, SLURM_JOB_ID="41", RENDEZVOUS_HOST="10.0.0.1")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert "--rdzv-endpoint=10.0.0.1:20041" in (tmp_path / "arguments").read_text().splitlines()


@pytest.mark.parametrize(
    ("number", "code", "queue"),
    [(signal.SIGUSR1, PREEMPTED, ["requeue 7"]), (signal.SIGTERM, 1, [])],
    ids=["time limit", "stopped"],
)
def test_job_goes_back_into_the_queue_at_its_time_limit_but_not_when_it_is_stopped(
    tmp_path: Path, number: signal.Signals, code: int, queue: list[str]
) -> None:
    job = start_job(tmp_path, TENTHS="300", SLURM_JOB_ID="7")
    wait_for(tmp_path / "arguments")
    time.sleep(0.3)  # both nodes have their traps
    job.send_signal(number)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == code, output
    assert requeued(tmp_path) == queue
    assert "is saved" not in output  # the training says so itself, once it has saved


@pytest.mark.parametrize(
    ("shown", "code", "queue"),
    [
        (PREEMPTED_WITH_GRACE, PREEMPTED, ["requeue 7"]),
        (REQUEUED_BY_SLURM, 1, []),
        (CANCELLED, 1, []),
    ],
    ids=["preempted with grace", "requeued by Slurm", "cancelled"],
)
def test_job_whose_steps_are_stopped_goes_back_if_slurm_preempts_and_does_not_requeue_it(
    tmp_path: Path, shown: str, code: int, queue: list[str]
) -> None:
    job = start_job(tmp_path, TENTHS="300", SLURM_JOB_ID="7", JOB=shown)
    wait_for(tmp_path / "arguments")
    time.sleep(0.3)
    for task in (tmp_path / "step").read_text().split():  # the script itself gets no signal
        os.kill(int(task), signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == code, output
    assert requeued(tmp_path) == queue


def test_job_of_an_array_requeues_itself_alone(tmp_path: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "NUMBER": "7_2"}
    job = start_job(tmp_path, TENTHS="300", SLURM_JOB_ID="7", **array)
    wait_for(tmp_path / "arguments")
    time.sleep(0.3)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == PREEMPTED, output
    assert requeued(tmp_path) == ["requeue 7_2"]


def test_job_that_fails_ends_with_its_code_and_is_not_repeated(tmp_path: Path) -> None:
    job = start_job(tmp_path, CODE="3")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 3, output
    assert requeued(tmp_path) == []


def test_job_finished_after_the_warning_is_not_repeated(tmp_path: Path) -> None:
    quick = PYTHON.replace("trap 'exit 1' TERM", "trap 'exit 0' TERM")
    python = program(tmp_path / "bin", "quick", quick)
    job = start_job(tmp_path, TENTHS="300", PYTHON=str(python))
    wait_for(tmp_path / "arguments")
    time.sleep(0.3)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert requeued(tmp_path) == []


@pytest.mark.parametrize(
    ("shown", "raised", "signals"),
    [
        (PREEMPTED_WITH_GRACE, RunPreemptedError, 1),
        (REQUEUED_BY_SLURM, SystemExit, 0),
        (CANCELLED, RunPreemptedError, 0),
    ],
    ids=["preempted with grace", "requeued by Slurm", "cancelled"],
)
def test_job_of_a_sweep_is_requeued_if_slurm_preempts_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shown: str,
    raised: type[BaseException],
    signals: int,
) -> None:
    """submitit requeues a job at a signal. A result, such as an error, would end the sweep."""
    program(tmp_path / "bin", "scontrol", SCONTROL)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "NUMBER": "7_2"}
    for name, value in {"SUBMITIT_EXECUTOR": "slurm", "JOB": shown, **array}.items():
        monkeypatch.setenv(name, value)
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    try:
        with pytest.raises(raised), cluster_job():
            raise RunPreemptedError
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(received) == signals


@pytest.mark.slow
def test_two_nodes_learn_what_one_process_learns(tmp_path: Path) -> None:
    settings = ["ema=0.9", "duration=8steps"]
    assert train(small_config(tmp_path / "one", *settings)) == 0
    job = start_job(tmp_path, *words(tmp_path / "two", *settings), PYTHON=sys.executable)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output
    assert "2 devices" in output
    one, two = last_tensors(tmp_path / "one"), last_tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    for name in one:
        assert two[name].float().allclose(one[name].float(), rtol=1e-3, atol=1e-5), name
    losses = [[e["loss"] for e in metrics(tmp_path / n, "val")] for n in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_two_nodes_stopped_at_the_time_limit_go_on_to_the_same_bits(tmp_path: Path) -> None:
    settings = ["duration=200steps", "checkpoint.every=200steps", "evaluate_every=200steps"]
    given = words(tmp_path / "stopped", *settings)
    job = start_job(tmp_path, *given, PYTHON=sys.executable, SLURM_JOB_ID="77")
    wait_for_step(tmp_path / "stopped", 3, job)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == PREEMPTED, output
    assert requeued(tmp_path) == ["requeue 77"]
    stopped = status(tmp_path / "stopped")
    assert stopped["status"] == "preempted" and 3 <= stopped["step"] < 200
    again = start_job(
        tmp_path, *given, PYTHON=sys.executable, SLURM_JOB_ID="77", SLURM_RESTART_COUNT="1"
    )
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert f"after step {stopped['step']}" in output
    whole = start_job(
        tmp_path, *words(tmp_path / "whole", *settings), PYTHON=sys.executable, SLURM_JOB_ID="78"
    )
    output, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, output
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "stopped"))
