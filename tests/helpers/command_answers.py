"""What several commands answer in one process: starting one takes longer than most of them."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from page_commands import ROOT

PROGRAM = """
import contextlib, io, json, sys
from vision.cli.app import main
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line.split())
    loaded = [name for name in ("torch", "torchvision", "timm") if name in sys.modules]
    print(json.dumps([code, out.getvalue(), err.getvalue(), loaded]))
"""


@cache
def answers(folder: Path, *lines: str) -> dict[str, tuple[int, str, str, list[str]]]:
    """Exit code, standard output, standard error and the slow libraries that are loaded after each
    of some commands in a folder.
    """
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return dict(zip(lines, map(json.loads, result.stdout.splitlines()), strict=True))
