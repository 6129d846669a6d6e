"""A model without a head returns features: no map, figure or page may take them for classes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from explained_models import Seen, noise, seen
from explorer_pages import read_page
from inspected_models import HF, own, timm_model, torchvision_swin, transformers_model, verified
from model_settings import random_images, redraw
from PIL import Image
from torch import nn
from torchvision.models import VisionTransformer
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

from vision.config import ConfigError
from vision.inspection.capture.capture import capture
from vision.inspection.explain import class_numbers, default_methods, explain
from vision.inspection.explorer.page import write_page
from vision.inspection.figures.sheet import overlay_sheet
from vision.inspection.methods.attribution import attribute, methods_of
from vision.inspection.methods.spec import parse_methods


def torchvision_vit() -> Any:
    model = redraw(VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=7)).eval()
    model.heads = nn.Identity()
    return model


def headless_torchvision_swin() -> Any:
    model = torchvision_swin(1)
    model.head = nn.Identity()
    return model


def dinov2() -> Any:
    settings = {key: value for key, value in HF.items() if key != "num_labels"}
    config = Dinov2WithRegistersConfig(**settings, num_register_tokens=4)
    return redraw(Dinov2WithRegistersModel(config)).eval()


SWIN = {"window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
HEADLESS: dict[str, Callable[[], Any]] = {
    "own vit": lambda: own("vit_base", (64, 64), classes=0),
    "own swin": lambda: own("swin_tiny", (64, 64), classes=0),
    "own vit registers": lambda: own("vit_base", (64, 64), classes=0, registers=4),
    "timm vit": lambda: timm_model("vit_tiny_patch16_224", (64, 64), depth=2, num_classes=0),
    "timm dinov2": lambda: timm_model(
        "vit_small_patch14_reg4_dinov2", (56, 56), depth=1, num_classes=0
    ),
    "timm swin": lambda: timm_model(
        "swin_tiny_patch4_window7_224", (64, 64), **SWIN, num_classes=0
    ),
    "torchvision vit": torchvision_vit,
    "torchvision swin": headless_torchvision_swin,
    "transformers dinov2": dinov2,
    "transformers without labels": lambda: transformers_model("ViT", HF | {"num_labels": 0}),
}


def size_of(name: str) -> int:
    return 56 if name == "timm dinov2" else 64


@pytest.mark.parametrize("name", HEADLESS)
def test_headless_model_has_methods_without_a_class_and_no_others(name: str) -> None:
    model = HEADLESS[name]()
    images = random_images(1, 3, size_of(name), size_of(name))
    captured = verified(model, images)
    assert captured.logits is None
    able = {method for method, reason in methods_of(captured).items() if reason is None}
    assert able == {"attention", "rollout", "norm", "pca"}
    for method in sorted(able):
        assert attribute(captured, None, method).values.isfinite().all()
    for method in ("chefer", "token_gradcam", "cam"):
        with pytest.raises(ValueError, match="no logits"):
            attribute(model, images, method)


@pytest.mark.parametrize("name", ["own vit", "timm vit", "timm swin", "torchvision swin"])
def test_sheet_of_a_headless_model_shows_no_class(name: str) -> None:
    about = seen(size=(64, 64))
    subject = Seen(HEADLESS[name](), (), about.preprocess)
    explanation = explain(subject, noise((64, 64)))[0]
    assert explanation.top == () and all(
        heatmap.explained is None for heatmap in explanation.heatmaps
    )
    assert len(explanation.heatmaps) == 3
    drawing = overlay_sheet([explanation])
    words = " ".join(
        text.get_text() for text in drawing.figure.findobj(lambda o: hasattr(o, "get_text"))
    )
    assert "%" not in words.replace("% on other tokens", "") and "class " not in words
    assert "has no classes" in drawing.caption.text()
    with pytest.raises(ConfigError, match=r"chefer is not available .*no logits"):
        explain(subject, noise((64, 64)), parse_methods(["chefer"]))


@pytest.mark.parametrize("name", ["own swin", "timm dinov2", "transformers dinov2"])
def test_page_of_a_headless_model_has_no_classes(name: str, tmp_path: Path) -> None:
    size = size_of(name)
    image = random_images(1, 3, size, size)
    write_page(HEADLESS[name](), image, Image.new("RGB", (size, size)), tmp_path / "page.html")
    header, _ = read_page(tmp_path / "page.html")
    assert header["classes"] == [] and header["maps"]


def test_layers_of_a_wrapper_after_a_headless_model_are_its_head() -> None:
    inner = HEADLESS["own vit"]()
    model = nn.Sequential(inner, nn.Linear(inner(random_images(1, 3, 64, 64)).shape[1], 5))
    captured = capture(model, random_images(1, 3, 64, 64), targets=3, gradients=True)
    assert captured.logits is not None and captured.logits.shape == (1, 5)
    assert "chefer" in {str(choice) for choice in default_methods(captured)}


def test_classes_that_are_asked_of_a_headless_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no head"):
        class_numbers(["cat"], ())
