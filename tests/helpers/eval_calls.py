"""The eval command called in tests, with settings that make it quick."""

import json
from typing import Any

import pytest

from vision.cli.app import main

SMALL = ["device=cpu", "loader.workers=0", "resamples=50"]
Capture = pytest.CaptureFixture[str]


def evaluate(capsys: Capture, *given: str) -> dict[str, Any]:
    """The report of an evaluation that is expected to succeed."""
    capsys.readouterr()
    assert main(["eval", *SMALL, "format=json", *given]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def refused(capsys: Capture, *given: str, code: int = 2) -> str:
    """What is said of an evaluation that is expected to be refused."""
    capsys.readouterr()
    assert main(["eval", *SMALL, *given]) == code
    said = capsys.readouterr().err
    text = "".join(line for line in said.splitlines(True) if not line.startswith("note: "))
    assert text.startswith("error: ") and "Traceback" not in text
    return text
