"""Rollout, in blocks and row by row, against products of whole matrices."""

from typing import Any

import pytest
import torch
from inspected_models import (
    built,
    dense,
    made_capture,
    made_layer,
    merge_matrix,
    reach,
    rows_normal,
)
from model_settings import random_images
from torch import Tensor

from vision.inspection.capture.capture import capture
from vision.inspection.capture.captured import Captured, LayerAttention
from vision.inspection.capture.foreign_models import shift_regions, window_index
from vision.inspection.capture.token_layout import Layout
from vision.inspection.methods.layer_maps import cam_seed
from vision.inspection.methods.rollout import rollout, rollout_steps, seed_of


def whole_rollout(
    captured: Captured, fusion: str, residual: float, discard: float, start: int
) -> Tensor:
    """The product of all layers, with merging matrices in between: (b last first)."""
    result: Tensor | None = None
    below: LayerAttention | None = None
    for layer in captured.layers[start:]:
        weights = dense(layer)
        match fusion:
            case "mean":
                matrix = weights.mean(dim=1)
            case "max":
                matrix = weights.max(dim=1).values
            case _:
                matrix = weights.min(dim=1).values
        matrix = discarded(matrix, layer, discard)
        size = matrix.shape[-1]
        matrix = rows_normal((1 - residual) * matrix + residual * torch.eye(size))
        if below is not None and below.layout.grid != layer.layout.grid:
            assert result is not None
            result = merge_matrix(layer.layout.grid, below.layout.grid) @ result
        result = matrix if result is None else matrix @ result
        below = layer
    assert result is not None
    return result


def discarded(matrix: Tensor, layer: LayerAttention, share: float) -> Tensor:
    matrix = matrix.clone()
    prefix = len(layer.layout.prefix)
    for image in matrix:
        for i, row in enumerate(image):
            if layer.layout.index is None:
                keys = [j for j in range(prefix, len(row)) if j != i]
            else:
                near = reach(layer.layout, divmod(i, layer.layout.grid[1])).flatten()
                keys = [j for j in range(len(row)) if near[j] and j != i]
            keys.sort(key=lambda j, row=row: row[j].item())
            row[keys[: int(len(keys) * share)]] = 0
    return matrix


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
@pytest.mark.parametrize(
    ("residual", "discard", "start"), [(0.5, 0.0, 0), (0.2, 0.0, 1), (0.5, 0.7, 0), (0.0, 0.3, 0)]
)
@pytest.mark.parametrize("name", ["own vit registers", "own swin padded"])
def test_rollout_row_by_row_equals_product_of_whole_matrices(
    name: str, fusion: Any, residual: float, discard: float, start: int
) -> None:
    captured = capture(*built(name))
    whole = whole_rollout(captured, fusion, residual, discard, start)
    options: dict[str, Any] = {"fusion": fusion, "residual": residual, "discard": discard}
    for place in ("pool", (1, 2), (captured.layout.grid[0] - 1, 0)):
        seed = seed_of(captured, place)  # type: ignore[arg-type]
        found = rollout(captured, seed, **options, start_layer=start)
        assert torch.allclose(found, seed @ whole, atol=1e-6)
        assert torch.allclose(found.sum(dim=-1), torch.ones(()), atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["own swin", "own swin v2", "timm swin", "timm swin padded", "timm swin v2",
     "torchvision swin padded", "torchvision swin v2", "transformers swin", "transformers swin v2"],
)  # fmt: skip
def test_rollout_in_blocks_equals_dense_and_sums_to_one(name: str) -> None:
    captured = capture(*built(name, batch=1))
    whole = whole_rollout(captured, "mean", 0.5, 0.0, 0)
    every = torch.eye(captured.layout.tokens)[None]
    found = rollout(captured, every)
    assert torch.allclose(found, whole, atol=1e-6)
    assert torch.allclose(found.sum(dim=-1), torch.ones(()), atol=1e-5)
    assert captured.layers[0].layout.stride == ((2, 2) if name.startswith("own") else (4, 4))


def test_rollout_of_a_class_token_equals_the_published_form() -> None:
    """Abnar & Zuidema: 0.5 A + 0.5 I, multiplied from the first layer to the last."""
    captured = capture(*built("own vit"))
    joint = torch.eye(captured.layout.tokens)
    for layer in captured.layers:
        joint = (0.5 * layer.weights.mean(dim=1) + 0.5 * torch.eye(len(joint[0]))) @ joint
    assert torch.allclose(rollout(captured, seed_of(captured))[:, 0], joint[:, 0], atol=1e-6)


def test_rollout_with_measured_residual_mixes_by_the_norms_of_branch_and_stream() -> None:
    model, images = built("own vit")
    streams: list[Tensor] = []
    branches: list[Tensor] = []
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
        block.ls1.register_forward_hook(lambda _, args, out: branches.append(out))
    captured = capture(model, images)
    whole = torch.eye(captured.layout.tokens)
    for layer, x, branch in zip(captured.layers, streams, branches, strict=True):
        share = branch.norm(dim=-1) / (branch.norm(dim=-1) + x.norm(dim=-1))
        step = share[..., None] * layer.weights.mean(dim=1)
        whole = (step + torch.diag_embed(1 - share)) @ whole
    seed = seed_of(captured, (2, 1))
    found = rollout(captured, seed, residual="measured")
    assert torch.allclose(found, seed @ whole, atol=1e-6)
    assert not torch.allclose(found, rollout(captured, seed), atol=1e-3)


def test_rollout_step_by_step_ends_with_the_whole() -> None:
    captured = capture(*built("own swin"))
    seed = seed_of(captured)
    steps = list(rollout_steps(captured, seed))
    assert [layer.number for layer, _ in steps] == list(range(captured.depth))[::-1]
    assert torch.equal(steps[-1][1], rollout(captured, seed))
    assert all(torch.allclose(rows.sum(-1), torch.ones(())) for _, rows in steps)


def test_rollout_from_a_cell_of_an_early_layer_stays_below_it() -> None:
    captured = capture(*built("own swin padded"))
    seed = seed_of(captured, (3, 5), layer=0)
    found = rollout(captured, seed, end_layer=0)[:, 0]
    expected = dense(captured.layers[0]).mean(dim=1)[:, 3 * captured.layers[0].layout.grid[1] + 5]
    assert torch.allclose(found, 0.5 * expected + 0.5 * seed[:, 0], atol=1e-6)


# Planted attention ------------------------------------------------------------------------------


def planted(target: tuple[int, int], *, wrong_shift: bool = False) -> Captured:
    """Three stages of two blocks on a padded grid. In the last block of each stage every token
    looks at the ancestor of one cell of the first stage, as far as its window lets it; in the first
    block of each, tokens look at themselves.
    """
    layers = []
    for stage, grid in enumerate([(18, 22), (9, 11), (5, 6)]):
        for block in range(2):
            shift = (2, 2) if block and stage < 2 else (0, 0)
            goal = target if block else None
            layers.append(_planted_layer(grid, stage, shift, goal, len(layers)))
    if wrong_shift:
        layers = [_mistaken(layer) for layer in layers]
    return made_capture(layers)


def _planted_layer(
    grid: tuple[int, int],
    stage: int,
    shift: tuple[int, int],
    target: tuple[int, int] | None,
    number: int,
) -> LayerAttention:
    window = (4, 4) if stage < 2 else grid
    index = window_index(grid, window, shift, pad_first=True)
    layout = Layout(
        (), grid, (4 * 2**stage, 4 * 2**stage), (72, 88), window=window, shift=shift, index=index,
        allowed=shift_regions(grid, window, shift),
    )  # fmt: skip
    goal = None if target is None else target[0] // 2**stage * grid[1] + target[1] // 2**stage
    weights = torch.eye(index.shape[1]).repeat(1, len(index), 1, 1, 1)
    for w in range(len(index)):
        for j, token in enumerate(index[w].tolist()):
            if token == goal:
                weights[0, w] = 0
                weights[0, w, :, :, j] = 1
    return made_layer(weights, layout, number)


def _mistaken(layer: LayerAttention) -> LayerAttention:
    """The same weights, read as if the shift had gone the other way."""
    layout = layer.layout
    assert layout.shift is not None and layout.window is not None
    opposite = (-layout.shift[0], -layout.shift[1])
    index = window_index(layout.grid, layout.window, opposite, pad_first=True)
    wrong = Layout((), layout.grid, layout.stride, layout.image_size, layout.window,
                   opposite, index, None)  # fmt: skip
    return made_layer(layer.weights, wrong, layer.number)


@pytest.mark.parametrize("target", [(0, 0), (3, 20), (17, 5), (17, 21), (8, 11)])
def test_planted_attention_comes_back_to_the_planted_cell(target: tuple[int, int]) -> None:
    captured = planted(target)
    found = rollout(captured, seed_of(captured), residual=0.0)[0, 0]
    assert found[captured.layers[0].layout.query(target)] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("target", [(0, 0), (3, 20), (17, 5), (8, 11)])
def test_planted_attention_read_with_the_wrong_shift_is_lost(target: tuple[int, int]) -> None:
    captured = planted(target, wrong_shift=True)
    found = rollout(captured, seed_of(captured), residual=0.0)[0, 0]
    assert found[captured.layers[0].layout.query(target)] < 0.5


# Seeds ------------------------------------------------------------------------------------------


def test_pooled_query_is_what_the_head_sees() -> None:
    cases = {
        "own vit": lambda n: [1.0] + [0.0] * (n - 1),
        "own swin": lambda n: [1 / n] * n,
        "timm deit distilled": lambda n: [0.5, 0.5] + [0.0] * (n - 2),
        "transformers dinov2 registers": lambda n: [0.5, 0, 0, 0, 0] + [0.5 / (n - 5)] * (n - 5),
    }
    for name, expected in cases.items():
        captured = capture(*built(name))
        seed = seed_of(captured)[0, 0]
        assert seed.tolist() == pytest.approx(expected(len(seed)))


@pytest.mark.parametrize("name", ["own swin padded", "own vit mean", "torchvision swin v2"])
def test_class_seeded_rollout_starts_from_cells_that_speak_for_the_class(name: str) -> None:
    captured = capture(*built(name))
    seeds = [cam_seed(captured, torch.tensor([c, c])) for c in (1, 2)]
    for seed in seeds:
        assert torch.allclose(seed.sum(dim=-1), torch.ones(()), atol=1e-5) and seed.min() >= 0
        found = rollout(captured, seed)
        assert torch.allclose(found.sum(dim=-1), torch.ones(()), atol=1e-5)
    assert not torch.allclose(rollout(captured, seeds[0]), rollout(captured, seeds[1]), atol=1e-4)


# What goes wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual": 1.5}, "from 0 to 1 or 'measured', found 1.5"),
        ({"residual": "auto"}, "or 'measured', found 'auto'"),
        ({"discard": 1.0}, "at least 0 and below 1"),
        ({"fusion": "median"}, "Unknown fusion"),
        ({"start_layer": 3}, "Layer 3 was not captured"),
        ({"start_layer": 2, "end_layer": 0}, "lies above"),
    ],
)
def test_rollout_with_wrong_options_says_what_is_expected(
    options: dict[str, Any], message: str
) -> None:
    captured = capture(*built("own vit"))
    with pytest.raises(ValueError, match=message):
        rollout(captured, seed_of(captured), **options)


def test_rollout_of_what_was_not_captured_says_so() -> None:
    model, images = built("own vit")
    some = capture(model, images, layers=[0, 2])
    with pytest.raises(ValueError, match="needs all 3 layers, but only 2"):
        rollout(some, seed_of(some))
    reduced = capture(model, images, reduce="mean")
    with pytest.raises(ValueError, match="'max' is not available"):
        rollout(reduced, seed_of(reduced), fusion="max")
    layer = made_layer(random_images(1, 1, 4, 4).softmax(-1), Layout((), (2, 2), (8, 8), (16, 16)))
    made = made_capture([layer])
    with pytest.raises(ValueError, match="could not be measured"):
        rollout(made, seed_of(made), residual="measured")
    with pytest.raises(ValueError, match="Expected a seed"):
        rollout(made, torch.ones(1, 4))
