"""Gathering answers over processes, and models of another geometry."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_settings import small_model
from test_evaluate import CLASSES, CPU, SAMPLES, loader, plain_logits, preprocess
from torch import Tensor

from vision.config import ConfigError, parse
from vision.data.batches import evaluation_batches
from vision.data.preprocess import normalizer
from vision.data.sources.source import Source
from vision.evaluation.evaluate import Predictions, predict
from vision.evaluation.evaluated_model import match_classes
from vision.models.build import build_model
from vision.models.configs import TimmConfig


def run(model: Any, batches: Any, **options: Any) -> Predictions:
    return predict(model, batches, SAMPLES, preprocess(), CLASSES, CPU, "fp32", **options)


@pytest.mark.parametrize(
    ("family", "batch_size", "ranks"),
    [
        ("vit_tiny", 1, 1),
        ("swin_tiny", 16, 1),
        ("vit_tiny", 7, 2),
        ("swin_tiny", 64, 3),
        ("swin_tiny", 1, 4),
    ],
)
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


def test_features_of_a_timm_model_are_its_pooled_ones() -> None:
    values = {"kind": "timm", "name": "resnet18", "drop_path": None}
    config = parse(TimmConfig, values | {"checkpoint_activations": False})
    model = build_model(config, (32, 32), classes=CLASSES).eval()
    found = run(model, evaluation_batches(loader(), SAMPLES), keep_features=True).features
    assert found is not None
    (batch,) = evaluation_batches(loader(), SAMPLES)
    with torch.no_grad():
        features = model.model.forward_features(normalizer(preprocess(), CPU)(batch.images))  # type: ignore[operator, union-attr]
        expected = model.model.forward_head(features, pre_logits=True)  # type: ignore[operator, union-attr]
    assert torch.equal(found, expected)


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


def test_flips_at_test_time_are_predicted_beside_the_images_as_they_are() -> None:
    model = small_model("vit_tiny", (32, 32))
    usual = run(model, evaluation_batches(loader(), 16))
    found = run(model, evaluation_batches(loader(), 16), flip_test=True)
    assert torch.equal(found.logits, usual.logits)
    averaged = run(model, evaluation_batches(loader(), 16), augmentation="flip")
    assert found.flipped is not None
    assert torch.equal(found.flipped, averaged.logits)
    assert usual.flipped is None


def test_speed_leaves_out_the_first_batch_and_counts_images() -> None:
    model = small_model("vit_tiny", (32, 32))
    assert run(model, evaluation_batches(loader(), SAMPLES)).speed.model is None
    speed = run(model, evaluation_batches(loader(), 10)).speed
    assert speed.model is not None and speed.model > speed.total > 0


def a_source(*classes: str) -> Source:
    """A source with an image of each class."""
    return SimpleNamespace(  # type: ignore[return-value]
        classes=classes, labels=np.arange(len(classes)), multi_label=False
    )


def test_classes_in_the_same_order_need_no_note() -> None:
    labels, note = match_classes(("a", "b"), a_source("a", "b"), "x")
    assert labels.tolist() == [0, 1] and note is None


def test_classes_are_matched_by_name() -> None:
    labels, note = match_classes(("a", "b", "c"), a_source("c", "a"), "x")
    assert labels.tolist() == [2, 0] and note is not None and "2 of the 3 classes" in note


def test_classes_of_one_name_cannot_be_matched() -> None:
    equal = ("crane", "crane", "b")
    assert match_classes(equal, a_source(*equal), "x")[0].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="several classes named crane"):
        match_classes(equal, a_source("b", "crane"), "x")
