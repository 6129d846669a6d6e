"""The one door: what every command makes of a place, and what it says about it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from model_settings import random_images, redraw, small_model
from PIL import Image
from run_records import stored
from timm.models.vision_transformer import VisionTransformer

import vision
from vision.checkpoints.native.checkpoint import write_checkpoint
from vision.checkpoints.open import load_weights, open_model
from vision.cli.app import main
from vision.config import ConfigError
from vision.models.configs import TimmConfig

Capture = pytest.CaptureFixture[str]


def own_file(path: Path, model: Any) -> Path:
    """A checkpoint of a run with a state of its optimiser."""
    record, _ = stored(model)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors["optimizer.state/0/exp_avg"] = torch.full((1000,), 3.0)
    write_checkpoint(path, tensors, record)
    return path


def foreign_file(folder: Path, **options: Any) -> Path:
    """A bare ViT of timm whose width says nothing of its heads."""
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    model = redraw(VisionTransformer(num_classes=7, **(small | options)))
    torch.save(model.state_dict(), folder / "weights.pth")
    return folder / "weights.pth"


def image_file(folder: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    return folder / "image.png"


@pytest.mark.parametrize("name", ["swin_tiny", "swinv2_tiny"])
def test_swin_keeps_the_windows_of_its_training_at_another_size(name: str, tmp_path: Path) -> None:
    model = small_model(name, (32, 32), window=8).eval()  # the last grid is 4 × 4
    assert model.windows[-1] == (4, 4)
    path = own_file(tmp_path / "a.safetensors", model)
    opened = open_model(path, image_size=64)
    assert opened.model.windows == model.windows  # type: ignore[union-attr]
    images = random_images(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(opened.model(images), model(images))
    assert not opened.report.resized


@pytest.mark.parametrize("name", ["swin_tiny", "swinv2_tiny"])
def test_window_that_is_given_replaces_that_of_a_run(name: str, tmp_path: Path) -> None:
    model = small_model(name, (32, 32)).eval()
    path = own_file(tmp_path / "a.safetensors", model)
    images = random_images(2, 3, 32, 32)
    other = open_model(path, window=8)
    assert other.model.windows[0] == (8, 8)  # type: ignore[union-attr]
    with torch.no_grad():
        assert torch.equal(open_model(path, window=4).model(images), model(images))
        assert not torch.allclose(other.model(images), model(images), atol=1e-4)
    if name == "swinv2_tiny":  # offsets stay in units of the windows of training
        assert other.config.pretrained_window == (4, 4, 4)  # type: ignore[union-attr]
    vit = own_file(tmp_path / "b.safetensors", small_model("vit_base", (32, 32)))
    with pytest.raises(ConfigError, match="only a Swin has windows"):
        open_model(vit, window=8)


def test_model_of_a_run_reads_the_weights_and_not_the_state_of_the_optimiser(
    tmp_path: Path,
) -> None:
    model = small_model("vit_base", (32, 32)).eval()
    path = own_file(tmp_path / "a.safetensors", model)
    content = bytearray(path.read_bytes())
    place = bytes(content).rindex(np.full(1000, 3.0, dtype=np.float32).tobytes())
    content[place + 2000] ^= 1
    path.write_bytes(content)
    images = random_images(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(open_model(path).model(images), model(images))


COMMANDS = {
    "predict": ["predict", "checkpoint={file}", "images={image}"],
    "visualize": ["visualize", "checkpoint={file}", "images={image}", "output={folder}/figures"],
    "export": ["export", "checkpoint={file}", "format=safetensors", "output={folder}/export"],
    "convert": ["convert", "source={file}", "format=vision", "output={folder}/converted"],
    "info": ["info", "init={file}"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_takes_the_setting_that_its_own_error_names(
    command: str, tmp_path: Path, capsys: Capture
) -> None:
    place = {"file": foreign_file(tmp_path), "image": image_file(tmp_path), "folder": tmp_path}
    words = [word.format(**place) for word in COMMANDS[command]]
    assert main(words) == 2
    assert "model.heads=" in capsys.readouterr().err
    assert main([*words, "model.heads=3", "model.norm_eps=1e-6"]) == 0
    said = capsys.readouterr()
    assert "activation=gelu" in (said.out if command == "info" else said.err)
    if command != "info":
        assert main([*words, "heads=3"]) == 2
        assert "model.heads" in capsys.readouterr().err


def test_setting_of_a_model_that_no_weights_show_changes_the_logits(tmp_path: Path) -> None:
    path = foreign_file(tmp_path)
    images = random_images(2, 3, 32, 32)
    with torch.no_grad():
        plain = vision.load(path, heads=3).model(images)
        quick = vision.load(path, heads=3, activation="quick_gelu").model(images)
        mean = vision.load(path, heads=3, pool="mean").model(images)
    assert not torch.allclose(plain, quick, atol=1e-4)
    assert not torch.allclose(plain, mean, atol=1e-4)
    with pytest.raises(ConfigError, match="norm_eps"):
        vision.load(path, heads=3, nrom_eps=1e-5)
    with pytest.raises(ConfigError, match=r"model\.pool"):
        vision.load(path, heads=3, pool="max")


def test_model_of_timm_opens_in_predict(tmp_path: Path, capsys: Capture) -> None:
    torch.manual_seed(0)
    peer = timm.create_model("resnet10t", num_classes=7).eval()
    torch.save(peer.state_dict(), tmp_path / "weights.pth")
    words = [f"checkpoint={tmp_path / 'weights.pth'}", f"images={image_file(tmp_path)}"]
    chosen = ["model=timm", "model.name=resnet10t", "image_size=64", "top=7"]
    assert main(["predict", *words, *chosen]) == 0
    found = {row["label"]: row["probability"] for row in _answer(capsys)["top"]}
    model: Any = {"kind": "timm", "name": "resnet10t", "drop_path": None}
    config = vision.parse(TimmConfig, model | {"checkpoint_activations": False})
    loaded = vision.load(tmp_path / "weights.pth", model=config, image_size=64)
    with torch.no_grad():
        shares = peer(loaded.transform(tmp_path / "image.png")[None]).double().softmax(1)[0]
    assert found == pytest.approx({f"class {i}": float(p) for i, p in enumerate(shares)}, rel=1e-5)


def _answer(capsys: Capture) -> Any:
    return json.loads(capsys.readouterr().out)


def test_weights_without_a_head_say_what_to_do(tmp_path: Path, capsys: Capture) -> None:
    path = headless_file(tmp_path)
    words = [f"checkpoint={path}", f"images={image_file(tmp_path)}", "model.heads=3"]
    assert main(["predict", *words]) == 2
    said = capsys.readouterr().err
    assert "no head" in said
    assert "recipe=probe" in said and "neighbours=20" in said
    assert vision.load(path, heads=3).features(tmp_path / "image.png").shape == (48,)


def headless_file(folder: Path) -> Path:
    small: Any = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    model = redraw(VisionTransformer(num_classes=0, **small))
    torch.save(model.state_dict(), folder / "features.pth")
    return folder / "features.pth"


def test_weights_without_a_head_are_judged_by_their_neighbours(
    tmp_path: Path, capsys: Capture
) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    random = np.random.default_rng(0)
    for split, number in (("train", 12), ("val", 6)):
        for label, brightness in (("dark", 60), ("light", 180)):
            folder = tmp_path / "data" / split / label
            folder.mkdir(parents=True)
            for i in range(number):
                pixels = random.normal(brightness, 60, (32, 32, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    path = headless_file(tmp_path)
    data = ["data=folder", f"data.root={tmp_path / 'data'}", "save=false", "format=json"]
    assert main(["eval", f"checkpoint={path}", *data, "model.heads=3"]) == 2
    assert "neighbours=20" in capsys.readouterr().err
    assert main(["eval", f"checkpoint={path}", *data, "model.heads=3", "neighbours=5"]) == 0
    found = json.loads(capsys.readouterr().out)["models"][0]
    loaded = vision.load(path, heads=3)

    def features(split: str) -> tuple[Any, list[str]]:
        files = sorted((tmp_path / "data" / split).rglob("*.png"))
        return loaded.features(list(files)).numpy(), [file.parent.name for file in files]

    peer = KNeighborsClassifier(5, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07))
    peer.fit(*features("train"))
    assert found["neighbours"] == {"k": 5, "top1": peer.score(*features("val"))}
    assert found["metrics"]["top1"] == found["neighbours"]["top1"]


def test_own_checkpoint_gives_the_average_with_the_buffers_of_the_model(tmp_path: Path) -> None:
    model = redraw(small_model("vit_base", (32, 32)))
    record, _ = stored(model)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {"ema.head.weight": torch.ones_like(model.head.weight)}
    tensors["optimizer.state/0/exp_avg"] = torch.zeros(1)
    write_checkpoint(tmp_path / "a.safetensors", tensors, record)
    found = open_model(tmp_path / "a.safetensors")
    assert (found.tensors["head.weight"] == 1).all() and found.weights == "ema"
    assert found.tensors["head.bias"].equal(model.head.bias)
    # The state of the optimiser is not even read.
    assert found.report.left == {"model": len(model.state_dict())}
    raw = open_model(tmp_path / "a.safetensors", weights="raw")
    assert raw.tensors["head.weight"].equal(model.head.weight) and raw.weights == "raw"


def test_rules_rename_tensors_in_memory_that_have_the_names_of_the_model() -> None:
    model = small_model("vit_base", (32, 32))
    tensors = model.state_dict() | {"old.weight": torch.ones_like(model.head.weight)}
    rules = [(r"head\.weight", ""), (r"old\.", "head.")]
    load_weights(model, tensors, rename=rules)
    assert (model.head.weight == 1).all()
    with pytest.raises(ConfigError, match="nothing"):
        load_weights(model, tensors, rename=[("nothing", "x")])
