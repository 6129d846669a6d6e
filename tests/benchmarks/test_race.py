"""The contenders of benchmarks/race.py: their settings, and the budgets that they share."""

import argparse
from pathlib import Path

import pytest
import race
import race_changes
import race_rivals
import torch
from model_settings import model_config
from torch import nn
from training_loops import training_config

from vision.models.build import build_model
from vision.models.cost.count import ModelCost, cost
from vision.models.stems import ConvStem
from vision.models.vit import ViT
from vision.training import loop


def counted(contender: str) -> ModelCost:
    words = [*race.CONTENDERS[contender], "data=cifar10"]
    return cost(training_config(words).model, (32, 32), classes=10)  # type: ignore[arg-type]


def test_small_cnn_has_the_operations_of_the_vit_with_a_conv_stem() -> None:
    assert race_rivals.race_cnn().num_features == 144
    cnn, ours = counted("small CNN"), counted("ViT, conv stem")
    assert cnn.macs == pytest.approx(ours.macs, rel=0.03)
    assert cnn.parameters < ours.parameters


@pytest.mark.parametrize("change", [name for name, words in race.ABLATIONS.items() if words])
def test_every_ablation_changes_the_recipe(change: str) -> None:
    words = [*race.CONTENDERS["ViT, conv stem"], "data=cifar10"]
    assert training_config([*words, *race.ABLATIONS[change]]) != training_config(words)


def test_ablations_without_settings_are_changes_of_code() -> None:
    without = {name for name, words in race.ABLATIONS.items() if not words}
    assert without == {"fast recipe", *race_changes.CHANGES}


def test_tokens_are_dropped_and_images_grow_in_training_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_encode", "forward_features"):
        monkeypatch.setattr(ViT, name, getattr(ViT, name))
    race_changes.drop_tokens(4)
    race_changes.grow_images(4)
    model = build_model(model_config("vit_fast"), (32, 32), classes=10)
    seen: list[int] = []
    assert isinstance(model, ViT)
    model.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    images = torch.zeros(2, 3, 32, 32)
    for _ in range(4):
        model.train()(images)
    model.eval()(images)
    assert seen == [27, 27, 48, 48, 64]


def test_lookahead_goes_half_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_one(state: argparse.Namespace, _: None) -> None:
        with torch.no_grad():
            state.model.weight += 1

    monkeypatch.setattr(loop, "update", add_one)
    race_changes.look_ahead(7)
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    weights = []
    for _ in range(7):
        loop.update(argparse.Namespace(model=model), None)  # type: ignore[arg-type]
        weights.append(model.weight.item())
    assert weights == [1, 2, 3, 4, 2.5, 3.5, 3.5]


def test_batch_norm_takes_the_place_of_layer_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "init_weights"):
        monkeypatch.setattr(ConvStem, name, getattr(ConvStem, name))
    race_changes.use_batch_norm(1)
    model = build_model(model_config("vit_fast"), (32, 32), classes=10)
    norms = [module for module in model.patch_embed.modules() if isinstance(module, nn.BatchNorm1d)]
    assert norms
    before = norms[0].running_mean.clone()
    model.train()(torch.rand(2, 3, 32, 32))
    assert not before.equal(norms[0].running_mean)


def test_epoch_costs_what_it_did_in_the_longest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = argparse.Namespace()
    points = [
        {"contender": "a", "epochs": 0.5, "minutes": 2.0},
        {"contender": "a", "epochs": 2.0, "minutes": 6.0},
        {"contender": "b", "epochs": 9.0, "minutes": 9.0},
    ]
    assert race.cost_of_an_epoch("a", points, nothing) == 3
    steps = {"epochs": 0.05, "minutes": 0.2}
    monkeypatch.setattr(race, "in_a_process", lambda key, _: steps)
    assert race.cost_of_an_epoch("c", points, nothing) == pytest.approx(4)


def test_figure_is_drawn_from_points_of_some_contenders(tmp_path: Path) -> None:
    names = ["ViT, conv stem", "small CNN"]
    points = [
        {"contender": name, "budget": budget, "minutes": 1.02 * budget, "top1": 0.6 + budget / 50}
        for name in names
        for budget in (1, 2)
    ]
    race.draw(points, tmp_path / "race.png")
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
