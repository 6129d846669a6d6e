"""Maps of the last tokens: exact parts of logits, components, norms."""

import pytest
import torch
from inspected_models import built, made_capture, made_layer
from model_settings import random_images
from sklearn.decomposition import PCA

from vision.inspection.capture.capture import capture
from vision.inspection.capture.token_layout import Layout
from vision.inspection.methods.layer_maps import (
    feature_components,
    logit_parts,
    norm_outliers,
    token_norms,
)

POOLED = [
    "own swin",
    "own swin padded",
    "own swin v2",
    "own vit mean",
    "timm swin",
    "timm eva rotary",
    "torchvision swin v2",
    "transformers swin",
    "transformers swin v2",
]


@pytest.mark.parametrize("name", POOLED)
def test_parts_of_a_pooled_logit_make_it_up(name: str) -> None:
    captured = capture(*built(name))
    assert captured.logits is not None and captured.anatomy.head is not None
    for number in (0, 5):
        parts = logit_parts(captured, torch.tensor([number, number]), centred=False)
        bias = captured.anatomy.head.bias[number]
        assert torch.allclose(parts.sum(dim=1) + bias, captured.logits[:, number], atol=1e-4)
        assert parts.std() > 1e-4


def test_centred_parts_of_all_classes_cancel() -> None:
    captured = capture(*built("own swin"))
    parts = [logit_parts(captured, torch.tensor([c, c]), centred=True) for c in range(7)]
    assert torch.stack(parts).sum(dim=0).abs().max() < 1e-5


def test_parts_of_a_logit_of_a_class_token_are_refused() -> None:
    captured = capture(*built("own vit"))
    with pytest.raises(ValueError, match="needs a linear head on the mean of the tokens"):
        logit_parts(captured, torch.tensor([0, 0]), centred=True)


def test_feature_components_equal_scikit_learns_up_to_sign() -> None:
    captured = capture(*built("own vit registers"))
    found = feature_components(captured, 3)
    assert found.shape == (2, 5, 4, 3)
    assert captured.tokens is not None and captured.anatomy.norm is not None
    with torch.no_grad():
        cells = captured.anatomy.norm(captured.tokens)[:, 3:].flatten(0, 1)
    expected = torch.from_numpy(PCA(3).fit_transform(cells.numpy())).view(2, 5, 4, 3)
    assert torch.allclose(found.abs(), expected.abs(), atol=1e-3)
    for k in range(3):
        component = found[..., k]
        assert component.abs().max() == component.max()


def test_norms_flag_a_planted_outlier_and_nothing_else() -> None:
    layout = Layout(("class",), (4, 5), (8, 8), (32, 40))
    tokens = torch.nn.functional.normalize(random_images(2, 21, 16), dim=-1)
    tokens = tokens * (10 + random_images(2, 21, 1, seed=3).clamp(-1, 1))
    tokens[1, 1 + 2 * 5 + 3] *= 9
    layer = made_layer(torch.full((2, 1, 21, 21), 1 / 21), layout)
    norms = token_norms(made_capture([layer], tokens))
    assert torch.allclose(norms, tokens.square().sum(dim=-1).sqrt())
    assert norm_outliers(layout.to_grid(norms)).nonzero().tolist() == [[1, 2, 3]]


def test_norms_are_taken_before_the_final_norm() -> None:
    model, images = built("own vit")
    seen: list[torch.Tensor] = []
    model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # type: ignore
    found = token_norms(capture(model, images))
    assert torch.allclose(found, seen[0].norm(dim=-1), atol=1e-5)


def test_wrong_number_of_components_says_how_many_there_are() -> None:
    captured = capture(*built("own vit"))
    with pytest.raises(ValueError, match="from 1 to 40"):
        feature_components(captured, 41)
