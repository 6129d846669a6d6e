"""Sweeps: what they expand to, where their runs lie, and what becomes of them when jobs fail, are
stopped, or are handed to a cluster.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import assert_same_bits, words

from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import latest
from vision.cli.composition import compose, expand
from vision.config import ConfigError
from vision.sweeps.sweep import sweep_run_name
from vision.training.run.run_folder import PREEMPTED

ROOT = Path(__file__).parents[2]
PROBE = (
    "import sys; from vision.cli.app import main; code = main(sys.argv[1:]);"
    "print('LOADED', [m for m in ('torch', 'torchvision', 'timm') if m in sys.modules]);"
    "sys.exit(code)"
)


def small(folder: Path, *more: str) -> list[str]:
    """The words of a sweep named `s` of small runs."""
    return ["-m", *words(folder / "out", "name=s", *more)]


def start(
    folder: Path, *words: str, program: str | None = None, **more: str
) -> subprocess.Popen[str]:
    """`train.py <words>` in a folder of its own and a session of its own. What it says goes to a
    file: a job that it hands over outlives it and would keep a pipe open.
    """
    begin = [str(ROOT / "train.py")] if program is None else ["-c", program, "train"]
    with said_in(folder).open("w") as said:
        return subprocess.Popen(
            [sys.executable, *begin, *words],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | more,
            start_new_session=True,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
        )


def said_in(folder: Path) -> Path:
    """Beside the folder of a test, which is to hold nothing but runs."""
    return folder.with_name(f"{folder.name}.said")


def run(folder: Path, *words: str, program: str | None = None, **more: str) -> tuple[int, str]:
    """Exit code and everything that was said."""
    process = start(folder, *words, program=program, **more)
    code = process.wait(timeout=300)
    return code, said_in(folder).read_text()


def status(folder: Path, name: str) -> str:
    file = folder / "out" / "s" / name / "status.json"
    return str(json.loads(file.read_text())["status"]) if file.exists() else "never started"


def wait_until(true: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 200
    while not true():
        if process is not None and process.poll() is not None:
            pytest.fail("ended early")
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps(folder: Path, name: str) -> int:
    """How many steps a run has logged."""
    file = folder / "out" / "s" / name / "metrics.jsonl"
    return file.read_text().count('"split": "train"') if file.exists() else 0


EXPANSIONS = {
    "seed=0,1,2": [{"seed": 0}, {"seed": 1}, {"seed": 2}],
    "seed=range(0,5,2)": [{"seed": 0}, {"seed": 2}, {"seed": 4}],
    "seed=choice(7,8)": [{"seed": 7}, {"seed": 8}],
    "model=glob(vit_t*)": [{"model": "vit_tiny"}],
    "model.depths=[2,2],[2,6]": [{"model.depths": [2, 2]}, {"model.depths": [2, 6]}],
    "++ema=0.9,null": [{"ema": 0.9}, {"ema": None}],
}


@pytest.mark.parametrize("word", EXPANSIONS)
def test_word_with_several_values_expands_as_hydra_documents_it(word: str) -> None:
    fixed, jobs = expand(["duration=3epochs", word], ())
    assert fixed == ["duration=3epochs"]
    assert [swept for _, swept in jobs] == EXPANSIONS[word]
    assert all(job[0] == "duration=3epochs" for job, _ in jobs)


def test_two_words_with_several_values_expand_to_their_product() -> None:
    _, jobs = expand(["seed=0,1", "batch_size=8", "model=vit_mini,swin_mini"], ())
    found = [(swept["seed"], swept["model"]) for _, swept in jobs]
    assert found == list(itertools.product([0, 1], ["vit_mini", "swin_mini"]))


def test_glob_finds_choices_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own_a.yaml").write_text("# mine\n")
    _, jobs = expand(["model=glob(own_*)"], [tmp_path])
    assert [swept for _, swept in jobs] == [{"model": "own_a"}]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model=glob(nothing*)", "nothing that this stands for"),
        ("seed=interval(0,1)", "give the values"),
        ("seed=3", "no setting has several values"),
    ],
)
def test_word_that_cannot_be_swept_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand([word], ())


def test_run_name_is_what_was_given_whatever_the_order_and_notation() -> None:
    _, jobs = expand(["seed=0", "optimizer.learning_rate=1e-3,3e-3", "seed=0,1"], ())
    _, others = expand(["seed=0,1", "optimizer.learning_rate=0.001,0.0030"], ())
    names = {sweep_run_name(swept) for _, swept in jobs}
    assert names == {sweep_run_name(swept) for _, swept in others}
    assert "optimizer.learning_rate=0.001,seed=0" in names and len(names) == 4


VALUES = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.text(max_size=300)
)


@given(st.lists(VALUES | st.lists(VALUES, max_size=3), min_size=2, max_size=2))
def test_run_name_is_a_file_name_and_differs_for_different_values(pair: list[object]) -> None:
    first, second = (sweep_run_name({"augment/x": value, "seed": 0}) for value in pair)
    same = json.dumps(pair[0]) == json.dumps(pair[1])
    assert (first == second) == same
    assert len(first) <= 150 and first not in (".", "..")
    assert not set(first) & set("/\\ \"'*?[]{}<>|:;&$!\n")


MISTAKES = {
    "seed=0,x": "in 1 of 2 jobs, such as seed=x:\n       seed: should be a valid integer",
    "model=vit_mini,vit_minni seed=0": "model=vit_minni: unknown choice.",
    "seed=0,1 model.dpeth=3": "error: model.dpeth: unknown setting.",
    "seed=1,1": "two runs of the sweep are the same",
    "name=a,b": "the name is the sweep's",
    "seed=0,1 hydra.verbose=true": "settings of Hydra itself are not for this command",
    "seed=0,1 hydra/launcher=joblib": "hydra/launcher=joblib: unknown choice",
    "seed=0,1 hydra.launcher.partition=x": "hydra/launcher=basic has no settings",
}


@pytest.mark.parametrize("given_words", MISTAKES)
def test_sweep_with_a_mistake_in_one_job_exits_2_before_any_job_starts(
    tmp_path: Path, given_words: str
) -> None:
    code, output = run(tmp_path, *small(tmp_path, *given_words.split()), program=PROBE)
    assert code == 2
    assert MISTAKES[given_words] in output
    assert output.rstrip().endswith("LOADED []")
    assert list(tmp_path.iterdir()) == []


def test_single_command_given_several_values_says_how_to_sweep(tmp_path: Path) -> None:
    code, output = run(tmp_path, *small(tmp_path, "seed=0,1")[1:])
    assert code == 2
    assert "seed=0,1: this command takes one value, not several." in output
    assert "--multirun" in output


def test_sweep_under_torchrun_is_refused(tmp_path: Path) -> None:
    code, output = run(tmp_path, *small(tmp_path, "seed=0,1"), WORLD_SIZE="2")
    assert code == 2
    assert "start it without torchrun" in output


@pytest.mark.slow
def test_sweep_goes_on_after_a_failed_job_and_leaves_out_what_is_finished(tmp_path: Path) -> None:
    sweep = small(tmp_path, "duration=3steps", "batch_size=64,8")  # 64 are more than there are
    code, output = run(tmp_path, *sweep)
    assert code == 1
    assert "Of 2 runs: 1 finished, 1 failed, 0 left." in output
    assert "failed with exit code" in output and "fewer than one global batch of 64" in output
    assert status(tmp_path, "batch_size=8") == "finished"
    assert status(tmp_path, "batch_size=64") == "never started"
    folder = tmp_path / "out" / "s" / "batch_size=8"
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    sweep = small(tmp_path, "duration=3steps", "batch_size=4,8")
    code, output = run(tmp_path, *sweep)
    assert code == 0
    assert "2 runs, 1 finished already." in output
    assert status(tmp_path, "batch_size=4") == "finished"
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]  # Hydra has made no folder
    code, output = run(tmp_path, *small(tmp_path, "duration=4steps", "batch_size=4,8"))
    assert code == 2
    assert output.count('duration: "3steps" → "4steps"') == 2


def test_folder_of_a_job_can_be_given_to_other_commands_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = f"out/s/{sweep_run_name({'optimizer.learning_rate': 0.001, 'seed': 0})}"
    Path(place).mkdir(parents=True)
    values, _ = compose("eval", [f"checkpoint={place}"])
    assert values["checkpoint"] == place
    with pytest.raises(ConfigError, match="cannot be read"):
        compose("eval", ["checkpoint=out/s/seed=1"])  # not there


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_sweep_asked_to_stop_saves_the_present_job_and_exits_75(
    tmp_path: Path, number: signal.Signals
) -> None:
    long = ["duration=2000steps", "checkpoint.every=2000steps", "evaluate_every=2000steps"]
    process = start(tmp_path, *small(tmp_path, *long, "seed=0,1"))
    wait_until(lambda: steps(tmp_path, "seed=0") >= 3, process)
    if number is signal.SIGTERM:
        process.send_signal(number)  # to the sweep alone: it hands it on
    else:
        os.killpg(process.pid, number)  # as a terminal does: to the job as well
    process.wait(timeout=120)
    output = said_in(tmp_path).read_text()
    assert process.returncode == PREEMPTED, output
    assert "Of 2 runs: 0 finished, 0 failed, 2 left." in output
    assert status(tmp_path, "seed=0") == "preempted"
    assert latest(tmp_path / "out" / "s" / "seed=0" / "checkpoints")
    assert status(tmp_path, "seed=1") == "never started"


SBATCH = """#!/usr/bin/env bash
cat "$1" >>"$TAKEN"
echo "Submitted batch job 4711"
"""
SACCT = """#!/usr/bin/env bash
echo "JobID|State|NodeList"
echo "4711_0|${STATE}|node1"
echo "4711_1|COMPLETED|node1"
"""


def cluster(folder: Path, state: str = "RUNNING") -> dict[str, str]:
    """An environment with stand-ins for Slurm's programs."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in {"sbatch": SBATCH, "sacct": SACCT, "srun": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TAKEN": str(folder / "taken"),
        "STATE": state,
    }


def test_sweep_for_slurm_hands_over_each_job_once(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    sweep = small(tmp_path, "seed=0,1", "hydra/launcher=submitit_slurm")
    sweep += ["hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=4"]
    sweep += ["hydra.launcher.tasks_per_node=4", "hydra.launcher.max_num_timeout=9"]
    code, output = run(tmp_path, *sweep, **cluster(tmp_path))
    assert code == 0, output
    assert "0 finished already, 0 submitted already, 2 submitted now" in output
    assert "4711_0  " in output and "4711_1  " in output
    taken = (tmp_path / "taken").read_text()
    assert "#SBATCH --array=0-1" in taken and "#SBATCH --partition=gpu" in taken
    assert "#SBATCH --gpus-per-node=4" in taken and "#SBATCH --ntasks-per-node=4" in taken
    assert "#SBATCH --signal=USR2@120" in taken and "#SBATCH --job-name=s" in taken
    # Again: job 0 runs still; what was job 1 has ended without finishing its run.
    code, output = run(tmp_path, *sweep, **cluster(tmp_path))
    assert code == 0, output
    assert "0 finished already, 1 submitted already, 1 submitted now" in output
    assert "seed=1" in output and "seed=0" not in output


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hydra.launcher.partitoin=x", "Did you mean 'partition'?"),
        ("hydra.launcher.timeout_min=soon", "could not be converted to Integer"),
        ("hydra.launcher.nodes=1", "are you indeed on a slurm cluster?"),
    ],
)
def test_sweep_for_slurm_with_a_mistake_is_refused(tmp_path: Path, word: str, message: str) -> None:
    pytest.importorskip("submitit")
    sweep = small(tmp_path, "seed=0,1", "hydra/launcher=submitit_slurm", word)
    code, output = run(tmp_path, *sweep, program=PROBE)
    assert code == 2
    assert message in output and "Traceback" not in output


@pytest.mark.slow
def test_submitted_job_of_two_tasks_warned_of_its_time_limit_goes_on_to_the_same_bits(
    tmp_path: Path,
) -> None:
    pytest.importorskip("submitit")
    long = ["duration=500steps", "checkpoint.every=500steps", "evaluate_every=500steps"]
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"]
    ends = {}
    for name in ("whole", "warned"):
        folder = tmp_path / name
        folder.mkdir()
        code, output = run(folder, *small(folder, *long, "seed=choice(0)", *launcher))
        assert code == 0, output
        if name == "warned":
            wait_until(lambda folder=folder: steps(folder, "seed=0") >= 3)  # type: ignore[misc]
            controller = output.split("submitted now.\n")[1].split()[0]
            children = Path(f"/proc/{controller}/task/{controller}/children").read_text()
            for child in children.split():  # as submitit does, shortly before the end
                os.kill(int(child), signal.SIGUSR2)
        wait_until(lambda folder=folder: status(folder, "seed=0") == "finished")  # type: ignore[misc]
        run_folder = folder / "out" / "s" / "seed=0"
        ends[name] = read_checkpoint(latest(run_folder / "checkpoints")[0]).tensors
        logs = "".join(f.read_text() for f in folder.rglob("*_0_log.*"))
        assert "2 devices" in logs
        assert ("Stopped after step" in logs) == (name == "warned")
    assert_same_bits(ends["whole"], ends["warned"])
