"""Weights that timm wrote, evaluated on pictures that the call names."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F

from vision.cli import main
from vision.config import parse
from vision.data.build import build_source
from vision.data.configs import ShapesConfig
from vision.evaluation.foreign import open_stored

SHAPES = {
    "kind": "shapes", "image_size": 32, "seed": 0, "samples_per_class": None,
    "train_fraction": 1.0, "sampling": "uniform", "on_error": "raise", "max_error_share": 0.0,
    "train_samples": 8, "val_samples": 24, "test_samples": 8,
}  # fmt: skip


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A small ViT of timm with eight classes, as timm users store it."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=8)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    torch.save(model.state_dict(), tmp_path / "timm.pth")
    return tmp_path / "timm.pth"


def test_foreign_file_gives_the_numbers_of_its_own_library(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["data=shapes", "data.image_size=32", "data.val_samples=24", "crop_ratio=1.0"]
    words = [f"checkpoint={weights}", *given, f"output={tmp_path / 'out'}", "format=json"]
    assert main(["eval", "device=cpu", "loader.workers=0", "resamples=0", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    metrics = report["models"][0]["metrics"]
    peer = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=8)
    peer.load_state_dict(torch.load(weights))
    config = parse(ShapesConfig, SHAPES)
    source = build_source(config, "val")
    preprocess = open_stored(weights, "auto", config, torch.device("cpu"))[0].preprocess
    pixels = np.stack([np.asarray(source.read(i)) for i in range(24)]) / 255
    images = torch.tensor((pixels - preprocess.mean) / preprocess.std).permute(0, 3, 1, 2)
    with torch.no_grad():
        logits = peer.eval()(images.float())
    labels = torch.from_numpy(source.labels)
    assert metrics["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
    assert metrics["top1"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert any("timm" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["checkpoint=timm:resnet18"], 2, "needs data=…"),
        (["checkpoint=FILE"], 1, "timm.pth"),
        (["checkpoint=FILE", "data=fashion_mnist"], 2, "data"),
    ],
)
def test_foreign_weights_without_fitting_pictures_are_refused(
    weights: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    said: str,
) -> None:
    given = [word.replace("FILE", str(weights)) for word in words]
    assert main(["eval", "device=cpu", "save=false", *given]) == code
    text = capsys.readouterr().err
    assert text.startswith("error: ") and said in text and "Traceback" not in text
