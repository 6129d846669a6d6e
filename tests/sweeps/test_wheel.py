"""The wheel holds our Hydra plugins where Hydra looks for them."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROBE = """
import hydra_plugins
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher

found = {plugin.__name__: plugin for plugin in Plugins.instance().discover(Launcher)}
import sys
print(sys.modules[found["LocalProcessLauncher"].__module__].__file__)
print(sorted(ConfigStore.instance().list("hydra/launcher")))
print("torch" in sys.modules)
"""


def test_fresh_interpreter_finds_the_launchers_of_the_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert "hydra_plugins/__init__.py" not in names  # other plugins share the namespace
    assert "vision/_configs/train.yaml" in names
    probe = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    file, launchers, torch = probe.stdout.splitlines()
    assert Path(file).is_relative_to(tmp_path / "installed")
    assert "local.yaml" in launchers and "plan.yaml" in launchers
    assert torch == "False"
