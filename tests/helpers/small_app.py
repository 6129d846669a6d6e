"""A Hydra application without torch: its jobs wait, fail or die as their settings say. Its
settings are in configs/app.yaml of the working directory.

    python small_app.py -m hydra/launcher=local seed=0,1
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig

from vision.sweeps.outcome import RunPreemptedError
from vision.training.run.run_folder import PREEMPTED
from vision.training.run.stop import stop_requests

APP = """
seed: 0
does: finish
other: of the start
hydra:
  sweep: {dir: out, subdir: "seed-${seed}"}
  job_logging: {root: {handlers: []}}
"""


def job(settings: Any) -> float:
    """Write down the process and its GPU; then do what `does` says."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with stop_requests() as stop:
        lines = [str(os.getpid()), os.environ.get("CUDA_VISIBLE_DEVICES", ""), settings.other]
        (folder / "writing").write_text("\n".join(lines))
        (folder / "writing").rename(folder / "started")
        if settings.does == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        while settings.does == "ignore":
            time.sleep(0.02)
            if stop:
                (folder / "asked").touch()
        while settings.does == "wait" and not (folder.parent / "enough").exists():
            time.sleep(0.02)
            if stop:
                (folder / "saved").touch()
                raise RunPreemptedError("stopped")
    if settings.does == "fail":
        raise OSError(7, "several arguments")
    print(f"seed {settings.seed} says hello")
    return float(settings.seed) / 2


def main() -> None:
    """Run the application; exit codes as `train.py` has them."""
    configs = str(Path.cwd() / "configs")
    try:
        hydra.main(version_base="1.3", config_path=configs, config_name="app")(job)()
    except RunPreemptedError:
        sys.exit(PREEMPTED)


if __name__ == "__main__":
    from small_app import main as importable  # its job can be pickled

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach `main`
    importable()
