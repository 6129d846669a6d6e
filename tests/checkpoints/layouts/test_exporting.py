"""Parts that all exports share."""

from pathlib import Path

import torch
from model_settings import small_model
from safetensors.torch import save_file
from torch import Tensor, nn

from vision.checkpoints.layouts.exporting import Export, position_rows
from vision.checkpoints.open import open_model
from vision.models.layers import Grid


class Ramp(nn.Module):
    """An encoding that this project does not have: the number of each cell."""

    def forward(self, grid: Grid) -> Tensor:
        cells = torch.arange(1.0, grid[0] * grid[1] + 1)
        return cells[None, :, None].expand(1, -1, 48)


def test_positions_of_any_class_become_the_table_that_the_model_adds(tmp_path: Path) -> None:
    save_file(small_model("vit_base", (32, 32)).state_dict(), tmp_path / "weights.safetensors")
    opened = open_model(tmp_path / "weights.safetensors", heads=3)
    opened.model.positions = Ramp()
    table = position_rows(Export(opened, opened.tensors), rows=1)
    torch.testing.assert_close(table[0, :, 0], torch.arange(0.0, 17))
