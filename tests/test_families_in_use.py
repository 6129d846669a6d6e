"""Weights of each family are fine-tuned with every recipe, and their attention is seen."""

from pathlib import Path

import pytest
import torch
from inspected_models import verified
from layout_catalogue import CASES, FAMILIES

import vision
from vision.cli.app import main
from vision.inspection.capture.capture import capture
from vision.inspection.methods.attribution import attribute

RECIPES = ("finetune", "probe", "probe_then_finetune", "partial", "lora", "bitfit")
QUICK = (
    *("data=shapes", "data.image_size=32", "data.train_samples=16", "data.val_samples=8"),
    *("batch_size=8", "duration=2steps", "evaluate_every=2steps", "checkpoint.every=2steps"),
    *("schedule.warmup=0steps", "loader.workers=0", "device=cpu"),
)


def fine_tune(name: str, recipe: str, folder: Path) -> None:
    """Two steps with a recipe, and the run opens again."""
    weights = folder / "weights"
    weights.mkdir()
    written = CASES[name].write(weights)
    given = [f"model.{key}={value}" for key, value in written.given.items()]
    words = [f"recipe={recipe}", "model=auto", f"init={written.place}", *given, *QUICK]
    if recipe == "partial":
        words.append("tune.blocks=1")
    if recipe == "probe_then_finetune":
        words.append("probe_first.duration=2steps")
    assert main(["train", *words, f"output={folder}", "name=run"]) == 0
    opened = vision.load(folder / "run").opened
    assert opened.classes == 8
    assert opened.config.kind == vision.load(written.place, **written.given).opened.config.kind


@pytest.mark.parametrize("name", ["timm DINOv3, biases", "timm SigLIP", "timm BEiT"])
def test_family_is_fine_tuned(name: str, tmp_path: Path) -> None:
    fine_tune(name, "lora", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_fine_tuned_with_every_recipe(name: str, recipe: str, tmp_path: Path) -> None:
    fine_tune(name, recipe, tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_of_a_family_is_captured_and_rolled_out(name: str, tmp_path: Path) -> None:
    written = CASES[name].write(tmp_path)
    loaded = vision.load(written.place, **written.given)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, *loaded.preprocess.image_size, generator=generator)
    captured = verified(loaded.model, images)
    with torch.no_grad():
        torch.testing.assert_close(captured.logits, loaded.model(images), atol=1e-4, rtol=1e-4)
    for layer in captured.layers:
        sums = layer.weights.sum(dim=-1)
        assert torch.allclose(sums[sums > 0], torch.ones(()), atol=1e-4)
    maps = attribute(captured, "rollout")
    assert torch.isfinite(maps.values).all() and (maps.values >= 0).all()
    total = maps.values.flatten(1).sum(dim=1)
    assert ((total > 0) & (total <= 1 + 1e-4)).all()


def test_rollout_of_an_attention_pooling_starts_with_what_it_looks_at(tmp_path: Path) -> None:
    written = CASES["timm SigLIP"].write(tmp_path)
    model = vision.load(written.place).model
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    captured = capture(model, images)
    pool = written.peer.attn_pool
    with torch.no_grad():
        tokens = written.peer.forward_features(images)
        heads, width = pool.num_heads, pool.head_dim
        query = pool.q(pool.latent).reshape(1, 1, heads, width).transpose(1, 2)
        keys = pool.kv(tokens).reshape(2, -1, 2, heads, width)[:, :, 0].transpose(1, 2)
        weights = (query @ keys.transpose(-2, -1) * pool.scale).softmax(dim=-1)
    assert captured.pooling is not None
    torch.testing.assert_close(captured.pooling, weights.mean(dim=1)[:, 0], atol=1e-5, rtol=1e-4)
