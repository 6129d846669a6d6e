"""The HTML page of `vision compare`: its numbers, that it loads nothing, and a browser's view."""

import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium
from test_compare import compared, write_run
from test_search import config

from vision.cli.app import main
from vision.sweeps.compare_page import comparison_page, page_data
from vision.sweeps.search import Trial, search
from vision.sweeps.search_space import Choices, Interval
from vision.sweeps.search_study import TrialResult

SPACE = {
    "optimizer.learning_rate": Interval(1e-5, 1e-1, log=True),
    "optimizer.weight_decay": Interval(0.0, 0.3),
    "model.pool": Choices(("class_token", "mean")),
}


class WrittenRuns:
    """Trials whose runs are written by hand: the learning rate decides, the best is 1e-3."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.first: Path | None = None
        self.results: dict[int, TrialResult] = {}

    def folder(self, trial: Trial) -> Path:
        return self.root / f"trial-{trial.number}"

    def read(self, trial: Trial) -> TrialResult | None:
        return self.results.get(trial.number)

    def run(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            rate = float(trial.point["optimizer.learning_rate"])
            value = round(0.95 - 0.15 * abs(math.log10(rate) + 3), 6)
            state = "failed" if rate > 0.05 else "finished"
            if trial.bounds and value / 2 < trial.bounds[0][1]:
                state, value = "pruned", value / 2
            words = [f"{key}={text}" for key, text in trial.point.items()]
            top1 = [value / 2, value][: 1 if state == "pruned" else 2] if state != "failed" else []
            folder = self.write(trial, top1, state)
            (folder / ".hydra").mkdir()
            stored = ["name=study", "seed=0", *words, "prune={bounds:[]}"]
            (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {w}\n" for w in stored))
            curve = tuple((10 * n, v) for n, v in enumerate(top1, 1))
            values = (top1[-1],) if top1 else ()
            self.results[trial.number] = TrialResult(state, values, curve, 20)  # type: ignore[arg-type]

    def write(self, trial: Trial, top1: Sequence[float], state: str) -> Path:
        """A run's folder. Only the first is composed, which takes time."""
        folder = self.folder(trial)
        if self.first is None:
            self.first = write_run(folder)
        else:
            shutil.copytree(self.first, folder, ignore=shutil.ignore_patterns(".hydra"))
        settings = json.loads((folder / "config.json").read_text())
        for key, text in trial.point.items():
            part, name = key.split(".")
            settings[part][name] = text if part == "model" else float(text)
        (folder / "config.json").write_text(json.dumps(settings))
        lines = [
            json.dumps({"step": 10 * n, "split": "val", "top1": value, "loss": 1 - value})
            for n, value in enumerate(top1, 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        status = {"status": state, "step": 10 * len(top1), "steps": 20}
        (folder / "status.json").write_text(json.dumps(status))
        return folder


def write_study(folder: Path, trials: int = 16) -> Path:
    settings = config(n_trials=trials, pruner="median", prune_after=8, parallel=2)
    search(settings, SPACE, ["maximize"], WrittenRuns(folder), folder, {})
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("page") / "study")


def test_rows_are_the_trials_in_order_with_the_best(study: Path) -> None:
    data = page_data(compared(study))
    summary = json.loads((study / "study.json").read_text())
    assert [row["number"] for row in data["rows"]] == list(range(16))
    assert data["best"] == summary["best"][0]
    best = data["rows"][data["best"]]
    point = summary["trials"][data["best"]]["point"]
    assert best["command"] == shell("python train.py seed=0", point)
    assert {row["status"] for row in data["rows"]} >= {"finished", "pruned"}
    for row, trial in zip(data["rows"], summary["trials"], strict=True):
        assert row["value"] == (trial["values"][0] if trial["values"] else None)


def shell(start: str, point: dict[str, str]) -> str:
    return " ".join([start, *(f"{key}={value}" for key, value in point.items())])


def test_setting_that_decides_is_the_most_important(study: Path) -> None:
    data = page_data(compared(study))
    assert data["importances"][0][0] == "optimizer.learning_rate"
    assert sum(share for _, share in data["importances"]) == pytest.approx(1)


def test_axes_follow_the_space_of_the_search(study: Path) -> None:
    axes = {axis["key"]: axis for axis in page_data(compared(study))["axes"]}
    assert axes["optimizer.learning_rate"]["log"] and not axes["optimizer.weight_decay"]["log"]
    assert axes["model.pool"]["texts"] == ["class_token", "mean"]


def test_page_without_optuna_or_results_says_so(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [study / f"trial-{number}" for number in range(3)]
    assert "more than 5 finished" in page_data(compared(*few))["importances_missing"]
    monkeypatch.setitem(sys.modules, "optuna", None)
    data = page_data(compared(study))
    assert data["importances"] == [] and "vit-swin[search]" in data["importances_missing"]


def test_runs_of_a_plain_sweep_have_a_page(tmp_path: Path) -> None:
    for number, rate in enumerate(["1e-4", "1e-2"]):
        write_run(
            tmp_path / f"run{number}", f"optimizer.learning_rate={rate}", top1=[0.1 + number / 2]
        )
    data = page_data(compared(tmp_path))
    assert not data["study"] and data["best"] == 1
    (axis,) = data["axes"]
    assert axis["log"] and (axis["low"], axis["high"]) == (1e-4, 1e-2)
    assert data["rows"][0]["command"] is None


def test_page_is_one_file_that_loads_nothing(study: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    assert main(["compare", str(study), "format=html", f"output={output}"]) == 0
    text = output.read_text()
    assert text == comparison_page(compared(study))
    assert "/*DATA*/" not in text and "default-src 'none'" in text
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_draws_every_part(study: Path, tmp_path: Path, width: int, scheme: Any) -> None:
    file = tmp_path / "page.html"
    file.write_text(comparison_page(compared(study)))
    with chromium() as browser:
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        data = page_data(compared(study))
        measured = [row for row in data["rows"] if row["value"] is not None]
        assert page.locator("#history .dot").count() == len(data["rows"])
        assert page.locator("#coordinates .run").count() == len(measured)
        assert page.locator("#importances i").count() == 3
        assert page.locator("#rows tbody tr").count() == len(data["rows"])
        assert page.locator("#command").inner_text() == data["rows"][data["best"]]["command"]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        browser.close()
    assert errors == []
