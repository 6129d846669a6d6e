"""ImageNet's other test sets: the accuracy that a plain loop over the files finds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from eval_calls import Capture, evaluate, refused
from family_folders import CLASSES, SYNSETS, write_class_folders, write_family, write_val
from PIL import Image

from vision.cli.app import main
from vision.data.sources.wordnet import imagenet_synsets

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """timm draws weights from the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def a_vit(folder: Path, classes: int = 1000, seed: int = 0) -> tuple[str, Any]:
    """A small ViT of timm that prefers a few classes, and its file."""
    arguments: dict[str, Any] = {"img_size": 32, "embed_dim": 16, "num_heads": 2, "depth": 1}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **arguments)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    if classes == 1000:
        model.head.bias.data[list(CLASSES)] += 6  # so that some answers are right
    path = folder / f"weights{seed}.pth"
    torch.save(model.state_dict(), path)
    return str(path), model.eval()


def logits_of(model: Any, file: Path) -> np.ndarray:
    """timm's own logits of a file, which has the size of the model's input."""
    with Image.open(file) as image:
        pixels = (np.asarray(image.convert("RGB")) / 255 - MEAN) / STD
    with torch.no_grad():
        found = model(torch.tensor(pixels).permute(2, 0, 1)[None].float())
    return np.asarray(found[0].numpy())


def accuracy(model: Any, folder: Path, own_classes: bool = False, numbered: bool = False) -> float:
    """Share of the files whose largest logit is their folder's, perhaps among folders alone."""
    synsets, right = list(imagenet_synsets()), []
    index = {f.name: int(f.name) if numbered else synsets.index(f.name) for f in folder.iterdir()}
    compared = sorted(index.values()) if own_classes else range(1000)
    for file in sorted(folder.glob("*/*")):
        logits = logits_of(model, file)
        right.append(max(compared, key=lambda c: logits[c]) == index[file.parent.name])
    return sum(right) / len(right)


def top1(report: dict[str, Any], name: str, model: int = 0) -> float:
    found: float = report["models"][model]["sets"][name]["top1"]
    return found


def test_every_set_has_the_accuracy_of_a_plain_loop(tmp_path: Path, capsys: Capture) -> None:
    root = tmp_path / "sets"
    write_family(root)
    (first, peer), (second, other) = a_vit(tmp_path), a_vit(tmp_path, seed=1)
    report = evaluate(
        capsys,
        f"checkpoint=[{first},{second}]",
        "model.heads=2",
        "data=imagenet_family",
        f"data.root={root}",
        f"output={tmp_path}/out",
    )
    assert report["not_found"] == []
    folders = {
        "val": "val",
        "v2_matched_frequency": "imagenetv2-matched-frequency-format-val",
        "v2_threshold": "imagenetv2-threshold0.7-format-val",
        "v2_top_images": "imagenetv2-top-images-format-val",
        "a": "imagenet-a",
        "r": "imagenet-r",
        "sketch": "sketch",
    }
    seen = set()
    for number, model in enumerate((peer, other)):
        for name, folder in folders.items():
            wanted = accuracy(model, root / folder, name in ("a", "r"), name.startswith("v2"))
            assert top1(report, name, number) == pytest.approx(wanted), name
            seen.add(wanted)
        noise = report["models"][number]["c"]["error"]["gaussian_noise"]["5"]
        blur = report["models"][number]["c"]["error"]["zoom_blur"]["1"]
        c = root / "imagenet-c"
        assert noise == pytest.approx(1 - accuracy(model, c / "gaussian_noise" / "5"))
        assert blur == pytest.approx(1 - accuracy(model, c / "blur" / "zoom_blur" / "1"))
        assert report["models"][number]["c"]["mce"] is None  # 4 of 75 conditions
    assert len(seen) > 3  # the numbers are not trivial
    assert report["models"][0]["sets"]["a"]["classes"] == 2
    assert report["models"][0]["sets"]["sketch"]["classes"] == 1000
    difference = report["models"][1]["sets"]["val"]["difference"]["value"]
    assert difference == pytest.approx(top1(report, "val", 1) - top1(report, "val"))
    stored = json.loads((tmp_path / "out" / "family.json").read_text())
    assert stored["models"] == report["models"] and "top1" in stored["definitions"]
    with Image.open(tmp_path / "out" / "family.png") as figure:
        assert figure.width > 1000


def test_labels_of_real_follow_the_names_of_the_files(tmp_path: Path, capsys: Capture) -> None:
    real = [[0], [6, 0], [], [155], [999], [6], [], [1, 2, 155]]
    write_val(tmp_path / "sets", real)
    weights, peer = a_vit(tmp_path)
    files = sorted((tmp_path / "sets" / "val").glob("*/*"), key=lambda file: file.name)
    right = [
        int(logits_of(peer, file).argmax()) in labels
        for file, labels in zip(files, real, strict=True)
        if labels
    ]
    words = [f"checkpoint={weights}", "model.heads=2", "save=false", "data=imagenet_family"]
    report = evaluate(capsys, *words, f"data.root={tmp_path}/sets")
    found = report["models"][0]["sets"]["real"]
    assert (found["images"], found["top1"]) == (6, pytest.approx(sum(right) / 6))
    assert report["not_found"] == [
        *("v2_matched_frequency", "v2_threshold", "v2_top_images", "a", "r", "sketch", "c")
    ]
    (tmp_path / "sets" / "real.json").write_text("[[0]]")
    assert "labels of 1 images" in refused(capsys, *words, f"data.root={tmp_path}/sets")
    (tmp_path / "sets" / "real.json").write_text('{"a": 1}')
    assert "not ReaL's" in refused(capsys, *words, f"data.root={tmp_path}/sets")


def test_classes_of_22k_are_mapped_by_synset(tmp_path: Path, capsys: Capture) -> None:
    write_class_folders(tmp_path / "sets" / "sketch", SYNSETS)
    weights, peer = a_vit(tmp_path, classes=21841)
    names = timm.data.ImageNetInfo("imagenet-22k").label_names()
    own = [names.index(s) if s in names else -1 for s in imagenet_synsets()]
    right = []
    for file in sorted((tmp_path / "sets" / "sketch").glob("*/*")):
        logits = logits_of(peer, file)
        best = max(range(1000), key=lambda c: logits[own[c]] if own[c] >= 0 else -np.inf)
        right.append(imagenet_synsets()[best] == file.parent.name)
    words = [f"checkpoint={weights}", "model.heads=2", "data=imagenet_family", "save=false"]
    report = evaluate(capsys, *words, f"data.root={tmp_path}/sets")
    assert top1(report, "sketch") == pytest.approx(sum(right) / len(right))
    notes = "\n".join(report["notes"])
    assert "imagenet-22k" in notes and "1 of the 1,000 classes" in notes


def test_table_lists_what_was_not_found(tmp_path: Path, capsys: Capture) -> None:
    write_class_folders(tmp_path / "sets" / "imagenet-r", SYNSETS[:2])
    weights, _ = a_vit(tmp_path)
    words = ["device=cpu", "loader.workers=0", "model.heads=2", "save=false"]
    data = ["data=imagenet_family", f"data.root={tmp_path}/sets"]
    assert main(["eval", f"checkpoint={weights}", *words, *data]) == 0
    lines = capsys.readouterr().out.splitlines()
    missing = [line for line in lines if "not found" in line]
    assert len(missing) == 8 and not any("ImageNet-R " in line for line in missing)


def test_without_any_set_the_structure_is_shown(tmp_path: Path, capsys: Capture) -> None:
    weights, _ = a_vit(tmp_path)
    (tmp_path / "sets").mkdir()
    words = [f"checkpoint={weights}", "model.heads=2", "data=imagenet_family"]
    said = refused(capsys, *words, f"data.root={tmp_path}/sets")
    assert "none of ImageNet's test sets" in said and "imagenet-c/gaussian_noise/1" in said
    said = refused(capsys, *words, f"data.root={tmp_path}/sets", "neighbours=5")
    assert "neighbours" in said
    write_class_folders(tmp_path / "sets" / "imagenet-a", ("n01440764", "cats"))
    assert "cats" in refused(capsys, *words, f"data.root={tmp_path}/sets")


def test_family_is_for_evaluation_alone(capsys: Capture) -> None:
    assert main(["train", "data=imagenet_family", "data.root=sets"]) == 2
    assert "imagenet_family" in capsys.readouterr().err


def test_model_of_other_classes_is_refused(tmp_path: Path, capsys: Capture) -> None:
    write_class_folders(tmp_path / "sets" / "sketch", SYNSETS)
    weights, _ = a_vit(tmp_path, classes=4)
    words = [f"checkpoint={weights}", "model.heads=2", "data=imagenet_family", "save=false"]
    assert "class_names=" in refused(capsys, *words, f"data.root={tmp_path}/sets")
    names = tmp_path / "names.txt"
    names.write_text("\n".join(SYNSETS))
    words += [f"class_names={names}", f"data.root={tmp_path}/sets"]
    assert "996 of the 1,000" in "\n".join(evaluate(capsys, *words)["notes"])
