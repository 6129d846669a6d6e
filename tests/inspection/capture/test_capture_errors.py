"""What a capture refuses, and that it leaves the model as it was when it fails."""

from typing import Any

import pytest
import timm
import torch
from inspected_models import CLASSES, HF, built, own, timm_model
from model_settings import random_images
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

from vision.inspection.capture.capture import capture
from vision.inspection.capture.captured import CaptureError
from vision.inspection.capture.recording import check_output
from vision.models.attention import attention


def test_capture_of_a_convolutional_network_says_that_there_is_no_attention() -> None:
    with pytest.raises(CaptureError, match="No attention was found in ResNet"):
        capture(timm.create_model("resnet18"), random_images(1, 3, 32, 32))


def test_capture_of_a_compiled_model_says_what_to_pass_instead() -> None:
    model = torch.compile(own("vit_base", (32, 32)), backend="eager")
    with pytest.raises(CaptureError, match=r"before torch\.compile"):
        capture(model, random_images(1, 3, 32, 32))  # type: ignore[arg-type]
    inner = own("vit_base", (32, 32))
    inner.compile(backend="eager")
    with pytest.raises(CaptureError, match=r"before torch\.compile"):
        capture(inner, random_images(1, 3, 32, 32))


def test_capture_of_attention_in_unknown_groups_says_so() -> None:
    model = timm_model("maxvit_rmlp_pico_rw_256", (64, 64))
    with pytest.raises(CaptureError, match="groups of tokens"):
        capture(model, random_images(1, 3, 64, 64))


def test_capture_of_a_softmax_over_the_wrong_axis_is_refused() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 8, 8, stride=8)

        def forward(self, images: Tensor) -> Tensor:
            x = self.patches(images).flatten(2).transpose(1, 2)[:, None]
            return ((x @ x.transpose(-2, -1)).softmax(dim=-2) @ x).mean(dim=(1, 2))

    with pytest.raises(CaptureError, match="do not sum to 1"):
        capture(Wrong(), random_images(1, 3, 16, 16))


def test_output_that_differs_from_the_fused_one_is_refused() -> None:
    class Changing:
        def __call__(self, weights: Tensor) -> Tensor:
            return weights.flip(-1)

        def check(self, explicit: Tensor, fused: Any) -> None:
            check_output("here", explicit, fused())

    q, k, v = random_images(3, 1, 2, 5, 4).unbind(0)
    with pytest.raises(CaptureError, match="not the weights that the model uses"):
        attention(q, k, v, scale=1.0, observer=Changing())


@pytest.mark.parametrize("name", ["own vit", "own swin", "timm vit", "torchvision vit"])
def test_capture_that_fails_midway_leaves_no_hook(name: str) -> None:
    model, images = built(name)
    model.train()

    def fail(*_: Any) -> None:
        raise RuntimeError("midway")

    handle = list(model.modules())[-1].register_forward_pre_hook(fail)
    original = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="midway"):
        capture(model, images)
    handle.remove()
    assert torch.nn.functional.scaled_dot_product_attention is original
    assert all(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any("observer" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": [3]}, "layer 3: this model has 3 attention layers"),
        ({"layers": ["blocks.9.attn"]}, r"layer 'blocks\.9\.attn'"),
        ({"layers": []}, "layers is empty"),
        ({"gradients": True, "targets": CLASSES}, "from 0 to 6"),
        ({"gradients": True, "targets": [1, 2, 3]}, "one target or 2"),
        ({"gradients": True, "reduce": "mean"}, "reduce cannot be combined"),
        ({"reduce": "median"}, "Unknown fusion 'median'"),
    ],
)
def test_capture_with_wrong_arguments_says_what_is_expected(
    arguments: dict[str, Any], message: str
) -> None:
    model, images = built("own vit")
    with pytest.raises(ValueError, match=message):
        capture(model, images, **arguments)


def test_capture_of_a_single_image_without_batch_says_what_is_expected() -> None:
    model, images = built("own vit")
    with pytest.raises(ValueError, match="batch, channels, height, width"):
        capture(model, images[0])
    with pytest.raises(ValueError, match="batch is empty"):
        capture(model, images[:0])


def test_capture_with_gradients_of_a_model_without_head_says_so() -> None:
    settings = {key: value for key, value in HF.items() if key != "num_labels"}
    model = ViTModel(ViTConfig(**settings))
    assert capture(model, random_images(1, 3, 64, 64)).logits is None
    with pytest.raises(ValueError, match="returns no logits"):
        capture(model, random_images(1, 3, 64, 64), gradients=True)
