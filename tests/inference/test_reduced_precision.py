"""fp16 and int8: what the command says of their accuracy is what onnxruntime gives by itself."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from small_runs import small_config
from untrained_runs import a_run

import vision
from vision.cli.app import main
from vision.cli.composition import compose
from vision.config import parse
from vision.data.sources.build_source import build_source, describe
from vision.inference import reduced_precision
from vision.inference.configs import ExportConfig
from vision.inference.reduced_precision import ExportError, write_reduced
from vision.training.loop import train

Capture = pytest.CaptureFixture[str]
TRAINED = [
    *("model.width=32", "model.patch_size=4", "data.train_samples=1600", "data.val_samples=400"),
    *("batch_size=64", "duration=3epochs", "checkpoint.every=1000steps", "evaluate_every=3epochs"),
    *("optimizer.learning_rate=0.004", "schedule.warmup=10steps"),
]
LIMIT = 0.005
TYPES = {"fp16": onnx.TensorProto.FLOAT16, "int8": onnx.TensorProto.INT8}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned something in a few seconds."""
    folder = tmp_path_factory.mktemp("trained")
    assert train(small_config(folder, *TRAINED)) == 0
    return folder / "run"


def top1(file: Path, run: Path) -> float:
    """The accuracy of an ONNX file on the validation images, without this project's evaluation."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    images = json.loads((file.parent / "preprocess.json").read_text())
    record = vision.load(run).opened.record
    assert record is not None and record.config.data is not None
    source = build_source(record.config.data, "val")
    stored = np.stack([np.asarray(source.read(index)) for index in range(len(source))])
    pixels = (stored.astype(np.float32) / 255 - images["mean"]) / images["std"]
    batch = pixels.transpose(0, 3, 1, 2).astype(np.float32)
    (logits,) = session.run(None, {"images": batch})
    return float((logits.argmax(1) == source.labels).mean())


@pytest.mark.parametrize("precision", TYPES)
def test_accuracy_that_is_said_is_that_of_the_file_and_within_the_limit(
    precision: str, trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "out"
    words = [f"checkpoint={trained}", f"precision={precision}", f"output={folder}"]
    assert main(["export", *words, "loader.workers=0", "calibration_images=32"]) == 0
    said = capsys.readouterr().out
    found = re.search(r"accuracy ([\d.]+) % \(fp32: ([\d.]+) %\) on 400 images", said)
    assert found is not None
    after, before = (float(number) / 100 for number in found.groups())
    assert after == pytest.approx(top1(folder / "model.onnx", trained), abs=1e-4)
    assert before - after <= LIMIT and before > 0.2  # of eight classes
    types = [tensor.data_type for tensor in onnx.load(folder / "model.onnx").graph.initializer]
    assert types.count(TYPES[precision]) >= 8  # the matrices of two blocks
    assert found[0] in (folder / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("family", ["swin", "swin_v2"])
def test_other_families_are_written_with_fewer_bits(
    family: str, precision: str, tmp_path: Path
) -> None:
    name = {"swin": "swin_mini", "swin_v2": "swinv2_mini"}[family]
    data = ["data.train_samples=16", "data.val_samples=16", "data.image_size=24"]
    names = describe(parse_data(*data)).classes
    assert names is not None
    run = a_run(
        tmp_path / "run", f"model={name}", "model.width=24", "model.window=3", *data, classes=names
    )
    words = [f"checkpoint={run}", f"precision={precision}", "max_accuracy_loss=1"]
    assert main(["export", *words, "loader.workers=0"]) == 0
    assert (run / "export" / f"onnx-{precision}" / "model.onnx").is_file()


def parse_data(*words: str) -> Any:
    from vision.training.configs import TrainConfig

    return parse(TrainConfig, compose("train", list(words))[0]).data


def reduced(
    monkeypatch: pytest.MonkeyPatch,
    accuracy: dict[str, float],
    speed: dict[str, float],
    limit: float = LIMIT,
) -> reduced_precision.Reduced:
    """What is chosen among files of these accuracies and speeds."""
    ways = {"dynamic": Path("dynamic.onnx"), "static": Path("static.onnx")}
    found = {f"int8 ({way})": speed[way] for way in ways}
    monkeypatch.setattr(reduced_precision, "write_int8", lambda *_: ways)
    monkeypatch.setattr(reduced_precision, "speed_ratios", lambda *_: found)
    monkeypatch.setattr(reduced_precision, "example", lambda _: [[0]])
    monkeypatch.setattr(reduced_precision, "OnnxModel", lambda file: file)
    keyed = {"fp32": accuracy["fp32"]} | {f"int8 ({way})": accuracy[way] for way in ways}
    monkeypatch.setattr(reduced_precision, "_accuracy", lambda m, i, c, way: keyed[way])
    values, _ = compose("export", ["checkpoint=x", "precision=int8", f"max_accuracy_loss={limit}"])
    opened = SimpleNamespace(multi_label=False)
    images = SimpleNamespace(opened=opened, source=range(400))
    loaded = SimpleNamespace(model=None)
    config = parse(ExportConfig, values)
    return write_reduced(loaded, config, images, Path("full.onnx"), Path())  # type: ignore[arg-type]


def test_fastest_way_within_the_limit_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {"dynamic": 2.0, "static": 3.0}
    good = {"fp32": 0.9, "dynamic": 0.899, "static": 0.897}
    assert reduced(monkeypatch, good, speed).way == "int8 (static)"
    assert reduced(monkeypatch, good | {"static": 0.88}, speed).way == "int8 (dynamic)"


def test_larger_loss_is_refused_with_the_setting_that_accepts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = {"fp32": 0.9, "dynamic": 0.88777, "static": 0.87}
    speed = {"dynamic": 2.0, "static": 3.0}
    with pytest.raises(ExportError, match=r"1\.22 points .*nothing was written") as error:
        reduced(monkeypatch, bad, speed)
    remedy = re.search(r"max_accuracy_loss=(\S+) accepts it", str(error.value))
    assert remedy is not None
    assert reduced(monkeypatch, bad, speed, float(remedy[1])).way == "int8 (dynamic)"


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, capsys: Capture) -> None:
    run = a_run(tmp_path / "run")
    assert main(["export", f"checkpoint={run}", "format=safetensors", "precision=int8"]) == 2
    assert "format=onnx" in capsys.readouterr().err
    folder = tmp_path / "foreign"
    assert main(["convert", f"source={run}", "format=timm", f"output={folder}"]) == 0
    assert main(["export", f"checkpoint={folder}", "precision=int8"]) == 2
    assert "data=" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
