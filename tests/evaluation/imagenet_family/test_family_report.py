"""Mean corruption error, intervals, and the maps between ImageNet's sets of classes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from timm.data import ImageNetInfo

from vision.data.sources.wordnet import imagenet_synsets, readable_names
from vision.evaluation.imagenet_family.evaluate_family import imagenet_columns, imagenet_logits
from vision.evaluation.imagenet_family.family_report import (
    FamilyModel,
    accuracy_draws,
    paired_difference,
)
from vision.evaluation.imagenet_family.family_sets import CORRUPTIONS, SEVERITIES


def corrupted(scale: float) -> FamilyModel:
    """A model with AlexNet's mean errors, times a factor, spread over the severities."""
    errors = {
        name: {severity: scale * error * severity / 3 for severity in SEVERITIES}
        for name, error in CORRUPTIONS.items()
    }
    return FamilyModel("model", Path("model"), {}, errors)


def test_mean_corruption_error_is_relative_to_alexnet() -> None:
    assert corrupted(1.0).mce == pytest.approx(1)
    assert corrupted(0.5).mce == pytest.approx(0.5)
    # The mean of the errors is not the mean of the relative ones, unless all are scaled alike.
    assert corrupted(0.5).mean_error == pytest.approx(0.5 * np.mean(list(CORRUPTIONS.values())))
    part = dict(list(corrupted(1.0).corruptions.items())[:14])
    assert FamilyModel("model", Path("model"), {}, part).mce is None


def test_errors_of_alexnet_are_those_of_its_five_severities() -> None:
    """Of gaussian and shot noise the five are published as well."""
    gaussian = (0.69528, 0.82542, 0.93554, 0.98138, 0.99452)
    shot = (0.71224, 0.85108, 0.93574, 0.98182, 0.99146)
    assert CORRUPTIONS["gaussian_noise"] == pytest.approx(np.mean(gaussian), abs=5e-7)
    assert CORRUPTIONS["shot_noise"] == pytest.approx(np.mean(shot), abs=5e-7)
    assert len(CORRUPTIONS) == 15


def test_draws_are_those_of_a_bootstrap_over_images() -> None:
    random = np.random.default_rng(0)
    first, second = random.random(400) < 0.8, random.random(400) < 0.7
    draws = accuracy_draws(first, 4000, seed=1)
    assert draws.mean() == pytest.approx(first.mean(), abs=2e-3)
    assert draws.std() == pytest.approx(np.sqrt(first.var() / 400), rel=0.05)
    images = [random.integers(400, size=400) for _ in range(4000)]
    wanted = np.array([first[i].mean() - second[i].mean() for i in images])
    found = paired_difference(first, second, 4000, seed=1)
    assert found.value == pytest.approx(first.mean() - second.mean())
    assert [found.low, found.high] == pytest.approx(np.quantile(wanted, [0.025, 0.975]), abs=5e-3)
    assert not paired_difference(first, first, 100, seed=1).decided


def test_first_thousand_classes_of_microsofts_22k_are_imagenets() -> None:
    columns, notes = imagenet_columns(21842, None, "weights")
    assert columns.tolist() == list(range(1000))
    assert "imagenet-22k-ms" in notes[0]


@pytest.mark.parametrize("classes", [11221, 11821, 21841, 21843])
def test_column_of_a_class_has_its_synset(classes: int) -> None:
    subsets = {11221: "21k-miil", 11821: "12k", 21841: "22k", 21843: "21k-goog"}
    names = ImageNetInfo(f"imagenet-{subsets[classes]}").label_names()
    columns, notes = imagenet_columns(classes, None, "weights")
    for synset, column in zip(imagenet_synsets(), columns.tolist(), strict=True):
        assert names[column] == synset if column >= 0 else synset not in names
    assert f"{(columns < 0).sum()} of the 1,000" in notes[1]


def test_classes_are_matched_by_synset_or_readable_name_in_any_order() -> None:
    synsets = imagenet_synsets()
    order = np.random.default_rng(0).permutation(1000)
    shuffled = [synsets[i] for i in order]
    for names in (shuffled, readable_names(tuple(shuffled))):
        columns, notes = imagenet_columns(1000, names, "weights")
        assert [shuffled[column] for column in columns] == list(synsets) and not notes


def test_logits_of_other_classes_never_win() -> None:
    columns = torch.full((1000,), -1)
    columns[[5, 7]] = torch.tensor([1, 0])
    logits = imagenet_logits(torch.tensor([[3.0, 1.0, 9.0]]), columns)
    assert logits[0, [5, 7]].tolist() == [1.0, 3.0] and logits.isinf().sum() == 998
    assert imagenet_logits(torch.tensor([[3.0, 1.0, 9.0]]), columns, (5, 6)).argmax() == 5
