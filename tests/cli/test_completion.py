"""Completion in a real bash: what appears on the terminal after the Tab key."""

import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

Terminal = Callable[..., str]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """Type into a bash; returns the screen as soon as it contains a text."""
    if shutil.which("tmux") is None or shutil.which("bash") is None:
        pytest.skip("tmux and bash are needed for a terminal that completes")
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        # as pip installs it
        "vision": f"#!{sys.executable}\nfrom vision.cli.app import main\nexit(main())\n",
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    socket = f"vision-{uuid.uuid4().hex}"

    def tmux(*words: str) -> str:
        command = ["tmux", "-L", socket, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def write(*keys: str, until: str) -> str:
        tmux("send-keys", *keys)
        deadline = time.monotonic() + 120
        while until not in (screen := tmux("capture-pane", "-p", "-J")):
            assert time.monotonic() < deadline, f"no '{until}' in:\n{screen}"
            time.sleep(0.2)
        return screen

    path = f"PATH={programs}:/usr/bin:/bin"
    bash = ["env", path, f"PYTHONPATH={ROOT}", "bash", "--norc", "--noprofile"]
    tmux("new-session", "-d", "-x", "200", "-y", "50", "-c", str(ROOT), *bash)
    yield write
    tmux("kill-server")


INSTALL = 'eval "$({} -sc install=bash)" && clear && echo rea""dy'


@pytest.mark.parametrize("command", ["python train.py", "vision train"])
def test_tab_key_completes_groups_choices_and_keys(terminal: Terminal, command: str) -> None:
    program = command.removesuffix(" train") if command.startswith("vision") else command
    terminal(
        f'eval "$({program} -sc install=bash)" && clear && echo rea""dy', "Enter", until="ready"
    )
    terminal(f"{command} experiment=deit3_s", "Tab", until="experiment=deit3_small")
    terminal(" recip", "Tab", until="deit3_small recipe=")
    terminal("plai", "Tab", until="recipe=plain_vit")
    terminal(" optimizer.learn", "Tab", until="plain_vit optimizer.learning_rate=")
    screen = terminal("0.1 model=swinv2_", "Tab", "Tab", until="model=swinv2_tiny")
    assert "model=swinv2_mini" in screen


def test_tab_key_completes_commands(terminal: Terminal) -> None:
    terminal(INSTALL.format("vision"), "Enter", until="ready")
    terminal("vision visu", "Tab", until="vision visualize")
