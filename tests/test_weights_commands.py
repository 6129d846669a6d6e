"""`vision convert` and `vision info init=…`."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import vision
from vision.cli.app import main


@pytest.fixture
def timm_file(tmp_path: Path) -> Path:
    """A small ViT as timm's users store it."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=64, depth=2, num_heads=1, num_classes=7
    )
    path = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), path)
    return path


def test_convert_command_there_and_back_is_bit_exact(
    timm_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, back = tmp_path / "ours.safetensors", tmp_path / "timm"
    words = [f"source={timm_file}", "format=vision", f"output={ours}", "model.heads=1"]
    assert main(["convert", *words]) == 0
    assert "timm ViT → vision" in capsys.readouterr().out
    assert main(["convert", f"source={ours}", "format=timm", f"output={back}"]) == 0
    before, after = load_file(timm_file), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_convert_command_asks_for_what_a_file_does_not_tell(
    timm_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"source={timm_file}", "format=vision", f"output={tmp_path / 'x.safetensors'}"]
    assert main(["convert", *words]) != 0
    assert "heads" in capsys.readouterr().err


def test_info_command_says_what_a_file_is(
    timm_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"init={timm_file}", "model=auto", "model.heads=1", "format=json"]
    assert main(["info", *words]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layout"] == "timm ViT"
    assert facts["config"]["width"] == 64 and facts["config"]["depth"] == 2
    assert facts["image_size"] == [32, 32] and facts["classes"] == 7
    loaded = vision.load(timm_file, heads=1)
    assert facts["cost"]["parameters"] == sum(p.numel() for p in loaded.model.parameters())
    assert main(["info", *words[:-1]]) == 0
    assert "weights.safetensors" in "".join(capsys.readouterr().out.split())
