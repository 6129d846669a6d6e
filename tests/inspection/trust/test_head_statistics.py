"""Statistics of heads against closed forms and loops; tables of positions against the models'."""

import math

import pytest
import torch
from inspected_models import MODELS, built, dense, made_layer, own
from sklearn.decomposition import PCA
from torch import Tensor

from vision.inspection.capture.capture import capture
from vision.inspection.capture.token_layout import Layout
from vision.inspection.trust.head_statistics import (
    head_statistics,
    patch_filters,
    position_similarity,
    positionality,
    relative_biases,
)

GRID = Layout(("class",), (3, 4), (8, 16), (24, 64))


def test_statistics_of_made_heads_follow_closed_forms() -> None:
    tokens = GRID.tokens
    uniform = torch.full((tokens, tokens), 1 / tokens)
    itself = torch.eye(tokens)
    sink = torch.zeros(tokens, tokens)
    sink[:, 0] = 1
    right = torch.zeros(tokens, tokens)
    for y in range(3):
        for x in range(4):
            right[1 + 4 * y + x, 1 + 4 * y + (x + 1) % 4] = 1
    right[0, 0] = 1
    layer = made_layer(torch.stack([uniform, itself, sink, right])[None], GRID)
    found = head_statistics(layer)
    assert found.entropy[0].tolist() == pytest.approx([math.log(tokens), 0, 0, 0], abs=1e-5)
    assert found.prefix_mass[0].tolist() == pytest.approx([1 / tokens, 0, 1, 0], abs=1e-6)
    assert found.self_mass[0].tolist() == pytest.approx([1 / tokens, 1, 0, 0], abs=1e-6)
    # A step to the right is 16 pixels; from the last column back to the first it is 48.
    assert found.distance[0, 1].item() == 0
    assert found.distance[0, 3].item() == pytest.approx((3 * 16 + 48) / 4)
    mean = sum(
        math.hypot(8 * (y - v), 16 * (x - u))
        for y in range(3) for x in range(4) for v in range(3) for u in range(4)
    ) / 144  # fmt: skip
    assert found.distance[0, 0].item() == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "own swin padded",
        "own swin padded, attended",
        "timm swin padded",
        "torchvision swin padded",
    ],
)
def test_statistics_of_windows_equal_those_of_whole_matrices(name: str) -> None:
    captured = capture(*built(name))
    for layer in captured.layers:
        found = head_statistics(layer)
        layout, weights = layer.layout, dense(layer)
        cells = weights.sum(dim=-1)
        y = torch.arange(layout.cells) // layout.grid[1] * layout.stride[0]
        x = torch.arange(layout.cells) % layout.grid[1] * layout.stride[1]
        apart = torch.hypot((y[:, None] - y).float(), (x[:, None] - x).float())
        distance = (weights / cells[..., None].clamp(min=1e-30) * apart).sum(dim=-1).mean(dim=-1)
        assert torch.allclose(found.distance, distance, rtol=1e-4)
        assert torch.allclose(found.padding_mass, 1 - cells.mean(dim=-1), atol=1e-5)
        assert torch.allclose(
            found.self_mass, weights.diagonal(dim1=-2, dim2=-1).mean(dim=-1), atol=1e-6
        )
        window = torch.tensor(layout.window) * torch.tensor(layout.stride)
        far = ((y[:, None] - y).abs() >= window[0]) | ((x[:, None] - x).abs() >= window[1])
        assert torch.allclose(found.wrapped_mass, (weights * far).sum(-1).mean(-1), atol=1e-6)


def test_mass_on_padding_and_around_edges_shows_what_each_library_does() -> None:
    def masses(name: str) -> tuple[float, float]:
        found = [head_statistics(layer) for layer in capture(*built(name)).layers]
        padding = max(layer.padding_mass.max().item() for layer in found)
        return padding, max(layer.wrapped_mass.max().item() for layer in found)

    assert masses("own swin padded") == (0, 0)
    for name in ("own swin padded, attended", "torchvision swin padded"):
        padding, wrapped = masses(name)
        assert padding > 0.01 and wrapped < 1e-12
    padding, wrapped = masses("timm swin padded")  # rolls before it pads
    assert padding > 0.01 and wrapped > 0.01


@pytest.mark.parametrize("name", ["own swin padded", "own swin v2"])
def test_relative_biases_are_what_the_model_adds_to_its_scores(name: str) -> None:
    model, _ = built(name)
    tables = relative_biases(model)
    assert len(tables) == 7
    for key, table in tables.items():
        module = model.get_submodule(key)
        height, width = module.window  # type: ignore[misc]
        assert table.shape == (module.heads, 2 * height - 1, 2 * width - 1)
        bias = module.bias(None)  # type: ignore[operator]
        for query in range(height * width):
            for key_slot in range(height * width):
                dy = query // width - key_slot // width
                dx = query % width - key_slot % width
                expected = bias[0, :, query, key_slot]
                assert torch.allclose(table[:, dy + height - 1, dx + width - 1], expected)


@pytest.mark.parametrize(
    ("name", "number"),
    [(n, 4) for n in MODELS if "swin" in n and not n.startswith("own")] + [("own vit", 0)],
)
def test_relative_biases_of_others_are_found(name: str, number: int) -> None:
    model, _ = built(name)
    tables = relative_biases(model)
    assert len(tables) == number
    assert all(table.shape[1:] == (7, 7) and table.std() > 0 for table in tables.values())


@pytest.mark.parametrize("name", ["own swin padded", "own swin v2"])
def test_heads_without_content_are_entirely_positional(name: str) -> None:
    model, images = built(name)
    before = positionality(capture(model, images), model)
    for module in model.modules():
        if hasattr(module, "qkv"):
            with torch.no_grad():
                width = module.qkv.weight.shape[1]
                module.qkv.weight[:width] = 0
                for bias in (module.qkv.bias, getattr(module, "q_bias", None)):
                    if bias is not None:
                        bias[:width] = 0
    after = positionality(capture(model, images), model)
    for content, none in zip(before, after, strict=True):
        assert content.shape == none.shape and content.min() > 1e-3
        assert none.abs().max() < 1e-5


def test_positionality_of_global_heads_is_against_the_mean_over_images() -> None:
    model, images = built("own vit", batch=3)
    found = positionality(capture(model, images), model)
    layer = capture(model, images).layers[1]
    mean = layer.weights.mean(dim=0)
    rows = (layer.weights * (layer.weights / mean).log()).sum(dim=-1)
    assert torch.allclose(found[1], rows[:, :, 1:].mean(dim=-1), atol=1e-5)
    with pytest.raises(ValueError, match="at least two"):
        positionality(capture(model, images[:1]), model)


@pytest.mark.parametrize(
    "name", ["own vit", "timm vit", "timm dinov2 registers", "torchvision vit", "transformers vit"]
)
def test_position_similarity_is_the_cosine_of_two_cells(name: str) -> None:
    model, images = built(name)
    found = position_similarity(model)
    assert found is not None
    grid = capture(model, images, layers=[0]).layout.grid
    assert found.shape == (*grid, *grid)
    tables = [p for n, p in model.named_parameters() if n.endswith(
        ("positions.table", "pos_embed", "pos_embedding", "position_embeddings"))]  # fmt: skip
    cells: Tensor = tables[0][0, -grid[0] * grid[1] :]
    one, other = cells[1 * grid[1] + 2], cells[3 * grid[1] + 0]
    cosine = (one @ other / one.norm() / other.norm()).item()
    assert found[1, 2, 3, 0].item() == pytest.approx(cosine, abs=1e-6)
    assert torch.allclose(found.flatten(0, 1).flatten(1).diagonal(), torch.ones(()), atol=1e-5)


def test_rotary_positions_have_no_similarity() -> None:
    assert position_similarity(own("vit_base", (32, 32), positions="rotary")) is None


def test_patch_filters_equal_scikit_learns_components_up_to_sign() -> None:
    model, _ = built("own vit")
    found = patch_filters(model, 5)
    assert found.shape == (5, 3, 8, 8)
    weights = model.patch_embed.proj.weight.detach().flatten(1)  # type: ignore[union-attr, operator]
    expected = torch.from_numpy(PCA(5).fit(weights.numpy()).components_)
    assert torch.allclose(found.flatten(1).abs(), expected.abs(), atol=1e-4)
    assert len(patch_filters(model, 1000)) == 48


def test_statistics_of_images_do_not_depend_on_each_other() -> None:
    model, images = built("own swin padded")
    both, alone = capture(model, images).layers, capture(model, images[1:]).layers
    for pair, one in zip(both, alone, strict=True):
        expected = head_statistics(one).distance
        assert torch.allclose(head_statistics(pair).distance[1:], expected, atol=1e-4)
