"""Weights that other libraries wrote, evaluated on images that the call names."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from eval_calls import Capture, evaluate, refused
from torch import nn

from vision.cli.app import main
from vision.data.sources.shapes import CLASSES, Shapes

IMAGES = 24
DATA = ["data=shapes", "data.image_size=32", f"data.val_samples={IMAGES}", "save=false"]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """timm draws weights from the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def a_vit(**changes: Any) -> nn.Module:
    """A small ViT of timm whose classes are the data's, away from its trivial first weights."""
    arguments = {"img_size": 32, "num_classes": 8, "embed_dim": 40, "num_heads": 4, "depth": 2}
    return drawn(timm.create_model("vit_tiny_patch16_224", **(arguments | changes)))


def drawn(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def stored(model: nn.Module, folder: Path) -> Path:
    path = folder / "weights.pth"
    torch.save(model.state_dict(), path)
    return path


def assert_as_timm(
    metrics: dict[str, float],
    peer: nn.Module,
    values: Sequence[Sequence[float]] = IMAGENET,
    order: Sequence[int] = range(8),
) -> None:
    """Every number of timm's own model on the images; `order` are the classes of its logits."""
    source = Shapes((32, 32), 0, "val", IMAGES)
    pixels = np.stack([np.asarray(source.read(i)) for i in range(IMAGES)]) / 255
    images = torch.tensor((pixels - np.array(values[0])) / np.array(values[1]))
    with torch.no_grad():
        logits = peer(images.permute(0, 3, 1, 2).float())
    labels = torch.tensor([list(order).index(label) for label in source.labels])
    five = (logits.topk(5).indices == labels[:, None]).any(1)
    assert metrics["samples"] == IMAGES
    assert metrics["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert metrics["top1"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert metrics["top5"] == pytest.approx(five.double().mean().item())


def test_foreign_file_with_what_it_cannot_tell_gives_the_numbers_of_timm(
    tmp_path: Path, capsys: Capture
) -> None:
    peer = a_vit()
    weights = stored(peer, tmp_path)
    assert "model.heads=…" in refused(capsys, f"checkpoint={weights}", *DATA)
    report = evaluate(capsys, f"checkpoint={weights}", "model.heads=4", *DATA)
    assert_as_timm(report["models"][0]["metrics"], peer)
    notes = "\n".join(report["notes"])
    assert "timm" in notes and "mean and std of ImageNet" in notes
    assert "classes without names: assumed to be those of the data" in notes


def test_foreign_file_with_a_named_model_gives_the_numbers_of_timm(
    tmp_path: Path, capsys: Capture
) -> None:
    peer = a_vit()
    given = ["model=vit_tiny", "model.width=40", "model.depth=2", "model.heads=4"]
    report = evaluate(capsys, f"checkpoint={stored(peer, tmp_path)}", *given, *DATA)
    assert_as_timm(report["models"][0]["metrics"], peer)
    assert not any("heads" in note for note in report["notes"])


def test_foreign_swin_with_a_named_model_gives_the_numbers_of_timm(
    tmp_path: Path, capsys: Capture
) -> None:
    arguments: dict[str, Any] = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
    peer = drawn(
        timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=32, window_size=4, num_classes=8, **arguments
        )
    )
    given = ["model=swin_tiny", "model.width=24", "model.depths=[2,2]", "model.heads=[2,4]"]
    words = [f"checkpoint={stored(peer, tmp_path)}", *given, "model.window=4", "image_size=32"]
    report = evaluate(capsys, *words, *DATA)
    assert_as_timm(report["models"][0]["metrics"], peer)


@pytest.mark.parametrize("words", [["preprocess=inception"], ["preprocess.mean=[0.5,0.5,0.5]"]])
def test_preprocessing_of_foreign_weights_can_be_given(
    tmp_path: Path, capsys: Capture, words: list[str]
) -> None:
    peer = a_vit()
    given = ["model.heads=4", "preprocess.crop_ratio=1.0", *words]
    report = evaluate(capsys, f"checkpoint={stored(peer, tmp_path)}", *given, *DATA)
    half = (0.5, 0.5, 0.5)
    deviation = half if "inception" in words[0] else IMAGENET[1]
    assert_as_timm(report["models"][0]["metrics"], peer, (half, deviation))
    assert not any("mean and std of ImageNet" in note for note in report["notes"])


def test_foreign_weights_of_any_timm_model_give_the_numbers_of_timm(
    tmp_path: Path, capsys: Capture
) -> None:
    peer = drawn(timm.create_model("test_resnet", num_classes=8))
    given = ["model=timm", "model.name=test_resnet", "image_size=32", "preprocess.crop_ratio=1.0"]
    report = evaluate(capsys, f"checkpoint={stored(peer, tmp_path)}", *given, *DATA)
    usual = timm.models.get_pretrained_cfg("test_resnet")
    assert_as_timm(report["models"][0]["metrics"], peer, (usual.mean, usual.std))


def test_class_names_say_which_logit_is_which_class(tmp_path: Path, capsys: Capture) -> None:
    order = [3, 0, 7, 1, 5, 2, 6, 4]
    peer = a_vit()
    names = tmp_path / "names.txt"
    names.write_text("".join(f"{CLASSES[i]}\n" for i in order))
    given = [f"checkpoint={stored(peer, tmp_path)}", "model.heads=4", *DATA]
    report = evaluate(capsys, *given, f"class_names={names}")
    assert_as_timm(report["models"][0]["metrics"], peer, order=order)
    names.write_text("one\ntwo\n")
    text = refused(capsys, *given, f"class_names={names}")
    assert "has 2 lines, but the model of" in text and "8 classes" in text


@pytest.mark.parametrize("classes", [5, 10])
def test_head_for_other_classes_is_refused_with_the_way_to_map_them(
    tmp_path: Path, capsys: Capture, classes: int
) -> None:
    weights = stored(a_vit(num_classes=classes), tmp_path)
    given = [f"checkpoint={weights}", "model.heads=4", *DATA]
    text = refused(capsys, *given)
    assert f"{weights} has {classes} classes without names, but the data has 8: orange" in text
    assert f"class_names=names.txt, a file with {classes} lines" in text
    names = tmp_path / "names.txt"
    names.write_text("".join(f"{name}\n" for name in (*CLASSES, "cat", "dog")[:classes]))
    if classes == 10:
        report = evaluate(capsys, *given, f"class_names={names}")
        assert any("8 of the 10 classes" in note for note in report["notes"])
    else:
        text = refused(capsys, *given, f"class_names={names}")
        assert "3 of the 8 classes of the data are unknown" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "model.heads=…"),
        (["model.heads=4"], "give data=…"),
        (["model=vit_small", *DATA], "width 40, not 384, depth 2, not 12"),
        (["model=swin_tiny", *DATA], "kind vit, not swin"),
        (["model=timm", "model.name=test_resnet", *DATA], "do not fit the model"),
        (["model=timm", "model.name=test_resnets", *DATA], "Did you mean 'test_resnet'?"),
        (["model.heads=3", *DATA], "heads = 3 does not divide width = 40"),
        (["model.heads=4", "class_names=nowhere.txt", *DATA], "nowhere.txt cannot be read"),
        (["model.heads=4", "data=fashion_mnist"], "data"),
    ],
    ids=lambda given: " ".join(given[:2]) if isinstance(given, list) else "",
)
def test_foreign_weights_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: Capture, words: list[str], said: str
) -> None:
    text = refused(capsys, f"checkpoint={stored(a_vit(), tmp_path)}", *words)
    assert said in text


def test_model_that_is_not_that_of_a_run_is_refused(tmp_path: Path, capsys: Capture) -> None:
    from small_runs import words

    quick = ["duration=1steps", "evaluate_every=1steps", "schedule.warmup=0steps"]
    assert main(["train", *words(tmp_path, *quick), "name=own"]) == 0
    run = f"checkpoint={tmp_path / 'own'}"
    assert "8 × 16, not 8 × 192" in refused(capsys, run, "model=vit_tiny", *DATA)


def test_mistakes_about_the_model_are_told_without_loading_torch() -> None:
    program = """
import sys
from vision.cli.app import main
calls = (["checkpoint=timm:resnet18"],
         ["checkpoint=x.pth", "model=vit_tny", "data=shapes"],
         ["checkpoint=x.pth", "model.hads=4", "data=shapes"])
assert [main(["eval", *words]) for words in calls] == [2] * 3
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    for line, said in zip(lines, ["needs data=…", "vit_tiny", "'model.heads'?"], strict=True):
        assert said in line
