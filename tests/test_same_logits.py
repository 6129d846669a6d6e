"""The same file gives the same logits in every command, and those of the library that wrote it."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_catalogue import CASES, FAMILIES, Written
from PIL import Image
from torch import Tensor

import vision
from vision.cli.app import main
from vision.cli.composition import compose
from vision.config import parse
from vision.data.batches import Loader, Pipeline, evaluation_batches
from vision.evaluation.configs import EvalConfig
from vision.evaluation.evaluate import predict
from vision.evaluation.evaluated_model import open_evaluated_model
from vision.inference.predict import Loaded
from vision.inference.predicted_files import predict_files
from vision.models.build import build_model

IMAGES = 3
CPU = torch.device("cpu")


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of how much the outputs vary."""
    assert found.shape == expected.shape
    assert expected.std() > 1e-3, "outputs that hardly vary show nothing"
    return float((found - expected).abs().max() / expected.std())


def image_folder(folder: Path, size: int) -> list[Path]:
    """Images of as many classes as the models have, in a split folder; those of val."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(11):
            path = folder / split / f"class {number:02d}" / "image.png"
            path.parent.mkdir(parents=True)
            pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    return sorted((folder / "val").rglob("*.png"))


def words(given: dict[str, Any]) -> list[str]:
    return [f"model.{name}={value}" for name, value in given.items()]


def evaluated(written: Written, folder: Path, size: int) -> Tensor:
    """The logits of `eval`."""
    chosen = [f"checkpoint={written.place}", "data=folder", f"data.root={folder}", "neighbours=1"]
    values, _ = compose("eval", [*chosen, f"image_size={size}", *words(written.given)])
    config = parse(EvalConfig, values)
    subject = open_evaluated_model(str(written.place), config, CPU)
    source = subject.source
    loader = Loader(Pipeline(source, subject.preprocess, None, 0, 10**6, "raise"), config.loader, 0)
    batches = evaluation_batches(loader, len(source))
    model = subject.opened.model
    found = predict(
        model,
        batches,
        len(source),
        subject.preprocess,
        subject.opened.classes,
        CPU,
        "fp32",
        keep_features=True,
    )
    assert found.features is not None
    return found.features if not subject.opened.classes else found.logits


def check_case(name: str, size: int, tmp_path: Path, capsys: Any) -> tuple[Written, Loaded, Tensor]:
    """Every command on one file; the file, the model and its images."""
    case = CASES[name]
    place = tmp_path / "weights"
    place.mkdir()
    written = case.write(place)
    files = image_folder(tmp_path / "data", size)
    loaded = vision.load(written.place, image_size=size, **written.given)
    images = torch.stack([loaded.transform(file) for file in files])
    with torch.inference_mode(), vision.static_bias(loaded.model):
        logits = loaded.model(images)
    assert torch.equal(evaluated(written, tmp_path / "data", size), logits)
    if case.head:
        said = list(predict_files(loaded, files, len(files), 11))
        shares = logits.double().softmax(dim=1)
        for answer, row in zip(said, shares, strict=True):
            assert answer.prediction is not None
            assert [p for _, p in answer.prediction.top] == sorted(row.tolist(), reverse=True)
    copied = tmp_path / "copy.safetensors"
    command = [f"source={written.place}", "format=vision", f"output={copied}"]
    assert main(["convert", *command, *words(written.given)]) == 0
    again = vision.load(copied, image_size=size)
    with torch.inference_mode(), vision.static_bias(again.model):
        assert torch.equal(again.model(images), logits)
    capsys.readouterr()
    assert main(["info", f"init={written.place}", "format=json", *words(written.given)]) == 0
    told = json.loads(capsys.readouterr().out)
    expected = vision.load(written.place, **written.given).opened.config
    assert told["config"] == expected.model_dump(mode="json")
    return written, loaded, images


def check_peer(name: str, written: Written, loaded: Loaded, images: Tensor) -> None:
    """The outputs are those of the library, in 32 and in 64 bits.

    In a model of 64 bits some libraries resize their tables in 64 bits, and others (timm, and
    transformers for DINOv2) in 32 bits: one of both must be equal.
    """
    opened = loaded.opened
    with torch.no_grad():
        assert apart(loaded.model(images), written.output(images)) <= 1e-4
        if CASES[name].double == float("inf"):
            return
        written.peer.double()
        rounded = copy.deepcopy(loaded.model).double()
        exact = build_model(
            opened.config, opened.image_size, channels=opened.channels, classes=opened.classes
        )
        vision.load_weights(exact.double().eval(), written.place, trained_size=opened.trained_size)
        expected = written.output(images.double())
        differences = [apart(model(images.double()), expected) for model in (rounded, exact)]
        assert min(differences) <= CASES[name].double


@pytest.mark.parametrize("name", FAMILIES)
def test_family_gives_the_same_logits_everywhere(name: str, tmp_path: Path, capsys: Any) -> None:
    check_peer(name, *check_case(name, CASES[name].size, tmp_path, capsys))


@pytest.mark.slow
@pytest.mark.parametrize("other", [False, True], ids=["trained size", "other size"])
@pytest.mark.parametrize("name", CASES)
def test_layout_gives_the_same_logits_everywhere(
    name: str, other: bool, tmp_path: Path, capsys: Any
) -> None:
    size = CASES[name].other if other else CASES[name].size
    check_peer(name, *check_case(name, size, tmp_path, capsys))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_family_as_onnx_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    written = CASES[name].write(tmp_path)
    output = tmp_path / "onnx"
    command = [f"checkpoint={written.place}", f"output={output}", *words(written.given)]
    assert main(["export", *command]) == 0
    loaded = vision.load(written.place, **written.given)
    generator = torch.Generator().manual_seed(0)
    size = loaded.preprocess.image_size
    images = torch.randn(2, loaded.preprocess.channels, *size, generator=generator)
    session = runtime.InferenceSession(output / "model.onnx")
    found = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
    with torch.no_grad():
        expected = loaded.model(images)
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-4
