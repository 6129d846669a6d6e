"""A run's folder tells its story: table, curves, environment, README and log."""

import csv
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from small_runs import metrics, small_config

from vision.config import ConfigError
from vision.training.loop import train
from vision.training.run import log


def test_folder_of_a_run_has_table_curves_environment_readme_and_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "log.curves=true", "duration=10steps", "ema=0.5")
    assert train(config) == 0
    run = tmp_path / "run"
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    for split in ("train", "val", "val_ema"):
        expected = [(e["step"], e["loss"]) for e in metrics(tmp_path, split)]
        assert [(int(r["step"]), float(r["loss"])) for r in rows if r["split"] == split] == expected
    with Image.open(run / "curves.png") as curves:
        assert curves.width == 3 * 440 and curves.height == 330
        assert len(curves.convert("L").getcolors() or ()) > 50
    (start,) = json.loads((run / "environment.json").read_text())["starts"]
    assert start["versions"]["torch"] == torch.__version__ and start["device"].startswith("cpu")
    readme = (run / "README.md").read_text()
    best = max(e["top1"] for e in metrics(tmp_path, "val_ema"))
    assert f"**{100 * best:.2f} %**" in readme and f"eval.py checkpoint={run}" in readme
    printed = capsys.readouterr().out
    said = (run / "log.txt").read_text()
    assert said.splitlines() == printed.splitlines()
    assert train(config) == 0  # finished: nothing is written
    assert (run / "log.txt").read_text() == said


def test_tensorboard_has_the_numbers_of_metrics_and_images(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = ["log.tensorboard=true", "duration=10steps", "attention_every=7steps"]
    assert train(small_config(tmp_path, *more)) == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"images": 0}).Reload()
    for split in ("train", "val"):
        expected = {e["step"]: e["loss"] for e in metrics(tmp_path, split)}
        found = {e.step: e.value for e in events.Scalars(f"{split}/loss")}
        assert found == pytest.approx(expected)
    assert {"train/images", "val/images", "attention/overlays"} <= set(events.Tags()["images"])
    best = max(e["top1"] for e in metrics(tmp_path, "val"))
    assert events.Scalars("best/top1")[0].value == pytest.approx(best)


def test_tensorboard_that_is_not_installed_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vit-swin\[tensorboard\]"):
        train(small_config(tmp_path, "log.tensorboard=true"))
    assert list(tmp_path.iterdir()) == []
