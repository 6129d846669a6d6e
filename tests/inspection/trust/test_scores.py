"""Numbers of how true maps are, against closed forms, scikit-learn and planted answers."""

import numpy as np
import pytest
import torch
from explained_models import noise, seen
from sklearn.metrics import average_precision_score
from torch import Tensor

from vision.inspection.methods.spec import parse_methods
from vision.inspection.trust.localization import (
    average_precision,
    centre_map,
    energy,
    overlap,
    pointing,
    pooled,
    precision_area,
    random_map,
    separation,
)
from vision.inspection.trust.perturbation import (
    blur,
    curve_area,
    perturb,
    perturbation_area,
    ranked,
)
from vision.inspection.trust.scoring import METRICS, Pair, Sample, score

MASK = np.zeros((4, 4), dtype=bool)
MASK[:2, :2] = True  # a quarter


def test_pointing_of_one_largest_value_is_all_or_nothing() -> None:
    inside, outside = np.zeros((4, 4)), np.zeros((4, 4))
    inside[1, 1], outside[3, 3] = 1, 1
    assert (pointing(inside, MASK), pointing(outside, MASK)) == (1.0, 0.0)


def test_silent_map_counts_as_a_uniform_one() -> None:
    silent = np.zeros((4, 4))
    assert pointing(silent, MASK) == energy(silent, MASK) == 0.25


def test_energy_leaves_negative_values_out() -> None:
    values = np.full((4, 4), -5.0)
    values[0, 0], values[3, 3] = 3, 1
    assert energy(values, MASK) == 0.75


def test_overlap_cuts_at_the_mean_and_pools_counts() -> None:
    values = np.zeros((4, 4))
    values[:2, :3] = 1  # 4 pixels right, 2 too many
    one = overlap(values, MASK)
    assert one.intersections.sum() == 14
    assert one.intersections.tolist() == [10, 4] and one.unions.tolist() == [12, 6]
    both = pooled([one, overlap(MASK.astype(float), MASK)])
    assert both.accuracy == 30 / 32
    assert both.mean_iou == pytest.approx(((10 + 12) / (12 + 12) + (4 + 4) / (6 + 4)) / 2)


@pytest.mark.parametrize("ties", [False, True])
def test_precision_area_equals_scikit_learn(ties: bool) -> None:
    random = np.random.default_rng(0)
    scores = random.random(200)
    scores = np.round(scores, 1) if ties else scores
    truth = random.random(200) < 0.3
    expected = average_precision_score(truth, scores)
    assert precision_area(scores, truth) == pytest.approx(expected, abs=1e-12)


def test_average_precision_joins_object_and_background_as_published() -> None:
    values = np.random.default_rng(1).random((4, 4))
    scaled = (values - values.min()) / (values.max() - values.min())
    truth = np.concatenate([~MASK.ravel(), MASK.ravel()])
    joined = np.concatenate([1 - scaled.ravel(), scaled.ravel()])
    expected = average_precision_score(truth, joined)
    assert average_precision(values, MASK) == pytest.approx(expected, abs=1e-12)
    assert average_precision(MASK.astype(float), MASK) == 1.0


def test_separation_asks_which_object_has_more_and_halves_ties() -> None:
    other = MASK[::-1, ::-1]
    assert separation(MASK * 2.0 + other, MASK, other) == 1.0
    assert separation(MASK * 2.0 + other, other, MASK) == 0.0
    assert separation(np.ones((4, 4)), MASK, other) == 0.5


@pytest.mark.parametrize("metric", [pointing, energy, overlap, average_precision])
def test_metric_without_an_object_or_of_another_size_is_refused(metric: object) -> None:
    with pytest.raises(ValueError, match="empty"):
        metric(np.ones((4, 4)), np.zeros((4, 4), dtype=bool))  # type: ignore[operator]
    with pytest.raises(ValueError, match="do not fit"):
        metric(np.ones((4, 5)), MASK)  # type: ignore[operator]


def test_perturbation_area_of_known_curves_is_pinned() -> None:
    assert perturbation_area(np.ones(11)) == pytest.approx(90)
    gone = np.zeros(11)
    gone[0] = 1
    assert perturbation_area(gone) == pytest.approx(5)  # half of the first tenth
    halves = np.linspace(1, 0, 11)
    assert perturbation_area(halves) == pytest.approx(100 * (0.9 - 0.405))
    assert perturbation_area(np.linspace(1, 0, 5)) == pytest.approx(100 * (0.9 - 0.405))
    assert curve_area(halves) == pytest.approx(0.5)


def planted(images: Tensor) -> Tensor:
    """Says class 1 where the upper left quarter of an image is bright."""
    bright = images[:, :, :8, :8].float().mean((1, 2, 3)) / 255
    return torch.stack([torch.full_like(bright, 0.25), bright], 1) * 20


def curves_of(values: np.ndarray) -> tuple[float, float, float, float]:
    image = torch.full((3, 16, 16), 200, dtype=torch.uint8)
    found = perturb(planted, image, values, 1, steps=10, seed=[0])
    return (
        perturbation_area(found.positive_kept),
        perturbation_area(found.negative_kept),
        curve_area(found.positive),
        curve_area(found.insertion),
    )


def test_perturbation_of_a_planted_answer_prefers_the_true_map() -> None:
    true = np.zeros((16, 16))
    true[:8, :8] = 1
    positive, negative, deletion, _ = curves_of(true)
    noise_positive, noise_negative, noise_deletion, _ = curves_of(random_map((16, 16), [1]))
    false_positive, false_negative, false_deletion, _ = curves_of(1 - true)
    assert positive < noise_positive < false_positive
    assert negative > noise_negative > false_negative
    assert deletion < noise_deletion < false_deletion
    assert negative == pytest.approx(false_positive)  # the same pixels, hidden in the same order


def test_insertion_begins_with_the_blurred_image_and_ends_with_the_whole_one() -> None:
    image = torch.from_numpy(noise((16, 16))[0]).movedim(-1, 0)
    found = perturb(planted, image, random_map((16, 16), [0]), 1, steps=4, seed=[0])
    ends = planted(torch.stack([blur(image), image])).softmax(1)[:, 1]
    assert found.insertion[[0, -1]] == pytest.approx(ends.numpy(), abs=1e-6)
    whole = planted(image[None]).softmax(1)[0, 1]
    assert found.positive[0] == pytest.approx(float(whole), abs=1e-6)


def test_ranked_pixels_of_equal_value_come_in_random_but_repeatable_order() -> None:
    values = np.zeros((4, 4))
    values[2, 2] = 1
    first, again, other = ranked(values, [0]), ranked(values, [0]), ranked(values, [1])
    assert first[0] == 10
    assert (first == again).all() and (first != other).any()
    assert sorted(first) == list(range(16)) and list(first[1:]) != sorted(first[1:])


def test_centre_map_is_largest_in_the_middle_and_symmetric() -> None:
    values = centre_map((5, 7))
    assert np.unravel_index(values.argmax(), values.shape) == (2, 3)
    assert np.allclose(values, values[::-1, ::-1])


def a_mask(size: tuple[int, int] = (32, 32)) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[8:20, 4:16] = True
    return mask


def some_pairs() -> list[Pair]:
    mask = a_mask()
    return [Pair(pixels, (1, 4), (mask, mask[:, ::-1])) for pixels in noise(number=3)]


@pytest.mark.parametrize("name", ["vit_mini", "swin_mini"])
def test_score_has_every_metric_for_baselines_and_methods(name: str) -> None:
    subject = seen(name)
    samples = [Sample(pixels, a_mask()) for pixels in noise(number=3)]
    choices = parse_methods(["rollout", "chefer", "token_gradcam"])
    found = score(subject, samples, choices, pairs=some_pairs(), steps=3, batch_size=2)
    assert list(found) == ["random", "centre", "rollout", "chefer", "token_gradcam"]
    assert all(list(numbers) == list(METRICS) for numbers in found.values())
    assert found["rollout"]["separation"] == found["centre"]["separation"] == 50.0
    assert found["chefer"] != found["rollout"]


def test_score_does_not_depend_on_the_batch_size() -> None:
    subject = seen()
    samples = [Sample(pixels, a_mask()) for pixels in noise(number=3)]
    choices = parse_methods(["rollout", "gradient_rollout:normalize:true"])
    one, three = (
        score(subject, samples, choices, pairs=some_pairs(), steps=2, batch_size=size)
        for size in (1, 3)
    )
    for method, numbers in one.items():
        assert three[method] == pytest.approx(numbers, abs=1e-3)


def test_score_without_masks_has_what_needs_none() -> None:
    samples = [Sample(noise()[0], None)]
    found = score(seen(), samples, parse_methods(["rollout"]), steps=2)
    assert list(found["rollout"]) == ["positive", "negative", "deletion", "insertion"]


def test_score_without_steps_compares_with_masks_only() -> None:
    subject = seen("swin_mini")
    samples = [Sample(pixels, a_mask()) for pixels in noise(number=2)]
    choices = parse_methods(["rollout", "chefer"])
    whole, some = (score(subject, samples, choices, steps=steps) for steps in (2, None))
    for method, numbers in some.items():
        assert list(numbers) == ["pointing", "energy", "pixel_accuracy", "map", "miou"]
        assert all(whole[method][metric] == value for metric, value in numbers.items())
    with pytest.raises(ValueError, match="needs a mask"):
        score(subject, [Sample(noise()[0], None)], choices, steps=None)


def test_score_of_a_headless_model_needs_masks_and_no_steps() -> None:
    subject = seen(classes=0)
    samples = [Sample(noise()[0], a_mask())]
    choices = parse_methods(["rollout"])
    assert "miou" in score(subject, samples, choices, steps=None)["rollout"]
    with pytest.raises(ValueError, match="this model has no classes"):
        score(subject, samples, choices, steps=2)


def test_score_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="No images"):
        score(seen(), [], parse_methods(["rollout"]))
