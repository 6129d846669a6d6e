"""One door to all methods."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
from explained_models import noise, seen
from inspected_models import MODELS, built, dense
from model_settings import random_images

from vision.config import ConfigError
from vision.inspection.capture.capture import capture
from vision.inspection.capture.captured import CaptureError
from vision.inspection.explain import explain
from vision.inspection.methods.attribution import attribute, methods_of
from vision.inspection.methods.layer_maps import cam_seed
from vision.inspection.methods.rollout import chefer, rollout, seed_of
from vision.inspection.methods.spec import METHODS, parse_methods


@pytest.mark.parametrize("name", MODELS)
def test_every_method_of_every_model_gives_a_map_or_says_why_not(name: str) -> None:
    model, images = built(name)
    captured = capture(model, images, gradients=True)
    for layer in captured.layers:
        assert layer.inputs_gradient is not None and layer.inputs_gradient.abs().max() > 0
    reasons = methods_of(captured)
    assert reasons == methods_of(model) and reasons.keys() == METHODS.keys()
    pooled = captured.anatomy.pool == "mean"
    assert [m for m, reason in reasons.items() if reason] == (
        [] if pooled else ["cam", "cam_rollout"]
    )
    for method, reason in reasons.items():
        if reason:
            with pytest.raises(ValueError, match=f"{method} is not available"):
                attribute(captured, method=method)
            continue
        maps = attribute(captured, method=method)
        assert maps.values.shape == (2, *maps.layout.grid)
        assert bool(maps.values.isfinite().all())
        # Grad-CAM on random weights may find no cell with a positive sum.
        assert maps.values.std() > 0 or "gradcam" in method
        if METHODS[method].distribution:
            total = maps.values.sum(dim=(1, 2)) + sum(maps.prefix.values())
            if method != "attention":  # padding takes its share where a library lets it
                assert torch.allclose(total, torch.ones(()), atol=1e-4)
        assert maps.to_pixels().shape == (2, *captured.layout.image_size)
        assert (maps.targets is not None) == METHODS[method].for_class


@pytest.mark.parametrize("method", METHODS)
def test_method_from_a_model_equals_the_same_from_a_capture(method: str) -> None:
    model, images = built("own swin padded")
    target = [1, 3] if METHODS[method].for_class else None
    whole = capture(model, images, gradients=True, targets=target)
    found = attribute(model, images, method, target=target)
    expected = attribute(whole, method=method, target=target)
    assert torch.allclose(found.values, expected.values, atol=1e-6)
    assert found.layer == expected.layer and found.choice.name == method


def test_maps_are_those_of_the_functions_behind_them() -> None:
    model, images = built("own swin padded")
    captured = capture(model, images, targets=[1, 3], gradients=True)
    layout = captured.layers[0].layout
    targets = torch.tensor([1, 3])

    def same(found: Any, rows: Any, at: Any = layout) -> bool:
        return torch.equal(found.values, at.to_grid(rows[:, 0]))

    seed, cam = seed_of(captured), cam_seed(captured, targets)
    assert same(attribute(captured, method="rollout"), rollout(captured, seed))
    assert same(attribute(captured, method="cam_rollout", target=[1, 3]), rollout(captured, cam))
    assert same(
        attribute(captured, method="rollout", query="cam", target=[1, 3]), rollout(captured, cam)
    )
    assert same(attribute(captured, method="chefer", query="cam"), chefer(captured, cam))
    second = captured.layers[-1].layout
    found = attribute(captured, method="rollout", start_layer=captured.depth - 1, query=(1, 1))
    rows = rollout(captured, seed_of(captured, (1, 1)), start_layer=captured.depth - 1)
    assert same(found, rows, second) and found.query == "(1, 1)"


@pytest.mark.parametrize("head", ["mean", "max", 1])
def test_raw_attention_is_the_row_of_the_query(head: Any) -> None:
    for name, place in (("own vit registers", "register 2"), ("own swin padded", (2, 1))):
        captured = capture(*built(name))
        found = attribute(captured, method="attention", layer=1, head=head, query=place)  # type: ignore
        layer = captured.layers[1]
        weights = dense(layer)[:, :, layer.layout.query(place)]  # type: ignore[arg-type]
        expected = {"mean": weights.mean(dim=1), "max": weights.amax(dim=1), 1: weights[:, 1]}
        assert torch.allclose(found.values, layer.layout.to_grid(expected[head]), atol=1e-7)
        assert found.layer == layer.name
        assert found.uniform == pytest.approx(1 / layer.layout.keys(place))  # type: ignore[arg-type]


def test_units_are_multiples_of_a_uniform_map() -> None:
    captured = capture(*built("own vit"))
    found = attribute(captured, method="attention")
    tokens = captured.layout.tokens
    assert torch.allclose(found.times_uniform(), found.values * tokens)
    model, images = built("own swin")
    scores = attribute(model, images, "cam").times_uniform()
    assert scores.clamp(min=0).mean(dim=(1, 2)).tolist() == pytest.approx([1, 1])


def test_pixels_of_a_map_show_each_cell_where_it_lies() -> None:
    captured = capture(*built("own vit"))
    found = attribute(captured, method="attention")
    pixels = found.to_pixels("nearest")
    for y, x in ((0, 0), (4, 3), (2, 1)):
        top, left, bottom, right = found.layout.box((y, x))
        assert torch.all(pixels[0, top:bottom, left:right] == found.values[0, y, x])


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("rolout", {}, r"'rolout'\. Did you mean 'rollout'\?"),
        ("rollout", {"discrad": 0.1}, r"'discrad'\. Did you mean 'discard'\?"),
        ("cam_rollout", {"query": (0, 0)}, "has no query"),
        ("attention", {"layer": 9}, "Unknown layer 9"),
        ("attention", {"head": 7}, "head 7"),
        ("attention", {"query": "class"}, r"token 'class'\. Prefix tokens of this model: none"),
        ("attention", {"query": (99, 0)}, "outside the grid"),
        ("cam", {"target": 7}, "from 0 to 6"),
    ],
)
def test_wrong_request_says_what_there_is(
    method: str, options: dict[str, Any], message: str
) -> None:
    model, images = built("own swin")
    with pytest.raises(ValueError, match=message):
        attribute(model, images, method, **options)


def test_gradients_of_another_class_are_not_passed_off() -> None:
    captured = capture(*built("own vit"), targets=1, gradients=True)
    with pytest.raises(ValueError, match="capture again with these targets"):
        attribute(captured, method="chefer", target=2)
    with pytest.raises(ValueError, match="gradients=True"):
        attribute(capture(*built("own vit")), method="chefer")


def test_targets_of_a_capture_are_those_of_its_maps() -> None:
    model, images = built("own swin")
    captured = capture(model, images, targets=[5, 0])
    found = attribute(captured, method="cam")
    assert found.targets is not None and found.targets.tolist() == [5, 0]
    assert torch.equal(found.values, attribute(model, images, "cam", target=[5, 0]).values)
    with pytest.raises(ValueError, match="gradients=True"):
        attribute(captured, method="chefer")


def test_methods_of_a_convolutional_network_are_refused() -> None:
    with pytest.raises(CaptureError, match="No attention was found"):
        attribute(timm.create_model("resnet18"), random_images(1, 3, 32, 32), "rollout")
    with pytest.raises(ValueError, match="needs images"):
        attribute(timm.create_model("resnet18"), method="rollout")


def test_head_from_the_end_is_the_last_one() -> None:
    subject, pixels = seen(), noise()
    texts = ["attention:layer:0:head:-1", "attention:layer:0:head:2"]
    last, third = explain(subject, pixels, parse_methods(texts))[0].heatmaps
    assert np.array_equal(last.values, third.values)
    with pytest.raises(ConfigError, match="head -4"):
        explain(subject, pixels, parse_methods(["attention:layer:0:head:-4"]))
