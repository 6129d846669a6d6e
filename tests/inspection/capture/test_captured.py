"""Where tokens lie: names, cells, windows, shifts, padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inspected_models import MODELS, built, reach
from model_settings import random_images
from torch import Tensor

from vision.inspection.capture.capture import capture
from vision.inspection.capture.foreign_models import shift_regions, window_index
from vision.inspection.capture.token_layout import Layout

SIZES = st.tuples(st.integers(1, 11), st.integers(1, 11))


def global_layout() -> Layout:
    return Layout(("class", "register 1"), (2, 3), (8, 8), (14, 24))


@given(grid=SIZES, window=st.tuples(st.integers(1, 4), st.integers(1, 4)), data=st.data())
def test_every_cell_is_in_the_slot_that_rolling_puts_it_in(
    grid: tuple[int, int], window: tuple[int, int], data: st.DataObject
) -> None:
    shift = tuple(data.draw(st.integers(0, w - 1)) for w in window)
    padded = [-(-g // w) * w for g, w in zip(grid, window, strict=True)]
    index = window_index(grid, window, shift, pad_first=True)  # type: ignore[arg-type]
    layout = Layout(
        (), grid, (4, 4), (grid[0] * 4, grid[1] * 4), window=window, shift=shift,  # type: ignore
        index=index, allowed=None,
    )  # fmt: skip
    for y in range(grid[0]):
        for x in range(grid[1]):
            row, column = (y - shift[0]) % padded[0], (x - shift[1]) % padded[1]
            number = row // window[0] * (padded[1] // window[1]) + column // window[1]
            slot = row % window[0] * window[1] + column % window[1]
            assert layout.slot(layout.query((y, x))) == (number, slot)
    assert int((index < 0).sum()) == padded[0] * padded[1] - grid[0] * grid[1]


@pytest.mark.parametrize("name", ["own swin", "own swin padded", "own swin v2"])
def test_cells_of_one_block_are_those_that_the_block_before_left_there(name: str) -> None:
    """Between blocks our Swin only permutes tokens: seen as cells, nothing moves."""
    model, images = built(name)
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for s, stage in enumerate(model.layers):  # type: ignore[arg-type, union-attr]
        for i, block in enumerate(stage.blocks):
            key = f"layers.{s}.blocks.{i}"
            block.register_forward_pre_hook(lambda _, a, k=key: before.update({k: a[0]}))
            block.register_forward_hook(lambda _, a, out, k=key: after.update({k: out}))
    layers = {x.name.removesuffix(".attn"): x.layout for x in capture(model, images).layers}

    def cells(tokens: Tensor, layout: Layout) -> Tensor:
        assert layout.index is not None
        return layout.by_cell(tokens.unflatten(1, layout.index.shape).movedim(-1, 1))

    patches = model.patch_norm(model.patch_embed(images).flatten(2).transpose(1, 2))  # type: ignore
    first = cells(before["layers.0.blocks.0"], layers["layers.0.blocks.0"])
    assert torch.allclose(first, patches.transpose(1, 2), atol=1e-5)
    shifted = 0
    for key, layout in layers.items():
        stage, block = key.rsplit(".", 1)
        previous = f"{stage}.{int(block) - 1}"
        if previous in layers:
            there = cells(after[previous], layers[previous])
            assert torch.equal(cells(before[key], layout), there)
            assert layout.shift is not None and layout.index is not None
            if any(layout.shift):
                shifted += 1
                opposite = (-layout.shift[0], -layout.shift[1])
                assert layout.window is not None
                wrong = window_index(layout.grid, layout.window, opposite, pad_first=True)
                mistaken = Layout(
                    (), layout.grid, layout.stride, layout.image_size, window=layout.window,
                    shift=opposite, index=wrong, allowed=None,
                )  # fmt: skip
                assert not torch.allclose(cells(before[key], mistaken), there)
    assert shifted >= 2


@pytest.mark.parametrize("name", [n for n in MODELS if "swin" in n])
def test_pairs_that_are_masked_have_no_weight_and_all_others_some(name: str) -> None:
    model, images = built(name, batch=1)
    masked = 0
    for layer in capture(model, images).layers:
        if layer.layout.allowed is not None:
            weights = layer.weights[0].amax(dim=1)
            masked += int((~layer.layout.allowed).sum())
            assert weights[~layer.layout.allowed].max() < 1e-12
            assert weights[layer.layout.allowed].min() > 1e-12
    assert masked > 0


@pytest.mark.parametrize("name", ["own swin padded", "timm swin", "torchvision swin padded"])
def test_row_of_a_window_is_placed_in_the_whole_grid(name: str) -> None:
    model, images = built(name)
    layer = capture(model, images).layers[1]
    layout = layer.layout
    assert layout.index is not None and layout.shift is not None and any(layout.shift)
    cell = (layout.grid[0] - 1, 2)
    row = layer.row(cell)
    window, slot = layout.slot(layout.query(cell))
    near, hidden = reach(layout, cell), layout.masked(cell)
    assert not bool((near & hidden).any())
    # In the padded grids of this test it is padding that a shift brings together with the cell.
    assert bool(hidden.any()) == (name == "timm swin")
    for j, token in enumerate(layout.index[window].tolist()):
        if token >= 0:
            y, x = divmod(token, layout.grid[1])
            assert torch.equal(row[:, :, token], layer.weights[:, window, :, slot, j])
            assert bool(near[y, x]) != bool(hidden[y, x])
    assert torch.all(layout.to_grid(row)[:, :, ~(near | hidden)] == 0)
    assert layout.keys(cell) >= int(near.sum())


@given(grid=SIZES, data=st.data())
def test_outlines_cover_every_cell_once_and_do_not_cross_masks(
    grid: tuple[int, int], data: st.DataObject
) -> None:
    window = (3, 4)
    shift = (data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3)))
    layout = Layout(
        (), grid, (4, 4), (44, 44), window=window, shift=shift,
        index=window_index(grid, window, shift, pad_first=True),
        allowed=shift_regions(grid, window, shift),
    )  # fmt: skip
    count = torch.zeros(grid, dtype=torch.int64)
    for top, left, bottom, right in layout.outlines():
        assert bottom - top <= window[0] and right - left <= window[1]
        count[top:bottom, left:right] += 1
        inside = reach(layout, (top, left))[top:bottom, left:right]
        assert bool(inside.all())
    assert bool((count == 1).all())


def test_global_layout_names_places_and_reshapes() -> None:
    layout = global_layout()
    assert [layout.query(p) for p in ("class", "register 1", (0, 0), (1, 2))] == [0, 1, 2, 7]
    assert [layout.place(i) for i in (0, 1, 2, 7)] == ["class", "register 1", (0, 0), (1, 2)]
    assert layout.query((-1, -1)) == 7
    values = torch.arange(8.0)
    assert layout.to_grid(values).tolist() == [[2, 3, 4], [5, 6, 7]]
    assert {k: v.item() for k, v in layout.prefix_values(values).items()} == {
        "class": 0,
        "register 1": 1,
    }
    assert layout.cell_at((13, 23)) == (1, 2) and layout.box((1, 2)) == (8, 16, 14, 24)
    assert layout.outlines() == [(0, 0, 2, 3)]
    weights = random_images(1, 2, 8, 8)
    assert torch.equal(layout.row(weights, (0, 1)), weights[:, :, 3])


def test_layout_asked_for_what_is_not_there_says_what_is() -> None:
    layout = global_layout()
    with pytest.raises(ValueError, match=r"token 'distillation'.*class, register 1"):
        layout.query("distillation")
    with pytest.raises(ValueError, match="outside the grid of 2 rows, 3 columns"):
        layout.query((2, 0))
    with pytest.raises(ValueError, match="Expected values of 8 tokens"):
        layout.to_grid(torch.zeros(6))
    with pytest.raises(ValueError, match="outside the image"):
        layout.cell_at((14, 0))
    with pytest.raises(ValueError, match="no windows"):
        _ = layout.slots
