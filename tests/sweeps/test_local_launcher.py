"""`hydra/launcher=local` and `plan` with a small application in place of training."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import small_app
from omegaconf import OmegaConf

from vision.training.run.run_folder import PREEMPTED

ROOT = Path(__file__).parents[2]


def start(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    """A sweep of the small application in a folder, in a session of its own."""
    (folder / "configs").mkdir(exist_ok=True)
    if not (folder / "configs" / "app.yaml").exists():
        (folder / "configs" / "app.yaml").write_text(small_app.APP)
    app = Path(small_app.__file__)
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            [sys.executable, app, "-m", *words],
            cwd=folder,
            env=os.environ
            | {"PYTHONPATH": f"{ROOT}:{app.parent}", "CUDA_VISIBLE_DEVICES": ""}
            | more,
            start_new_session=True,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
        )


def run(folder: Path, *words: str, **more: str) -> tuple[int, str]:
    """Exit code and output of a sweep."""
    code = start(folder, *words, **more).wait(timeout=200)
    return code, (folder / "said").read_text()


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 200
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def started(folder: Path, *seeds: int) -> bool:
    return all((folder / "out" / f"seed-{seed}" / "started").exists() for seed in seeds)


def process_of(folder: Path, seed: int) -> int:
    return int((folder / "out" / f"seed-{seed}" / "started").read_text().splitlines()[0])


def ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


LOCAL = "hydra/launcher=local"


def test_job_that_fails_or_dies_does_not_stop_the_others(tmp_path: Path) -> None:
    subdir = "hydra.sweep.subdir=seed-${seed}-${does}"
    code, output = run(tmp_path, LOCAL, "does=fail,die,finish", subdir)
    assert code == 1
    assert "Of 3 runs: 1 finished, 2 failed, 0 left." in output
    assert "several arguments" in output
    assert "seed 0 says hello" in output
    lines = [f.read_text().split()[0] for f in tmp_path.glob("out/*/started")]
    assert len(set(lines)) == 3  # processes
    assert (tmp_path / "out" / "seed-0-fail" / ".hydra" / "config.yaml").exists()


def test_jobs_side_by_side_get_a_gpu_each_and_write_into_files_of_their_own(tmp_path: Path) -> None:
    sweep = start(
        tmp_path,
        LOCAL,
        "hydra.launcher.parallel=2",
        "does=wait",
        "seed=0,1,2",
        CUDA_VISIBLE_DEVICES="a,b",
    )
    wait_until(lambda: started(tmp_path, 0, 1))
    assert not started(tmp_path, 2)
    (tmp_path / "out" / "enough").touch()
    assert sweep.wait(timeout=200) == 0
    gpus = [
        (tmp_path / "out" / f"seed-{seed}" / "started").read_text().splitlines()[1]
        for seed in range(3)
    ]
    assert gpus[:2] == ["a", "b"] and gpus[2] in ("a", "b")
    for seed in range(3):
        said = (tmp_path / "out" / f"seed-{seed}" / "output.log").read_text()
        assert said == f"seed {seed} says hello\n"
    assert "hello" not in (tmp_path / "said").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_makes_all_running_jobs_save_and_stops_the_sweep(
    tmp_path: Path, number: signal.Signals
) -> None:
    sweep = start(tmp_path, LOCAL, "hydra.launcher.parallel=2", "does=wait", "seed=0,1,2")
    wait_until(lambda: started(tmp_path, 0, 1))
    if number is signal.SIGTERM:
        sweep.send_signal(number)  # to the sweep alone, which passes it on
    else:
        os.killpg(sweep.pid, number)  # as a terminal does: to the jobs as well
    assert sweep.wait(timeout=200) == PREEMPTED
    assert all((tmp_path / "out" / f"seed-{n}" / "saved").exists() for n in (0, 1))
    assert not started(tmp_path, 2)
    output = (tmp_path / "said").read_text()
    assert "Of 3 runs: 0 finished, 0 failed, 3 left." in output and "Traceback" not in output


def test_second_interrupt_ends_the_jobs_at_once(tmp_path: Path) -> None:
    sweep = start(tmp_path, LOCAL, "does=ignore", "seed=0")
    wait_until(lambda: started(tmp_path, 0))
    sweep.send_signal(signal.SIGINT)
    wait_until(lambda: (tmp_path / "out" / "seed-0" / "asked").exists())
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(timeout=200) not in (0, 1)
    wait_until(lambda: ended(process_of(tmp_path, 0)))


def test_jobs_of_a_killed_sweep_end_with_it(tmp_path: Path) -> None:
    sweep = start(tmp_path, LOCAL, "does=wait", "seed=0")
    wait_until(lambda: started(tmp_path, 0))
    sweep.kill()
    wait_until(lambda: ended(process_of(tmp_path, 0)))
    assert not (tmp_path / "out" / "seed-0" / "saved").exists()


def test_settings_are_those_of_the_start_although_yaml_changes_meanwhile(tmp_path: Path) -> None:
    sweep = start(tmp_path, LOCAL, "does=wait", "seed=0,1")
    wait_until(lambda: started(tmp_path, 0))
    changed = small_app.APP.replace("of the start", "changed").replace("out", "elsewhere")
    (tmp_path / "configs" / "app.yaml").write_text(changed)
    (tmp_path / "out" / "enough").touch()
    assert sweep.wait(timeout=200) == 0
    for seed in (0, 1):
        text = (tmp_path / "out" / f"seed-{seed}" / "started").read_text()
        assert text.splitlines()[2] == "of the start"


def test_plan_shows_the_settings_of_the_jobs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code, output = run(tmp_path, "hydra/launcher=plan", "does=${other}", "seed=3,4")
    assert code == 0
    documents = [OmegaConf.create(text) for text in output.split("--- ")[1:]]
    expected = {"does": "of the start", "other": "of the start"}
    assert documents == [{"seed": seed, **expected} for seed in (3, 4)]
    assert output.startswith("--- # seed=3\n")
    assert {path.name for path in tmp_path.iterdir()} == {"configs", "said"}


def test_fewer_than_one_job_at_a_time_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    code, output = run(tmp_path, LOCAL, "hydra.launcher.parallel=0", "seed=0,1")
    assert code != 0 and "hydra.launcher.parallel: 0 should be at least 1" in output
    assert not (tmp_path / "out").exists()


def test_gpus_are_those_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from hydra_plugins.vision_launchers.local import visible_gpus

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5ce0")
    assert visible_gpus() == ["3", "GPU-5ce0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
