"""The contenders of benchmarks/race.py: their settings, and the budgets that they share."""

import argparse
from pathlib import Path

import pytest
import race
import race_rivals
from training_loops import training_config

from vision.models.cost.count import ModelCost, cost


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
