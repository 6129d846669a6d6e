"""Gathering answers over processes, and models of another geometry."""

from typing import Any

import pytest
import torch
from model_settings import small_model
from test_evaluate import CLASSES, CPU, SAMPLES, loader, plain_logits, preprocess
from torch import Tensor

from vision.config import ConfigError
from vision.data.batches import evaluation_batches
from vision.data.configs import PreprocessConfig
from vision.evaluation.classes import match_classes
from vision.evaluation.predictions import Predictions, predict

AUTO = PreprocessConfig(mean="auto", std="auto", interpolation="auto", crop_ratio="auto")


def run(model: Any, batches: Any, **options: Any) -> Predictions:
    return predict(model, batches, SAMPLES, preprocess(), CLASSES, CPU, "fp32", **options)


@pytest.mark.parametrize("family", ["vit_tiny", "swin_tiny"])
@pytest.mark.parametrize(("batch_size", "ranks"), [(1, 1), (16, 1), (7, 2), (64, 3), (1, 4)])
def test_answers_over_any_processes_are_those_of_a_plain_pass(
    family: str, batch_size: int, ranks: int
) -> None:
    """Processes run one after the other here; each adds its part to what the others left."""
    model = small_model(family, (32, 32))
    kept: list[list[Tensor]] = []
    source, found = loader(), None
    for rank in range(ranks):
        call = iter(range(10))

        def reduce(tensor: Tensor, call: Any = call) -> Tensor:
            place = next(call)
            kept.extend([[]] * 0 if place < len(kept) else [[]])
            kept[place].append(tensor.clone())
            return torch.stack(kept[place]).sum(0)

        batches = evaluation_batches(source, batch_size, rank, ranks)
        found = run(model, batches, reduce=reduce, keep_features=True)
    assert found is not None and found.features is not None
    logits, _ = plain_logits(model)
    assert torch.equal(found.ids, torch.arange(SAMPLES))
    assert torch.allclose(found.logits, logits, atol=1e-5)
    assert torch.equal(found.logits.argmax(1), logits.argmax(1))
    assert torch.allclose(model.head(found.features), logits, atol=1e-5)


def test_image_that_cannot_be_read_has_no_answer() -> None:
    model = small_model("vit_tiny", (32, 32))
    found = run(model, evaluation_batches(loader(broken=True), 16))
    assert found.ids.tolist() == list(range(SAMPLES - 1))
    assert torch.allclose(found.logits, plain_logits(model)[0][:-1], atol=1e-5)


def test_flipped_views_are_averaged_as_probabilities() -> None:
    model = small_model("vit_tiny", (32, 32)).eval()
    found = run(model, evaluation_batches(loader(), 16), augmentation="flip")
    plain, seen = plain_logits(model)[0], []
    handle = model.register_forward_pre_hook(lambda _, inputs: (inputs[0].flip(-1),))
    seen.append(plain_logits(model)[0])
    handle.remove()
    expected = (plain.softmax(1) + seen[0].softmax(1)) / 2
    assert torch.allclose(found.logits.softmax(1), expected, atol=1e-6)
    assert not torch.allclose(expected, plain.softmax(1), atol=1e-3)


def test_speed_leaves_out_the_first_batch_and_counts_images() -> None:
    model = small_model("vit_tiny", (32, 32))
    assert run(model, evaluation_batches(loader(), SAMPLES)).speed.model is None
    speed = run(model, evaluation_batches(loader(), 10)).speed
    assert speed.model is not None and speed.model > speed.total > 0


def test_classes_in_the_same_order_need_no_note() -> None:
    mapping, note = match_classes(("a", "b"), ("a", "b"), "x")
    assert mapping.tolist() == [0, 1] and note is None


def test_classes_are_matched_by_name() -> None:
    mapping, note = match_classes(("a", "b", "c"), ("c", "a"), "x")
    assert mapping.tolist() == [2, 0] and note is not None and "2 of the 3 classes" in note


def test_classes_of_one_name_cannot_be_matched() -> None:
    equal = ("crane", "crane", "b")
    assert match_classes(equal, equal, "x")[0].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="several classes of the name crane"):
        match_classes(equal, ("b", "crane"), "x")
