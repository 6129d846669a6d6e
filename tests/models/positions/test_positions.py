"""Position encodings against closed forms, written in numpy from their definitions."""

import numpy as np
import pytest
import torch
from model_settings import model_config, random_images, small_model
from numpy.typing import NDArray
from torch import Tensor

from vision.models.configs import ViTConfig
from vision.models.layers import Grid
from vision.models.positions.added import (
    FourierPositions,
    LearnedPositions,
    SinCos2d,
)
from vision.models.positions.rotary import Rotation, rotary_positions, rotate
from vision.models.vit import ViT

GRIDS: list[Grid] = [(14, 14), (5, 9), (24, 3), (1, 1)]


def sincos2d(grid: Grid, width: int) -> NDArray[np.float64]:
    """[sin x, cos x, sin y, cos y] at frequencies 10000^-(k / (q - 1)), q = width / 4."""
    y, x = np.mgrid[: grid[0], : grid[1]]
    quarter = width // 4
    frequency = 10_000.0 ** -(np.arange(quarter) / (quarter - 1))
    column, row = x.reshape(-1, 1) * frequency, y.reshape(-1, 1) * frequency
    return np.concatenate([np.sin(column), np.cos(column), np.sin(row), np.cos(row)], axis=1)


def fourier(grid: Grid, configured: Grid, bands: int) -> NDArray[np.float64]:
    """sin and cos of π f p; f in equal steps from 1 to half the configured grid; p the centre of a
    cell on [-1, 1]. Rows first.
    """
    parts = []
    y, x = np.mgrid[: grid[0], : grid[1]]
    for index, cells, limit in ((y, grid[0], configured[0]), (x, grid[1], configured[1])):
        centre = (index.reshape(-1, 1) + 0.5) / cells * 2 - 1
        angle = np.pi * np.linspace(1, max(limit / 2, 1), bands) * centre
        parts += [np.sin(angle), np.cos(angle)]
    return np.concatenate(parts, axis=1)


def close(found: Tensor, expected: NDArray[np.float64], tolerance: float = 2e-6) -> bool:
    return bool(np.abs(found.detach().double().numpy() - expected).max() < tolerance)


@pytest.mark.parametrize("grid", GRIDS)
def test_sincos2d_at_any_grid_equals_its_definition(grid: Grid) -> None:
    expected = sincos2d(grid, 48)
    assert close(SinCos2d(grid, 48)(grid)[0], expected)
    assert close(SinCos2d((7, 7), 48)(grid)[0], expected)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("configured", [(14, 14), (3, 8)])
def test_fourier_features_at_any_grid_equal_their_definition(grid: Grid, configured: Grid) -> None:
    positions = FourierPositions(configured, 12)
    positions.init_weights(torch.Generator().manual_seed(0))
    expected = fourier(grid, configured, positions.bands)
    (features,) = positions.features(grid)
    assert close(features[0], expected, 2e-5)
    weight, bias = (p.detach().double().numpy() for p in positions.proj.parameters())
    assert close(positions(grid)[0], expected @ weight.T + bias, 2e-5)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("prefix", [0, 3])
def test_rotation_at_any_grid_equals_its_definition(grid: Grid, prefix: int) -> None:
    # A pair of channels is a complex number, turned by column · 100^-(4i / d) in the first half of
    # the pairs and by row · the same in the second; prefix tokens keep their direction.
    width = 16
    tokens = prefix + grid[0] * grid[1]
    x = random_images(2, 3, tokens, width)
    y_cell, x_cell = np.mgrid[: grid[0], : grid[1]]
    frequency = 100.0 ** -(np.arange(width // 4) / (width // 4))
    angle = np.concatenate(
        [x_cell.reshape(-1, 1) * frequency, y_cell.reshape(-1, 1) * frequency], axis=1
    )
    angle = np.concatenate([np.zeros((prefix, width // 2)), angle])
    pairs = x.double().numpy().reshape(2, 3, tokens, width // 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    expected = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    rotation = rotation_of((7, 7), width, prefix, grid)
    assert close(rotate(x, rotation), expected, 1e-5)


def test_rotation_of_queries_and_keys_leaves_scores_to_relative_positions() -> None:
    rotation = rotation_of((6, 6), 16, 0, (6, 6))
    q, k = random_images(16, seed=1), random_images(16, seed=2)
    turned_q, turned_k = (rotate(v.expand(1, 1, 36, 16), rotation)[0, 0] for v in (q, k))
    scores = (turned_q @ turned_k.T).view(6, 6, 6, 6)
    assert torch.allclose(scores[:5, :4, :5, :4], scores[1:, 2:, 1:, 2:], atol=1e-5)
    assert (scores[0, 0] - scores[0, 0, 0, 0]).abs().max() > 0.1


def rotation_of(configured: Grid, width: int, prefix: int, grid: Grid) -> Rotation:
    config = model_config("vit_base", width=4 * width, heads=4, positions="rotary")
    assert isinstance(config, ViTConfig)
    return rotary_positions(config, configured, prefix)(grid)[0]


ENCODINGS = ["learned", "sincos2d", "fourier", "rotary", "none"]


def embedded(model: ViT, images: Tensor) -> Tensor:
    """What enters the first block."""
    seen: list[Tensor] = []
    hook = model.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(images)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("positions", ENCODINGS)
@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("class_token", [True, False])
def test_vit_adds_positions_to_patches_row_by_row(
    positions: str, registers: int, class_token: bool
) -> None:
    model = small_model(
        "vit_base",
        (24, 40),
        positions=positions,
        registers=registers,
        class_token=class_token,
        pool="mean",
    )
    assert isinstance(model, ViT)
    images = random_images(2, 3, 24, 40)
    tokens = embedded(model, images)
    table = torch.zeros(15, 48)
    class_position = torch.zeros(48)
    match model.positions:
        case LearnedPositions(table=parameter):
            table = parameter.detach()[0, -15:]
            class_position = parameter.detach()[0, 0] if class_token else class_position
        case SinCos2d():
            table = torch.from_numpy(sincos2d((3, 5), 48)).float()
        case FourierPositions() as encoding:
            table = encoding((3, 5)).detach()[0]
    expected = []
    if model.cls_token is not None:
        expected.append((model.cls_token[0] + class_position).expand(2, 1, 48))
    if model.reg_token is not None:
        expected.append(model.reg_token.expand(2, registers, 48))
    patches = torch.stack(
        [
            torch.einsum(
                "bchw,dchw->bd",
                images[:, :, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8],
                model.patch_embed.proj.weight,
            )
            + model.patch_embed.proj.bias
            for y in range(3)
            for x in range(5)
        ],
        dim=1,
    )
    expected.append(patches + table)
    assert torch.allclose(tokens, torch.cat(expected, dim=1), atol=1e-5)


@pytest.mark.parametrize("positions", ["learned", "sincos2d", "fourier", "rotary"])
def test_vit_with_positions_tells_moved_patches_apart(positions: str) -> None:
    images = random_images(1, 3, 32, 32)
    moved = images.roll(8, dims=3)  # whole patches, so a model without positions sees no change
    with torch.no_grad():
        model = small_model("vit_base", (32, 32), positions=positions)
        assert (model(images) - model(moved)).abs().max() > 1e-2
        model = small_model("vit_base", (32, 32), positions="none")
        assert (model(images) - model(moved)).abs().max() < 1e-5
