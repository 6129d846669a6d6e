"""Gathering answers over processes, and models of another geometry."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_settings import model_config, small_model
from test_evaluate import CLASSES, CPU, SAMPLES, Pictures, loader, plain_logits, preprocess
from torch import Tensor

from vision.config import ConfigError, parse
from vision.data.configs import PreprocessConfig, ShapesConfig
from vision.data.loader import evaluation_batches
from vision.evaluation.geometry import cost_of, with_geometry
from vision.evaluation.labels import match_classes
from vision.evaluation.predictions import Predictions, predict
from vision.evaluation.stored import Stored
from vision.models.build import build_model
from vision.models.configs import TimmConfig

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


def test_picture_that_cannot_be_read_has_no_answer() -> None:
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


def test_speed_leaves_out_the_first_batch_and_counts_pictures() -> None:
    model = small_model("vit_tiny", (32, 32))
    assert run(model, evaluation_batches(loader(), SAMPLES)).speed.model is None
    speed = run(model, evaluation_batches(loader(), 10)).speed
    assert speed.model is not None and speed.model > speed.total > 0


def stored(name: str, size: int = 32, **changes: Any) -> Stored:
    values = {"kind": "shapes", "image_size": 32, "seed": 0, "samples_per_class": None}
    values |= {"train_fraction": 1.0, "sampling": "uniform", "on_error": "raise"}
    values |= {"max_error_share": 0.0, "train_samples": 8, "val_samples": 8, "test_samples": 8}
    return Stored(
        path=Path("x"),
        step=1,
        weights="raw",
        model=small_model(name, (size, size), **changes).eval(),
        preprocess=replace(preprocess(), image_size=(size, size)),
        classes=Pictures().classes,
        data=parse(ShapesConfig, values),
    )


@pytest.mark.parametrize("name", ["swin_tiny", "swinv2_tiny"])
def test_same_window_changes_nothing_and_another_one_is_used(name: str) -> None:
    before = stored(name)
    images = torch.randn(2, 3, 32, 32)
    same = with_geometry(before, None, 4, AUTO).model
    with torch.no_grad():
        assert torch.equal(same(images), before.model(images))
        other = with_geometry(before, None, 8, AUTO).model
        assert other.windows[0] == (8, 8)  # type: ignore[union-attr, index]
        assert not torch.allclose(other(images), before.model(images), atol=1e-4)
    untouched = {k: v for k, v in before.model.state_dict().items() if "bias_table" not in k}
    assert all(torch.equal(other.state_dict()[k], v) for k, v in untouched.items())


def test_swin_v2_with_another_window_keeps_the_distances_of_its_training() -> None:
    before = stored("swinv2_tiny")
    other = with_geometry(before, None, 8, AUTO).model
    trained = tuple(height for height, _ in before.model.windows)  # type: ignore[union-attr]
    config = model_config("swinv2_tiny", **SMALL_V2, window=8, pretrained_window=trained)
    expected = build_model(config, (32, 32), classes=CLASSES)
    expected.load_state_dict(before.model.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(other(images), expected.eval()(images), atol=1e-6)


SMALL_V2: dict[str, Any] = {"patch_size": 2, "width": 16, "depths": [2, 3, 2], "heads": [2, 2, 4]}


@pytest.mark.parametrize("name", ["vit_tiny", "swin_tiny"])
def test_pictures_of_another_size_leave_the_model_as_it_is(name: str) -> None:
    before = stored(name)
    given = AUTO.model_copy(update={"crop_ratio": 0.5, "mean": (0.1, 0.2, 0.3)})
    after = with_geometry(before, (48, 40), None, given)
    assert after.model is before.model
    assert after.preprocess.image_size == (48, 40) and after.preprocess.crop_ratio == 0.5
    assert after.preprocess.mean == (0.1, 0.2, 0.3)
    assert after.preprocess.std == before.preprocess.std


def test_pictures_of_another_size_are_refused_for_a_timm_model_of_one_size() -> None:
    values = {"kind": "timm", "name": "deit_tiny_patch16_224", "drop_path": None}
    config = parse(TimmConfig, values | {"checkpoint_activations": False})
    before = replace(stored("vit_tiny"), model=build_model(config, (32, 32), classes=CLASSES))
    assert with_geometry(before, 32, None, AUTO).preprocess.image_size == (32, 32)
    with pytest.raises(
        ConfigError, match="deit_tiny_patch16_224 of timm does not take pictures of 48 × 48"
    ):
        with_geometry(before, 48, None, AUTO)


@pytest.mark.parametrize("name", ["vit_tiny", "swin_tiny", "swinv2_tiny"])
def test_parameters_and_multiplications_are_those_of_the_model(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    found = cost_of(stored(name, attention_dropout=0.0))
    model = stored(name).model
    assert found.parameters == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert found.macs is not None
    # The counter leaves out fused attention on a CPU, or counts it: it is a small part here.
    assert found.macs == pytest.approx(counter.get_total_flops() / 2, rel=0.15)


def test_multiplications_are_unknown_where_windows_were_cut_to_a_smaller_grid() -> None:
    small = stored("swin_tiny", window=16)
    assert cost_of(small).macs is not None
    assert cost_of(with_geometry(small, 64, None, AUTO)).macs is None


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
