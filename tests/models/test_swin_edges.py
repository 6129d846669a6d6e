"""What a Swin's tokens can see of each other: their windows, nothing across an edge, no padding."""

import pytest
import torch
import torch.nn.functional as F
from model_settings import random_images, small_model
from torch import Tensor

import vision.models.layers
from vision.models.layers import Grid

VERSIONS = ["swin_tiny", "swinv2_tiny"]


def windows_of(cells: int, window: int, shift: int) -> Tensor:
    """The number of the window of every row or column; what a shift leaves over is a window too."""
    return torch.div(torch.arange(cells) - shift, window, rounding_mode="floor")


def sees(grid: Grid, window: Grid, shift: Grid) -> Tensor:
    """Whether token n sees token m in one block: (n m)."""
    rows, columns = (windows_of(*axis) for axis in zip(grid, window, shift, strict=True))
    same_row, same_column = rows[:, None] == rows[None], columns[:, None] == columns[None]
    return torch.einsum("yv,xu->yxvu", same_row.int(), same_column.int()).flatten(0, 1).flatten(1)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("grid", "window", "shift"),
    [
        ((8, 8), (4, 4), (2, 2)),
        ((10, 9), (4, 4), (2, 2)),
        ((7, 12), (3, 5), (1, 2)),
        ((5, 7), (16, 16), (0, 0)),
        ((5, 11), (16, 4), (0, 2)),
        ((9, 9), (2, 2), (1, 1)),
        ((4, 5), (1, 1), (0, 0)),
    ],
)
def test_swin_token_after_two_blocks_depends_on_its_two_windows_only(
    version: str, grid: Grid, window: Grid, shift: Grid
) -> None:
    model = small_model(
        version, grid, channels=1, patch_size=1, depths=[2], heads=[2], window=list(window)
    )
    images = random_images(1, 1, *grid).requires_grad_()
    features = model.forward_features(images)[0] @ random_images(16, seed=3)
    found = torch.stack(
        [torch.autograd.grad(token, images, retain_graph=True)[0].flatten() for token in features]
    )
    plain, shifted = sees(grid, window, (0, 0)), sees(grid, window, shift)
    assert torch.equal(found != 0, shifted @ plain > 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_swin_at_an_image_size_that_windows_do_not_divide_leaks_nothing_across_the_edge(
    version: str,
) -> None:
    # A grid of 64 in windows of 7 is 256 pixels on a Swin-T. Padded after the shift, the last rows
    # would see the first ones.
    model = small_model(version, (256, 256), patch_size=4, depths=[2], heads=[2], window=7, width=8)
    images = random_images(1, 3, 256, 256).requires_grad_()
    tokens = model.forward_features(images).view(64, 64, 8) @ random_images(8, seed=3)
    (by_row,) = torch.autograd.grad(tokens[62].sum(), images, retain_graph=True)
    (by_column,) = torch.autograd.grad(tokens[:, 62].sum(), images)
    assert by_row[:, :, : 56 * 4].eq(0).all()
    assert by_row[:, :, 56 * 4 :].ne(0).all()
    assert by_column[..., : 56 * 4].eq(0).all()
    assert by_column[..., 56 * 4 :].ne(0).all()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("size", [(36, 44), (26, 22), (30, 30), (6, 70)])
def test_swin_logits_do_not_depend_on_what_padding_holds(
    version: str, size: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(version, size)
    images = random_images(2, 3, *size)
    expected = model(images)

    def noisy(images: Tensor, step: Grid) -> Tensor:
        below, right = -images.shape[2] % step[0], -images.shape[3] % step[1]
        padded = random_images(*F.pad(images, (0, right, 0, below)).shape, seed=9)
        padded[:, :, : images.shape[2], : images.shape[3]] = images
        return padded

    monkeypatch.setattr(vision.models.layers, "pad_to_multiple", noisy)
    embedded = model.patch_embed(images, (4, 4))
    assert embedded[:, :, -1].std() > 0.1  # there is something to be seen
    assert torch.equal(model(images), expected)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_swin_image_of_a_batch_gets_the_logits_that_it_gets_alone(version: str, mode: str) -> None:
    model = small_model(version, (36, 28)).train(mode == "train")
    images = random_images(3, 3, 36, 28)
    together = model(images)
    alone = torch.cat([model(images[i : i + 1]) for i in range(3)])
    assert (together - alone).abs().max().item() < 1e-5
    assert (together[0] - together[1]).abs().max().item() > 1e-2


@pytest.mark.parametrize("size", [(32, 32), (16, 48), (4, 4)])
def test_swin_v2_down_to_windows_of_one_token_is_finite(size: Grid) -> None:
    # At 32 pixels and patch 4 the last of four grids is a single token.
    model = small_model(
        "swinv2_tiny", size, patch_size=4, window=8, depths=[2, 2, 2, 2], heads=[1, 2, 2, 2]
    )
    assert model.windows[-1] == (1, 1 if size[1] < 48 else 2)
    logits = model(random_images(2, 3, *size))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
