"""Runs with convolutional stems: whitening by training images, resume, and what opens them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from small_runs import assert_same_bits, last_tensors, small_config
from started_runs import torchrun

import vision
from vision.checkpoints.convert import convert
from vision.checkpoints.open import open_model
from vision.config import ConfigError
from vision.data.sources.build_source import build_source
from vision.inspection.capture.capture import capture
from vision.inspection.methods.attribution import attribute
from vision.models.configs import ViTConfig
from vision.training import loop
from vision.training.loop import train

WHITENED = ["model.stem=conv_whitened", "model.patch_size=4", "duration=2epochs"]
FILTERS = "model.patch_embed.whitening.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whitened")
    assert train(small_config(folder, *WHITENED)) == 0
    return folder


def test_whitening_inverts_the_covariance_of_the_training_images(run: Path) -> None:
    source = build_source(small_config(run, *WHITENED).data, "train")
    images = np.stack([np.asarray(source.read(i)) for i in range(len(source))]) / 255
    images = (images - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
    windows = np.lib.stride_tricks.sliding_window_view(images, (2, 2), axis=(1, 2))
    patches = windows.reshape(-1, 12)
    covariance = patches.T @ patches / len(patches)
    filters = last_tensors(run)[FILTERS][:12].flatten(1).double().numpy()
    expected = np.linalg.inv(covariance + 5e-4 * np.eye(12))
    np.testing.assert_allclose(filters.T @ filters, expected, rtol=1e-3, atol=1e-2)


def test_resumed_run_ends_in_the_same_bits(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(loop, "write_checkpoint", _save_and_stop(loop.write_checkpoint))
        with pytest.raises(KeyboardInterrupt):
            train(small_config(tmp_path, *WHITENED))
    assert train(small_config(tmp_path, *WHITENED)) == 0
    assert_same_bits(last_tensors(run), last_tensors(tmp_path))


def _save_and_stop(save: object) -> object:
    def stop(*parts: object) -> None:
        save(*parts)  # type: ignore[operator]
        raise KeyboardInterrupt

    return stop


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_have_the_whitening_of_one(run: Path, tmp_path: Path, parallel: str) -> None:
    process = torchrun(tmp_path, *WHITENED, f"parallel={parallel}")
    assert process.wait() == 0, process.communicate()[0]
    one, two = last_tensors(run), last_tensors(tmp_path)
    assert one[FILTERS].equal(two[FILTERS])
    for name, tensor in one.items():
        if name.startswith("model."):
            torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)


def test_fine_tuning_keeps_the_whitening(run: Path, tmp_path: Path) -> None:
    start = [f"init={run}/run", "model=auto", "data.seed=3", "duration=1epochs"]
    for tune in ("all", "partial", "lora"):
        parts = ["tune.parts=[patch_embed]"] if tune == "partial" else []
        config = small_config(tmp_path / tune, *start, f"tune={tune}", *parts)
        assert train(config) == 0
        assert last_tensors(tmp_path / tune)[FILTERS].equal(last_tensors(run)[FILTERS])


def test_weights_open_with_and_without_their_record(run: Path, tmp_path: Path) -> None:
    opened = open_model(str(run / "run"))
    assert not opened.model.patch_embed.whitening.weight.requires_grad  # type: ignore[union-attr]
    weights = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(
        {name: tensor.contiguous() for name, tensor in opened.model.state_dict().items()}, weights
    )
    assert isinstance(opened.config, ViTConfig)
    bare = open_model(str(weights), heads=2, norm_eps=opened.config.norm_eps)
    assert bare.config == opened.config
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(bare.model(images), opened.model(images), rtol=0, atol=0)
    again = tmp_path / "again.safetensors"
    convert(str(run / "run"), "vision", again)
    assert_same_bits(dict(vision.load(again).model.state_dict()), dict(opened.model.state_dict()))
    with pytest.raises(ConfigError, match=r"stem.*format=vision"):
        convert(str(run / "run"), "timm", tmp_path / "timm")


def test_maps_are_drawn_over_what_tokens_see(run: Path) -> None:
    model = open_model(str(run / "run")).model
    images = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    maps = attribute(capture(model, images), "rollout")
    assert maps.layout.margins == model.patch_embed.margins  # type: ignore[union-attr]
    single = dataclasses.replace(maps, values=torch.zeros(1, 4, 4))
    single.values[0, 1, 2] = 1
    top, left, bottom, right = maps.layout.field((1, 2))
    pixels = single.to_pixels()[0]
    assert (pixels[top:bottom, left:right] > 0).all()
    assert int((pixels > 0).sum()) == (bottom - top) * (right - left)
    uniform = dataclasses.replace(maps, values=torch.ones(1, 4, 4))
    torch.testing.assert_close(uniform.to_pixels(), torch.ones(1, 16, 16))
