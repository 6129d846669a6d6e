"""The numbers of the lecture's steps against the model's own parts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from served_runs import noise
from untrained_runs import a_run

import vision
from vision.inference.serve.served_model import ServedModel, Temperature
from vision.inference.serve.steps import Step, steps_of

SWIN = ("model=swin_mini", "model.width=16", "model.depths=[2,2]", "model.heads=[1,2]")
AT = (0.4, 0.9)


def walk(folder: Path, *words: str) -> tuple[ServedModel, np.ndarray, dict[str, Step]]:
    served = ServedModel("run", vision.load(a_run(folder, *words)), Temperature(2.0, "a test"))
    pixels = served.pixels(noise(), 10**6)
    return served, pixels, {step.id: step for step in steps_of(served, pixels, AT).steps}


def test_vit(tmp_path: Path) -> None:
    served, pixels, steps = walk(tmp_path / "run")
    model, x = served.loaded.model, served.loaded.batch([pixels])
    assert list(steps) == ["patches", "tokens", "positions", "attention", "pooled", "head"]
    assert steps["patches"].grid is not None and steps["patches"].grid.chosen == (1, 2)
    patch = x[0, :, 8:16, 16:24]
    conv = next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d))
    token = conv.weight.flatten(1) @ patch.flatten() + conv.bias
    assert steps["tokens"].vectors[0].first == pytest.approx(token[:8].tolist(), rel=1e-3)
    first, position, total = (v.first for v in steps["positions"].vectors)
    assert np.add(first, position) == pytest.approx(total, abs=1e-4)
    rows = steps["attention"].rows
    assert rows is not None and steps["attention"].columns is not None
    assert rows[0][1] == pytest.approx(np.mean([float(v) for v in rows[0][2:]]), rel=1e-3)
    with torch.inference_mode():
        logits = model(x)[0]
    head = steps["head"].rows
    assert head is not None
    assert [row[3] for row in head] == pytest.approx(
        sorted((logits / 2).softmax(0).tolist(), reverse=True), abs=1e-5
    )


@pytest.mark.parametrize("kind", ["swin_mini", "swinv2_mini"])
def test_swin(tmp_path: Path, kind: str) -> None:
    small = (f"model={kind}", *SWIN[1:], "model.window=3")
    _, _, steps = walk(tmp_path / "run", *small)
    expected = ["patches", "tokens", "positions", "windows-1", "shift-1", "merging-1"]
    assert list(steps) == [*expected, "windows-2", "head"]
    plain, shifted = steps["windows-1"].grid, steps["shift-1"].grid
    assert plain is not None and shifted is not None and plain.groups and shifted.groups
    # A grid of 6 × 6 has four windows of 3 × 3, whose first cell begins a window.
    assert plain.grid == (6, 6) and np.bincount(plain.groups).tolist() == [9] * 4
    assert len(set(np.array(plain.groups).reshape(6, 6)[:3, :3].flatten())) == 1
    assert plain.masked is None and shifted.groups != plain.groups
    # Attention within the window sums to 1, and nothing is outside it.
    values, own = np.array(plain.values), plain.groups[plain.chosen[0] * 6 + plain.chosen[1]]
    inside = np.array(plain.groups) == own
    assert values[inside].sum() == pytest.approx(1, abs=1e-4) and not values[~inside].any()
    # The chosen patch, in the last column, meets cells of the first one, which are masked.
    assert shifted.masked and not np.array(shifted.values)[shifted.masked].any()
    merged = steps["merging-1"]
    assert merged.grid is not None and merged.grid.grid == (3, 3)
    assert merged.vectors[0].width == 32


def test_merged_token_is_the_models_own(tmp_path: Path) -> None:
    served, pixels, steps = walk(tmp_path / "run", *SWIN, "model.window=3")
    model = served.loaded.model
    kept = []
    stage = model.get_submodule("layers.1")
    handle = stage.get_submodule("downsample").register_forward_hook(
        lambda module, inputs, output: kept.append(output)
    )
    with torch.inference_mode():
        model(served.loaded.batch([pixels]))
    handle.remove()
    # One window of 3 × 3: window order is row order.
    cell = steps["merging-1"].grid
    assert cell is not None
    token = kept[0][0, 3 * cell.chosen[0] + cell.chosen[1]]
    assert steps["merging-1"].vectors[0].first == pytest.approx(token[:8].tolist(), rel=1e-3)


def test_other_models_have_no_steps(tmp_path: Path) -> None:
    words = ("model=timm", "model.name=resnet18")
    served = ServedModel("run", vision.load(a_run(tmp_path / "run", *words)), Temperature(1.0, ""))
    with pytest.raises(ValueError, match="ViT and Swin"):
        steps_of(served, served.pixels(noise(), 10**6), AT)
