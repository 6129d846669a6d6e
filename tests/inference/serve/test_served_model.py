"""Calibrated probabilities of a served model, and the temperature's origin."""

import json
from pathlib import Path

import pytest
import torch
from served_runs import noise
from untrained_runs import a_run

import vision
from vision.inference.serve.served_model import served_models


def write_report(run: Path, **values: object) -> None:
    model = {
        "checkpoint": str(run / "checkpoints" / "best.safetensors"),
        "step": 7,
        "weights": "raw",
        "image_size": [24, 24],
        "calibration": {"temperature": {"temperature": 2.5, "at_limit": False}},
    }
    file = run / "evaluation" / "val" / "report.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"models": [model | values]}))


def test_temperature_of_an_evaluation_of_the_same_weights(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    loaded = vision.load(run)
    assert served_models([loaded], "auto")[0].temperature.value == 1
    write_report(run)
    assert served_models([loaded], "auto")[0].temperature.value == 2.5
    write_report(run, checkpoint="run/checkpoints/best.safetensors")  # from another folder
    served = served_models([loaded], "auto")[0]
    assert served.temperature.value == 2.5 and "val" in served.temperature.origin
    image = noise()
    answer = served.forward([served.pixels(image, 10**6)])[0]
    with torch.inference_mode():
        logits = loaded.model(loaded.transform(image)[None])[0]
    best = (logits.double() / 2.5).softmax(0).max()
    assert served.prediction(answer, 3).probability == pytest.approx(float(best), abs=1e-5)
    assert served_models([loaded], 0.5)[0].temperature.value == 0.5


@pytest.mark.parametrize(
    "values",
    [
        {"step": 8},
        {"weights": "ema"},
        {"image_size": [32, 32]},
        {"checkpoint": "/elsewhere/best.safetensors"},
        {"checkpoint": "outputs/another/checkpoints/best.safetensors"},
        {"calibration": {"temperature": None}},
        {"calibration": {"temperature": {"temperature": 100.0, "at_limit": True}}},
        {"calibration": None},
    ],
)
def test_temperature_of_other_weights_is_not_used(
    tmp_path: Path, values: dict[str, object]
) -> None:
    run = a_run(tmp_path / "run")
    write_report(run, **values)
    assert served_models([vision.load(run)], "auto")[0].temperature.value == 1


def test_damaged_report_is_left_out_and_names_differ(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    write_report(run)
    (run / "evaluation" / "val" / "report.json").write_text("{")
    loaded = vision.load(run)
    served = served_models([loaded, loaded], "auto")
    assert served[0].temperature.value == 1
    assert served[0].name != served[1].name
