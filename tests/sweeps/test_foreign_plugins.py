"""Plugins of Hydra that need other versions than ours, each in a virtual environment of its own:
hydra-optuna-sweeper is for optuna < 3, hydra-ray-launcher for an older cloudpickle.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from small_runs import words

ROOT = Path(__file__).parents[2]


def environment_with(folder: Path, plugin: str) -> Path:
    """The Python of a virtual environment with a plugin, and for everything else our packages."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", plugin]
    installed = subprocess.run(pip, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"pip cannot install {plugin}: {installed.stderr.strip().splitlines()[-1]}")
    return python


def train(python: Path, folder: Path, *more: str) -> str:
    """The output of a sweep of small runs in folder/out/s."""
    process = subprocess.run(
        [
            python,
            ROOT / "train.py",
            "-m",
            *words(folder / "out", "name=s", "duration=3steps", *more),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


@pytest.mark.slow
def test_ray_trains_the_jobs_of_a_sweep(tmp_path: Path) -> None:
    python = environment_with(tmp_path / "venv", "hydra-ray-launcher>=1.2")
    train(python, tmp_path, "seed=0,1", "hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2")
    for seed in (0, 1):
        run = tmp_path / "out" / "s" / f"seed-{seed}"
        assert '"finished"' in (run / "status.json").read_text()
        assert (run / ".hydra" / "overrides.yaml").exists()


@pytest.mark.slow
def test_stock_optuna_sweeper_gets_the_objective_of_every_run(tmp_path: Path) -> None:
    python = environment_with(tmp_path / "venv", "hydra-optuna-sweeper>=1.2")
    sweep = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    sweep += ["hydra.sweeper.sampler.seed=3", "hydra.sweeper.direction=maximize"]
    sweep += ["optimizer.learning_rate=interval(0.0001,0.01)"]
    output = train(python, tmp_path, *sweep)
    runs = list((tmp_path / "out" / "s").glob("optimizer.learning_rate-*"))
    assert len(runs) == 2
    assert "Best value: " in output
    assert "1 run, 1 finished already." in train(python, tmp_path, *sweep)  # the same seed
